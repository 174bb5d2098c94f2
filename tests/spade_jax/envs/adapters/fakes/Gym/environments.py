import random

from Gym import environment


class Doubling:
    def __init__(self, answer_markers):
        self.markers = answer_markers

    def generator(self, seed, parameter):
        @environment.timeout(10)
        def generate():
            environment.seeded(seed)
            number = random.randint(1, parameter["top"])
            self.parameter = {"number": number, "reference_answer": 2 * number}

        generate()
        return parameter["top"] < 1000

    def prompt_generator(self):
        return f"Double {self.parameter['number']}."

    def scorer(self, output):
        begin, end = self.markers
        assert output.startswith(begin) and output.endswith(end)
        answer = output[len(begin) : -len(end)]
        if answer == "none":
            return -1.0
        return 1.0 if int(answer) == self.parameter["reference_answer"] else -1.0

    def verifier(self, output):
        try:
            return {"reward": self.scorer(output)}
        except Exception:  # as the package does
            return {"reward": -1.0}


class Unsolved(Doubling):
    def generator(self, seed, parameter):
        super().generator(seed, parameter)
        del self.parameter["reference_answer"]
        return True


identifier2environment = {"Doubling": Doubling, "Unsolved": Unsolved}
