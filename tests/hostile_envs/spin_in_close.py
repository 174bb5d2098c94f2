# Behaves, but never ends when it is collected. RIGHT: harmless|timeout



class SpinInCloseEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        return "ok", 0.0, False, False, {}

    def __del__(self):
        while True:
            pass
