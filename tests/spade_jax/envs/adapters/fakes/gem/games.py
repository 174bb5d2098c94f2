import random


class FlipEnv:
    def __init__(self, turns=2):
        self.turns = turns

    def reset(self, seed):
        random.seed(seed)
        return "Guess the flip.", {"suffix": "Heads or tails?"}

    def step(self, action):
        self.turns -= 1
        side = random.choice(["heads", "tails"])
        won = action == f"\\boxed{{{side}}}"
        over = won or self.turns == 0
        return f"It was {side}; {action}.", 1 if won else -0.5, won, over, {"suffix": "Again?"}
