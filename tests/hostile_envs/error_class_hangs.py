# Raises an error whose class has a name that never ends. RIGHT: timeout


class Meta(type):
    @property
    def __name__(cls):
        while True:
            pass


class Endless(Exception, metaclass=Meta):
    pass


class ErrorClassHangsEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        raise Endless
