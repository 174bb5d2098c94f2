import random
from types import SimpleNamespace

SHOWN = SimpleNamespace(name="GAME_MESSAGE")
ECHO = SimpleNamespace(name="PLAYER_ACTION")


def SinglePlayerState(num_players, seed):
    assert num_players == 1
    random.seed(seed)


class DiceEnv:
    """Each step throws a die with the generator of the whole process."""

    def __init__(self, throws=3):
        self.left = throws

    def reset(self, num_players, seed):
        SinglePlayerState(num_players, seed)
        self.messages = [(-1, "Throw the dice.", SHOWN), (-1, "It is your turn.", "a text")]
        self.total = 0

    def get_observation(self):
        messages, self.messages = self.messages, []
        return 0, messages

    def step(self, action):
        self.messages.append((0, action, ECHO))
        if action == "[quiet]":
            return False, {}
        self.total += random.randint(1, 1000)
        self.messages.append((-1, f"{action} makes {self.total}", SHOWN))
        self.left -= 1
        return self.left == 0, {}

    def close(self):
        return {0: self.total}, {0: {"reason": "No throws are left."}}
