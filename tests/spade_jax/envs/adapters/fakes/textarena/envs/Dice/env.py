import random
from types import SimpleNamespace

import textarena as ta

SHOWN = SimpleNamespace(name="GAME_MESSAGE")
ECHO = SimpleNamespace(name="PLAYER_ACTION")


class DiceEnv:
    """Each step throws a die with the generator of the whole process."""

    def __init__(self, throws=3):
        self.left = throws

    def reset(self, num_players, seed):
        assert num_players == 1
        random.seed(seed)
        self.state = ta.SinglePlayerState()
        self.messages = [(-1, "Throw the dice.", SHOWN), (SHOWN, -1, "It is your turn.")]
        self.total = 0

    def get_observation(self):
        messages, self.messages = self.messages, []
        return 0, messages

    def step(self, action):
        self.messages += [(0, action, ECHO), (ECHO, 0, action)]
        if action == "[quiet]":
            return False, {}
        if action.startswith("[bad"):
            self.state.set_invalid_move(-0.5, "Not allowed.")  # in the wrong order
            return True, {}
        self.total += random.randint(1, 1000)
        self.messages.append((-1, f"{action} makes {self.total}", SHOWN))
        self.left -= 1
        return self.left == 0, {}

    def close(self):
        if self.state.rewards:
            return self.state.rewards, {0: {"reason": self.state.reason}}
        return {0: self.total}, {0: {"reason": "No throws are left."}}
