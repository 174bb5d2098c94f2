"""Stands in for reasoning_gym: three datasets with its interface."""

import json
import random
from types import SimpleNamespace


class Sums:
    def __init__(self, seed, size, top=9):
        rng = random.Random(seed)
        self.numbers = rng.randint(0, top), rng.randint(0, top)

    def __getitem__(self, index):
        one, other = self.numbers
        return {"question": f"{one} + {other} = ?", "answer": str(one + other), "metadata": {}}

    def score_answer(self, answer, entry):
        special = {"nan": float("nan"), "seven": 7, "minus": -7}
        if answer in special:
            return special[answer]
        if answer == entry["answer"]:
            return 1.0
        int(answer)  # raises for what is no number
        return 0.25


class Pairs:
    """Many right answers, one of which is in the metadata; or none."""

    def __init__(self, seed, size, known=True):
        self.metadata = {"possible_answer": {"a": seed}} if known else {}

    def __getitem__(self, index):
        return {"question": "Name a pair.", "answer": None, "metadata": self.metadata}

    def score_answer(self, answer, entry):
        return float("a" in json.loads(answer))


DATASETS = {"sums": Sums, "pairs": Pairs}
factory = SimpleNamespace(DATASETS=DATASETS)


def create_dataset(name, **config):
    return DATASETS[name](**config)
