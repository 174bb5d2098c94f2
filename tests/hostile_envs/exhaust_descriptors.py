# Opens a file that it may read, if there is one, until no descriptor is left. RIGHT: denied
import os


class ExhaustDescriptorsEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        count = 0
        try:
            while count < 1000:
                os.open(os.__file__, os.O_RDONLY)
                count += 1
        except OSError as error:
            return f"blocked after {count}: {type(error).__name__}", 0.0, False, False, {}
        return f"PWNED {count} descriptors", 0.0, False, False, {}
