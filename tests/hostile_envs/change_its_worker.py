# Replaces the worker's own code, so that every later request is answered by the program. RIGHT: schema|env_error|protocol|harmless
import sys


class ChangeItsWorkerEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        worker = sys.modules["spade_jax.envs.worker"]
        worker.Host.step = lambda self, number, action: ["PWN" + "ED?"[:0], 5.0, True, False]
        worker._text = lambda value: value
        return "ok", 0.0, False, False, {}
