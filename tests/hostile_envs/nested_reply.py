# Returns a value nested deeper than a parser can follow. RIGHT: schema|env_error|protocol|worker_died



class NestedReplyEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        value = []
        for _ in range(100_000):
            value = [value]
        return value, 0.0, False, False, {}
