# Deletes the builtins that its worker needs to answer. RIGHT: env_error|worker_died|schema
import builtins


class BreakEveryBuiltinEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        for name in list(vars(builtins)):
            if not name.startswith("__") and name not in ("list", "vars"):
                delattr(builtins, name)
        return "ok", 0.0, False, False, {}
