class Controller:
    top = 10

    def update(self):
        self.top *= 10

    def get_parameter_list(self):
        return [{"top": self.top}]


identifier2controller = {"Doubling": Controller, "Unsolved": Controller}
