# Returns observations that are no text: lone surrogates, nothing, the end of a text. RIGHT: schema



class OddTextsEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        return "\ud800", 0.0, False, False, {}
