# Says that it used no processor time, or a negative amount, and spins. RIGHT: timeout
import time


class ClaimNoTimeEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        time.process_time = lambda: -1e9
        end = time.perf_counter() + 3600
        while time.perf_counter() < end:
            pass
        return "ok", 0.0, False, False, {}
