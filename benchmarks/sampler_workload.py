"""The episodes of the sampler benchmark, and the protocol of a contestant in its own process.

Every contestant samples the same number of tokens at the same turns: the lengths of completions are
fixed in advance, and no stop token ends one early. What it sampled goes into the prompt of its next
turn, followed by the environment's reply. Needs NumPy alone: the peers import it.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PROMPT_TOKENS = (200, 800)
COMPLETION_TOKENS = (16, 256)
REPLY_TOKENS = (10, 60)
GROUP_SIZE = 8
MARK = "@@ "  # before a line of the protocol: libraries print to the same stream


class Scripted(NamedTuple):
    """One episode: what is fixed of it before anything is sampled."""

    group: int
    prompt: list[int]  # the same for a whole group
    lengths: list[int]  # tokens to sample in each turn
    replies: list[list[int]]  # the environment's, after each turn but the last

    @property
    def context_tokens(self) -> int:
        """Tokens of the whole episode."""
        return len(self.prompt) + sum(self.lengths) + sum(map(len, self.replies))


def make_episodes(
    text: list[int], count: int, turns: int, scale: float = 1.0, seed: int = 0
) -> list[Scripted]:
    """Cut prompts and replies from `text`; prompts are spread evenly over PROMPT_TOKENS.

    `scale` multiplies all lengths, for a short trial.
    """
    rng = np.random.default_rng(seed)

    def draw(bounds: tuple[int, int], number: int) -> list[int]:
        lengths = scale * rng.integers(bounds[0], bounds[1] + 1, number)
        return np.maximum(lengths.round(), 1).astype(int).tolist()

    groups = -(-count // GROUP_SIZE)
    spread = np.linspace(*PROMPT_TOKENS, groups) if groups > 1 else [np.mean(PROMPT_TOKENS)]

    def cut(length: int) -> list[int]:
        start = int(rng.integers(len(text) - length))
        return text[start : start + length]

    prompts = [cut(round(scale * length)) for length in spread]
    return [
        Scripted(
            index // GROUP_SIZE,
            prompts[index // GROUP_SIZE],
            draw(COMPLETION_TOKENS, turns),
            [cut(length) for length in draw(REPLY_TOKENS, turns - 1)],
        )
        for index in range(count)
    ]


def num_sampled(episodes: list[Scripted]) -> int:
    """Tokens that a run of the episodes samples."""
    return sum(sum(episode.lengths) for episode in episodes)


def save(episodes: list[Scripted], path: Path) -> None:
    """Write for another process."""
    path.write_text(json.dumps([episode._asdict() for episode in episodes]))


def load(path: Path) -> list[Scripted]:
    """Read what `save` wrote."""
    return [Scripted(**episode) for episode in json.loads(path.read_text())]


def play_in_turns(
    episodes: list[Scripted], generate: Callable[[list[list[int]], list[int]], list[list[int]]]
) -> int:
    """Play all episodes turn by turn in one batch; return the tokens kept.

    `generate(histories, lengths)` returns at least `lengths[i]` tokens after `histories[i]`.
    """
    histories = [list(episode.prompt) for episode in episodes]
    kept = 0
    for turn in range(len(episodes[0].lengths)):
        lengths = [episode.lengths[turn] for episode in episodes]
        completions = generate(histories, lengths)
        for history, completion, length, episode in zip(
            histories, completions, lengths, episodes, strict=True
        ):
            assert len(completion) >= length, (len(completion), length)
            history += completion[:length]
            kept += length
            if turn < len(episode.replies):
                history += episode.replies[turn]
    return kept


class Timed(NamedTuple):
    """One run of a contestant."""

    tokens: int
    wall_s: float
    cpu_s: float  # of its process, all threads
    load: float  # load average over a minute, at the end
    peak_gib: float  # resident memory of the process so far

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def timed(run: Callable[[], int]) -> Timed:
    """Time a run that returns the number of tokens it sampled."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Timed(tokens, wall, cpu, os.getloadavg()[0], peak)


def serve(description: dict[str, Any], run: Callable[[], int]) -> None:
    """Be a contestant: say that all is warm, then run once for each line of the standard input."""
    print(MARK + json.dumps(description), flush=True)
    for _ in sys.stdin:
        print(MARK + json.dumps(timed(run)._asdict()), flush=True)
