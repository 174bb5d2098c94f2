# Writes replies to its channel without end, faster than they can be read. RIGHT: protocol|timeout
import json, os, struct


class FloodChannelEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        body = struct.pack("<IHd", 7, 1, 0.0) + json.dumps([["ok", ["win", 1.0, True, False]]]).encode()
        frames = (struct.pack("<I", len(body)) + body) * 1000
        while True:
            os.write(10, frames)
