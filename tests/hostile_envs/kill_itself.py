# Kills its own process with the signal that the kernel uses when memory is short. RIGHT: worker_died
import os, signal


class KillItselfEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        os.kill(os.getpid(), signal.SIGKILL)
