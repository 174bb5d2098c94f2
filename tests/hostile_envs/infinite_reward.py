# Returns infinity as reward. RIGHT: schema|protocol



class InfiniteRewardEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        return "ok", float("inf"), False, False, {}
