# Installs import hooks, trace functions and exit handlers that run in its worker's code. RIGHT: harmless|env_error|timeout|worker_died
import atexit, sys


class ImportHooksEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        atexit.register(print, "left")
        sys.meta_path.insert(0, self)
        sys.settrace(lambda *arguments: None)
        sys.excepthook = print
        return "ok", 0.0, False, False, {}

    def find_spec(self, name, path, target=None):
        raise SystemExit(0)
