# Has a signal handler spin when it has replied and nobody waits for it. RIGHT: timeout|harmless (its worker is ended when it is next asked for anything)
import signal


def _spin(*_):
    while True:
        pass


class SpinBetweenRequestsEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        signal.signal(signal.SIGALRM, _spin)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        return "ok", 0.0, False, False, {}
