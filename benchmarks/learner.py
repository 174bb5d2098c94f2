"""One optimiser step of the learner against transformers and torch, on the same trajectories.

    spade-jax convert SmolLM2.gguf CHECKPOINT
    python benchmarks/learner.py CHECKPOINT [--source SmolLM2.gguf \
        --peer-python TORCH_ENV/bin/python] [--mixed 10] [--equal 4] [--repeat 3] \
        [--row-tokens 2048] [--device-tokens 2048] [--peer-rows 2]

Forward, backward and AdamW of the GRPO loss, from the same weights: once on a mix of 50 to 1,500
tokens, packed by us and padded by the peer, and once on trajectories of 1,024 tokens, where nobody
pads. On a CPU both compute in float32, with memory in huge pages (GLIBC_TUNABLES) unless the
variable is set otherwise. The peer runs in an environment of its own with torch,
transformers, accelerate and gguf. Without it only our figures are taken, on whatever device jax
finds, and the goals that need the peer are left out. Both are warm before the first timed step and
take turns; the best step of each counts, by the clock, with processor time beside it. A rate counts
the tokens of the trajectories, not padding. Peak memory is that of the whole process, compiling
included. The packing of a rollout of 192 trajectories is measured as well. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import learner_workload as workload
import numpy as np

HERE = Path(__file__).resolve().parent
ROLLOUT = 192  # trajectories of the packing that is only measured
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # as launch/local.sh has it


class Contestant:
    """A process that takes steps when told."""

    def __init__(self, *command: str) -> None:
        environment = {"GLIBC_TUNABLES": HUGE_PAGES} | os.environ
        environment["PYTHONPATH"] = str(HERE.parent)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(workload.MARK):
                return line.removeprefix(workload.MARK)
        sys.exit(f"a contestant ended with exit code {self._process.wait()}")

    def step(self, kind: str) -> dict[str, float]:
        """Take one step."""
        assert self._process.stdin is not None
        self._process.stdin.write(kind + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path, help="folder that `spade-jax convert` wrote")
    parser.add_argument("--source", type=Path, help="the same for transformers")
    parser.add_argument("--peer-python", type=Path, help="of an environment with the peer")
    parser.add_argument("--mixed", type=int, default=10, help="trajectories of the mix")
    parser.add_argument("--equal", type=int, default=4, help="trajectories of equal length")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--device-tokens", type=int, default=2048, help="of our microbatch")
    parser.add_argument("--peer-rows", type=int, default=2, help="trajectories of a microbatch")
    arguments = parser.parse_args()
    if (arguments.source is None) != (arguments.peer_python is None):
        parser.error("--source and --peer-python go together; give both, or neither")
    return arguments


def packing(row_tokens: int, device_tokens: int, mixed: list[workload.Sampled]) -> dict[str, float]:
    """Share of the computed tokens that are not padding: of the timed mix, and of a rollout."""
    from learner_ours import pack  # here: it imports jax

    rng = np.random.default_rng(0)
    lengths = rng.integers(workload.LENGTHS[0], workload.LENGTHS[1] + 1, ROLLOUT).tolist()
    rollout = workload.draw(lengths, 1000)
    return {
        "mix": round(pack(mixed, row_tokens, device_tokens).efficiency, 4),
        "rollout": round(pack(rollout, row_tokens, device_tokens).efficiency, 4),
    }


def measure(arguments: argparse.Namespace, kinds: dict[str, list[workload.Sampled]]) -> dict:
    """Let them take turns."""
    with tempfile.TemporaryDirectory() as folder:
        batches = Path(folder) / "batches.npz"
        workload.save(batches, kinds)
        own = [str(HERE / "learner_ours.py"), str(arguments.checkpoint), str(batches)]
        own += ["--row-tokens", str(arguments.row_tokens)]
        own += ["--device-tokens", str(arguments.device_tokens)]
        contestants = {"ours": Contestant(sys.executable, *own)}
        if arguments.peer_python is not None:
            peer = [str(HERE / "learner_transformers.py"), str(arguments.source), str(batches)]
            peer += ["--rows", str(arguments.peer_rows)]
            contestants["peer"] = Contestant(str(arguments.peer_python), *peer)
        found: dict[str, dict[str, list[dict[str, float]]]] = {
            name: {kind: [] for kind in kinds} for name in contestants
        }
        for turn in range(arguments.repeat + 1):  # the first one warms up
            for kind in kinds:
                for name, contestant in contestants.items():
                    answer = contestant.step(kind)
                    found[name][kind].append(answer)
                    print(f"{turn} {name} {kind} {json.dumps(answer)}", flush=True)
        for contestant in contestants.values():
            contestant.close()
    return found


def summary(
    kinds: dict[str, list[workload.Sampled]], found: dict, efficiency: dict[str, float]
) -> dict[str, Any]:
    """The figures and the goals."""
    result: dict[str, Any] = {"packing": efficiency, "load_average": os.getloadavg()[0]}
    packed = min(efficiency.values())
    goals = [goal("packing_efficiency", packed, 0.9, packed >= 0.9)]
    ratios = {}
    for kind, sampled in kinds.items():
        tokens = sum(len(one.tokens) for one in sampled)
        rates = {}
        for name in found:
            timed = found[name][kind][1:]
            rates[name] = tokens / min(answer["wall_s"] for answer in timed)
            result[f"{kind}_{name}_tokens_per_s"] = round(rates[name], 1)
            per_cpu = tokens / min(answer["cpu_s"] for answer in timed)
            result[f"{kind}_{name}_tokens_per_cpu_s"] = round(per_cpu, 1)
        if "peer" in rates:
            ratios[kind] = rates["ours"] / rates["peer"]
            result[f"{kind}_ratio"] = round(ratios[kind], 2)
        # The first step of a kind: the weights have hardly moved.
        result[f"{kind}_losses"] = {name: found[name][kind][0]["loss"] for name in found}
    for name, by_kind in found.items():
        peaks = [answer["peak_gb"] for answers in by_kind.values() for answer in answers]
        result[f"{name}_peak_gb"] = round(max(peaks), 2)
    if ratios:
        losses = [result[f"{kind}_losses"] for kind in kinds]
        apart = max(abs(pair["ours"] - pair["peer"]) for pair in losses)
        goals += [
            goal("mixed_ratio", round(ratios["mixed"], 2), 1.5, ratios["mixed"] >= 1.5),
            goal("equal_ratio", round(ratios["equal"], 2), 1.0, ratios["equal"] >= 1.0),
            goal("losses_apart", apart, 1e-3, apart < 1e-3),
        ]
    else:
        result["peer"] = "not given; the goals that need it are left out"
    return result | {"goals": goals}


def goal(name: str, value: float, limit: float, holds: bool) -> dict[str, Any]:
    """A line of the result."""
    return {"name": name, "value": value, "goal": limit, "holds": bool(holds)}


def main() -> None:
    """Measure and print."""
    arguments = parse()
    vocab = json.loads((arguments.checkpoint / "config.json").read_text())["vocab_size"]
    kinds = {
        "mixed": workload.draw(workload.mixed_lengths(arguments.mixed), vocab),
        "equal": workload.draw([workload.EQUAL] * arguments.equal, vocab, seed=1),
    }
    efficiency = packing(arguments.row_tokens, arguments.device_tokens, kinds["mixed"])
    found = measure(arguments, kinds)
    print(json.dumps(summary(kinds, found, efficiency)))


if __name__ == "__main__":
    main()
