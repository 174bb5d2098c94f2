# Raises an error whose text is a program that never ends. RIGHT: timeout


class Endless(Exception):
    def __str__(self):
        while True:
            pass



class ErrorWithoutEndEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        raise Endless
