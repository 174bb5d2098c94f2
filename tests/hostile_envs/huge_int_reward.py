# Returns an integer as reward that no float can hold. RIGHT: schema|protocol|env_error



class HugeIntRewardEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        return "ok", 10**5000, False, False, {}
