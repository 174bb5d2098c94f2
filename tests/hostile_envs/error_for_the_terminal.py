# Raises an error whose text clears a terminal, sets its title and writes to its clipboard. RIGHT: env_error


class ErrorForTheTerminalEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        raise ValueError("\x1b[2J\x1b]0;mine\x07\x1b]52;c;cm0gLXJmIC8K\x07\ud800")
