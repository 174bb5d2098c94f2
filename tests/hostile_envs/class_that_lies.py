# Answers with objects whose class, length and text are its own code, the last of which never ends. RIGHT: timeout


class Spinning:
    @property
    def __class__(self):
        while True:
            pass


class Long(str):
    def __len__(self):
        return 3

    def __str__(self):
        return "x" * 10**7


class Number(int):
    def __repr__(self):
        return "1.0]],[["


class ClassThatLiesEnv:
    def reset(self, seed=None):
        self.turn = 0
        return Long("start"), {}

    def step(self, action):
        self.turn += 1
        observation = Spinning() if self.turn == 3 else Long("ok")
        return observation, Number(0), False, False, {}
