# Sends a large reply byte by byte, each one just in time. RIGHT: timeout|protocol
import os, struct, time


class TrickleAFrameEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        os.write(10, struct.pack("<I", 1 << 19) + b"[1")
        while True:
            os.write(10, b" ")
            time.sleep(0.05)
