import random
import threading

import torch


def timeout(seconds):
    raise AssertionError(f"a thread would be started for {seconds} s")


def seeded(seed):
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    assert threading.active_count() == 1
