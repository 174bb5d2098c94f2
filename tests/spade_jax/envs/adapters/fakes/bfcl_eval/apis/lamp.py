class Lamp:
    def _load_scenario(self, scenario, long_context=False):
        self.lit = scenario["lit"]

    def switch(self, lit):
        self.lit = lit
        return {"lit": lit}

    def look(self):
        return {"lit": self.lit}

    def smash(self):
        raise ValueError("no")
