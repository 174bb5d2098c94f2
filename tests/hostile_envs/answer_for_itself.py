# Finds the number of the batch, answers with a win, and then answers again and again. RIGHT: protocol
import json, os, struct, sys


class AnswerForItselfEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        frame = sys._getframe(1)
        while "batch" not in frame.f_locals or "arguments" not in frame.f_locals:
            frame = frame.f_back
        body = struct.pack("<IHd", frame.f_locals["batch"], 1, 0.0)
        body += json.dumps([["ok", ["win", 1.0, True, False]]]).encode()
        for _ in range(3):
            os.write(10, struct.pack("<I", len(body)) + body)
        return "ok", 0.0, False, False, {}
