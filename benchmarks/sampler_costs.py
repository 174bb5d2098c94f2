"""What a sampled token costs as the queue and the number of slots grow, and what the host adds."""

import itertools
from collections.abc import Sequence
from typing import Any

from sampler_ours import Model, Played, describe, goal, make_engine, play, say
from sampler_workload import GROUP_SIZE, Scripted, Timed

QUEUES = (8, 32, 128)
SLOTS = (4, 8, 16, 32)
PROMPT, COMPLETION, REPLY, TURNS = 64, 24, 16, 2


def even_episodes(text: list[int], count: int) -> list[Scripted]:
    """Episodes that are all alike: what differs between two runs is how many there are."""
    episodes = []
    for index in range(count):
        group = index // GROUP_SIZE
        reply = text[-REPLY * (index + 1) :][:REPLY]
        prompt = text[group * PROMPT :][:PROMPT]
        episodes.append(Scripted(group, prompt, [COMPLETION] * TURNS, [reply] * (TURNS - 1)))
    return episodes


def _cost(times: Sequence[Timed]) -> tuple[float, float]:
    """Milliseconds a token, by the clock and of processor time, of the best run."""
    return (
        1e3 * min(time.wall_s / time.tokens for time in times),
        1e3 * min(time.cpu_s / time.tokens for time in times),
    )


def _together(runs: Sequence[Timed]) -> Timed:
    """Several runs as one."""
    wall, cpu = sum(run.wall_s for run in runs), sum(run.cpu_s for run in runs)
    return runs[-1]._replace(tokens=sum(run.tokens for run in runs), wall_s=wall, cpu_s=cpu)


def queues(model: Model, text: list[int], repeat: int) -> list[dict[str, Any]]:
    """Eight slots and ever more episodes, as many tokens of each queue: a short one is played
    several times, and its runs count as one.
    """
    episodes = {count: even_episodes(text, count) for count in QUEUES}
    engine = make_engine(model, 8, episodes[8][0].context_tokens)
    times: dict[int, list[Timed]] = {count: [] for count in QUEUES}
    for _ in range(repeat):
        for count in QUEUES:
            runs = [play(engine, model, episodes[count]).time for _ in range(QUEUES[-1] // count)]
            times[count].append(_together(runs))
    costs = {count: _cost(found) for count, found in times.items()}
    for count, (clock, processor) in costs.items():
        say(f"8 slots, {count} episodes: {clock:.2f} ms a token, processor {processor:.2f} ms")
    clocks, processors = zip(*costs.values(), strict=True)
    return [
        goal("cost_spread_8_to_128_episodes", max(clocks) / min(clocks), 1.1, least=False),
        goal("cpu_spread_8_to_128_episodes", max(processors) / min(processors), 1.1, least=False),
    ]


def slots(model: Model, text: list[int], repeat: int) -> list[dict[str, Any]]:
    """The same episodes with more and more slots: each step up must not cost more a token."""
    episodes = even_episodes(text, SLOTS[-1])
    engines = [make_engine(model, count, episodes[0].context_tokens) for count in SLOTS]
    times: list[list[Timed]] = [[] for _ in SLOTS]
    for _ in range(repeat):
        for engine, found in zip(engines, times, strict=True):
            found.append(play(engine, model, episodes).time)
    costs = [_cost(found)[0] for found in times]
    say("a token with", dict(zip(SLOTS, (f"{cost:.2f} ms" for cost in costs), strict=True)))
    worst = max(after / before for before, after in itertools.pairwise(costs))
    return [goal("cost_ratio_of_more_slots", worst, 1.0, least=False)]


def idle_share(played: Played) -> float:
    """Share of the play phase in which the device had nothing to do."""
    return 1 - played.stats["device_s"] / played.stats["gather_s"]


def host_ms(played: Played) -> float:
    """Milliseconds of a round that are the host's: planning it, filling its arrays and taking in
    its results.
    """
    return 1e3 * played.stats["host_s"] / played.stats["rounds"]


def waste(played: Played) -> float:
    """Share of the places in pages in use that hold no token."""
    return 1 - played.stats["filled_places"] / played.stats["held_places"]


def small(model: Model, text: list[int], repeat: int) -> list[dict[str, Any]]:
    """A small model, whose rounds are short, so that host and environments weigh most."""
    episodes = [
        Scripted(index // GROUP_SIZE, text[64 * (index // GROUP_SIZE) :][:200], [64] * 4, [[5]] * 3)
        for index in range(64)
    ]
    engine = make_engine(model, 32, episodes[0].context_tokens)
    runs = [play(engine, model, episodes) for _ in range(repeat + 1)][1:]
    say("small model:", describe(min(runs, key=lambda run: run.time.wall_s).time))
    idle, host = max(map(idle_share, runs)), max(map(host_ms, runs))
    say(f"small model: device idle {100 * idle:.1f}%, host {host:.2f} ms a round", runs[-1].stats)
    return [
        goal("device_idle_share_small_model", idle, 0.05, least=False),
        goal("host_ms_per_round_small_model", host, 2.0, least=False),
    ]
