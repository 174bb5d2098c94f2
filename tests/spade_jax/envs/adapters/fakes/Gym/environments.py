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

    def verifier(self, output):
        begin, end = self.markers
        assert output.startswith(begin) and output.endswith(end)
        answer = output[len(begin) : -len(end)]
        right = answer == str(self.parameter["reference_answer"])
        return {"reward": 1.0 if right else -1.0}


class Unsolved(Doubling):
    def generator(self, seed, parameter):
        super().generator(seed, parameter)
        del self.parameter["reference_answer"]
        return True


identifier2environment = {"Doubling": Doubling, "Unsolved": Unsolved}
