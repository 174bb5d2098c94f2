"""The sampler against other samplers, the machine and its own learner, in one run.

    spade-jax convert SmolLM2.gguf CHECKPOINT
    python benchmarks/sampler.py CHECKPOINT --source SmolLM2.gguf \
        --transformers-python TORCH_ENV/bin/python --tunix-python TUNIX_ENV/bin/python \
        [--parts peers roofline costs small gaps cycles] [--episodes 32] [--repeat 2] [--cycles 20]

The peers run in environments of their own: torch, transformers, accelerate and gguf in one,
google-tunix in the other; nothing of them is a dependency here. A peer without a Python is not
measured, and its goal does not hold.

Episodes: live, of four turns, with prompts of 200 to 800 tokens that groups of eight share,
completions of 16 to 256 tokens and replies of 10 to 60. The lengths of completions are fixed in
advance (drawn uniformly), so that all sample equally many tokens, and nothing ends early. Ours
waits 1 ms for each reply of an environment and takes an episode's next turn as soon as it is there;
transformers and Tunix sample turn by turn in one batch, whose environments take no time.
Everything is in float32 on CPU, at temperature 1 without truncation, and compiled and warm before
the first timed run. Tunix, which has no Llama of this shape, runs a random Qwen3 of the same sizes,
against ours on such a model too. Contestants take turns; the best run of each counts, by the clock,
and processor time and the load of the machine are printed beside it; of shares and of the host's
time the worst run counts. The last line is JSON.
"""

import argparse
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import sampler_costs as costs
import sampler_cycles as cycles
import sampler_gaps as gaps
import sampler_peers as peers
import sampler_roofline as roofline
import sampler_workload as workload
from sampler_ours import (
    ROOT,
    Model,
    describe,
    goal,
    load_model,
    make_engine,
    play,
    random_qwen3,
    say,
    to_line,
    token_text,
    wanted_prefill,
)
from sampler_workload import Scripted, Timed

