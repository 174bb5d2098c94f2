# Announces a large reply, sends a little of it, and sleeps. RIGHT: timeout|protocol
import os, struct, time


class HalfAFrameEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        os.write(10, struct.pack("<I", 1 << 19) + b"[1")
        time.sleep(3600)
