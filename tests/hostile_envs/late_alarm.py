# Replies, and has an alarm interrupt whatever its worker does next. RIGHT: worker_died|timeout|env_error
import signal


class LateAlarmEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        while action:
            signal.pause()