PARTS = ("peers", "roofline", "costs", "small", "gaps", "cycles")
TURNS = 4


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path, help="folder that `spade-jax convert` wrote")
    parser.add_argument("--source", type=Path, help="the same checkpoint for transformers")
    parser.add_argument("--transformers-python", type=Path)
    parser.add_argument("--tunix-python", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, for a trial")
    parser.add_argument("--repeat", type=int, default=2, help="runs of ours, and of short parts")
    parser.add_argument("--peer-repeat", type=int, default=1, help="runs of each peer")
    parser.add_argument("--tunix-rows", type=int, default=32, help="histories in one call of Tunix")
    parser.add_argument("--context", type=int, default=768, help="tokens of the long roofline")
    parser.add_argument("--cycles", type=int, default=20)
    return parser.parse_args()


def best(times: list[Timed]) -> Timed | None:
    """The fastest."""
    return min(times, key=lambda time: time.wall_s) if times else None


def ratio(ours: list[Timed], theirs: list[Timed], by: str) -> float | None:
    """How many times fewer seconds ours took, each at its best; None if one was not measured."""
    if not ours or not theirs:
        return None
    return min(getattr(t, by) for t in theirs) / min(getattr(t, by) for t in ours)


def started(arguments: argparse.Namespace, episodes: Path) -> list[peers.Peer]:
    """The peers for which there is a Python."""
    found = []
    if arguments.transformers_python and arguments.source:
        threads = str(len(os.sched_getaffinity(0)))
        found.append(
            peers.transformers(
                arguments.transformers_python, arguments.source, episodes, "--threads", threads
            )
        )
    if arguments.tunix_python:
        options = ("--rows", str(arguments.tunix_rows))
        python, checkpoint = arguments.tunix_python, arguments.checkpoint
        found.append(peers.tunix(python, checkpoint, episodes, *options))
    return found


def contest(
    arguments: argparse.Namespace, model: Model, episodes: list[Scripted]
) -> list[dict[str, Any]]:
    """Everyone plays the episodes in turn; return the goals, among them those of our own runs."""
    context = max(episode.context_tokens for episode in episodes)
    say(
        f"{len(episodes)} episodes of {TURNS} turns, {workload.num_sampled(episodes)} sampled "
        f"tokens, at most {context} in one episode"
    )
    ours = {"SmolLM2": model, "Qwen3": random_qwen3(model.config)}
    runs: dict[str, list[Timed]] = {}
    played = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "episodes.json"
        workload.save(episodes, path)
        contestants = [stack.enter_context(peer) for peer in started(arguments, path)]
        for peer in contestants:
            peer.wait()
            say(peer.name, "is warm:", peer.description)
        # Room for all episodes at their longest: the peers' memory is needed beside it.
        engines = {
            name: make_engine(each, len(episodes), context, kv_tokens=len(episodes) * context)
            for name, each in ours.items()
        }
        for index in range(max(arguments.repeat, arguments.peer_repeat)):
            if index < arguments.repeat:
                for name, engine in engines.items():
                    result = play(engine, ours[name], episodes)
                    say(f"ours on {name}:", describe(result.time), result.stats)
                    runs.setdefault(name, []).append(result.time)
                    played += [result] if name == "SmolLM2" else []
            if index < arguments.peer_repeat:
                for peer in contestants:
                    time = peer.run()
                    say(f"{peer.name}:", describe(time), f"peak {time.peak_gib:.1f} GiB")
                    runs.setdefault(peer.name, []).append(time)
    goals = []
    for name, own, least in (("transformers", "SmolLM2", 4.0), ("tunix", "Qwen3", 3.0)):
        theirs = runs.get(name, [])
        if not theirs:
            say(f"{name} was not measured")
        processor = ratio(runs[own], theirs, "cpu_s")
        goals.append(goal(f"times_{name}", ratio(runs[own], theirs, "wall_s"), least, least=True))
        if processor is not None:
            say(f"by processor time ours needs {processor:.2f} times less than {name}")
    computed = played[0].stats["prefilled_tokens"] / wanted_prefill(episodes)
    goals += [
        goal("prefilled_over_once", computed, 1.01, least=False),
        goal("kv_waste", max(map(costs.waste, played)), 0.1, least=False),
        goal("device_idle_share", max(map(costs.idle_share, played)), 0.05, least=False),
        goal("host_ms_per_round", max(map(costs.host_ms, played)), 2.0, least=False),
    ]
    if "gaps" in arguments.parts:
        goals += gaps.float32(model, played[0].trajectories[::4])
    return goals


def main() -> None:
    """Run the parts and print the goals."""
    arguments = parse()
    model = load_model(arguments.checkpoint, "float32")
    text = token_text(arguments.checkpoint)
    goals = []
    if "peers" in arguments.parts:
        episodes = workload.make_episodes(text, arguments.episodes, TURNS, arguments.scale)
        goals += contest(arguments, model, episodes)
    if "roofline" in arguments.parts:
        # The least of several steps: one alone may have met other work on the machine.
        repeat = max(arguments.repeat, roofline.LEAST_REPEAT)
        goals += roofline.measure(
            model, text, arguments.context, repeat, arguments.transformers_python
        )
    if "costs" in arguments.parts:
        goals += costs.queues(model, text, arguments.repeat)
        goals += costs.slots(model, text, arguments.repeat)
    if "small" in arguments.parts:
        tiny = load_model(ROOT / "assets" / "tiny")
        small_text = [token % tiny.config.vocab_size for token in text]
        goals += costs.small(tiny, small_text, arguments.repeat)
    if "gaps" in arguments.parts:
        goals += gaps.bfloat16(load_model(arguments.checkpoint, "bfloat16"), text)
        gaps.int8(model, text)
        goals += gaps.embedded()
    if "cycles" in arguments.parts:
        goals += cycles.run(arguments.cycles)
    print(to_line(goals))


if __name__ == "__main__":
    main()
