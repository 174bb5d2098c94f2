"""The stages of `launch/gpu_check.sh` that need Python, and its line of JSON.

A stage is a command with a share of the time. It passed if it came to its end with exit code 0 and
gave what it should; anything else is written into the line as what it was. No figure is made up: a
stage without one has none. It imports nothing of the project, so that it can report that the
project does not import.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "runs" / "gpu_check"
TAIL_LETTERS = 600
SAMPLER = ("assets/tiny", "--parts", "peers", "roofline", "--repeat", "1")
LEARNER = ("assets/tiny",)
FAILED = 3  # exit code once the line was printed; Python's own for a crash is 1


@dataclass(frozen=True)
class Stage:
    """One command; `read` takes its output and returns its figures, or says what it lacks."""

    name: str
    command: tuple[str, ...]
    seconds: float  # at most
    read: Callable[[str], dict[str, Any] | str]


def stages(python: str, run: Path) -> list[Stage]:
    """All of them; their seconds add up to less than ten minutes."""
    show = "import jax; d = jax.devices()[0]; print(d.platform, '|', d.device_kind, '|', "
    show += "jax.__version__, '|', float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((8, 8)))))"
    train = (python, "-m", "spade_jax.cli", "train", "configs/tiny.py")
    train += ("--run.dir", str(run), "--run.steps", "4", "--telemetry.no-live")
    return [
        Stage("device", (python, "-c", show), 60, _device),
        Stage("tests", (python, "-m", "pytest", "-m", "gpu", "-q", "-rs", "tests"), 150, _tests),
        Stage("tiny_run", train, 170, lambda _: _run(run)),
        Stage("sampler", (python, "benchmarks/sampler.py", *SAMPLER), 100, _benchmark),
        Stage("learner", (python, "benchmarks/learner.py", *LEARNER), 100, _benchmark),
    ]


def run_stage(stage: Stage, left_s: float) -> dict[str, Any]:
    """Run one command, with all that it starts, to its end or to the end of its time."""
    script = next((word for word in stage.command[1:2] if word.endswith(".py")), None)
    if script is not None and not (ROOT / script).exists():
        return {"status": "failed", "reason": f"{script} does not exist"}
    if left_s < 5:
        return {"status": "not run", "reason": "the time was up"}
    limit_s = min(stage.seconds, left_s)
    started = time.monotonic()
    log = LOGS / f"{stage.name}.log"
    with log.open("w+") as file:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        file.seek(0)
        output = file.read()
    print(output, file=sys.stderr)
    result: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
    tail = output[-TAIL_LETTERS:].strip()
    if code is None:
        return {"status": "cut short", "reason": f"{limit_s:.0f} s were up", **result, "tail": tail}
    if code != 0:
        return {"status": "failed", "reason": f"exit code {code}", **result, "tail": tail}
    figures = stage.read(output)
    if isinstance(figures, str):
        return {"status": "failed", "reason": figures, **result, "tail": tail}
    return {"status": "passed", **result, "figures": figures}


def _device(output: str) -> dict[str, Any] | str:
    words = output.strip().splitlines()[-1].split(" | ") if output.strip() else []
    if len(words) != 4 or words[0] not in ("gpu", "cuda"):
        return "jax does not compute on a GPU"
    return {"kind": words[1], "jax": words[2]}


def _tests(output: str) -> dict[str, Any] | str:
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|skipped|failed)", output)}
    if not counts.get("passed"):
        return "no test passed"
    return {name: counts.get(name, 0) for name in ("passed", "skipped")}


def _run(run: Path) -> dict[str, Any] | str:
    """Figures of the last step, by when everything was compiled."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    if not (run / "summary.md").exists() or not lines:
        return "the run ended without its summary"
    last = json.loads(lines[-1])
    wanted = ("time/step_s", "time/play_s", "time/update_s", "sampler/tokens_per_s")
    wanted += ("sampler/learner_logprob_gap_max", "sampler/late_compiles_count")
    return {"steps": len(lines), **{name: last[name] for name in wanted if name in last}}


def _benchmark(output: str) -> dict[str, Any] | str:
    """The last line that is a JSON object."""
    for line in reversed(output.splitlines()):
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        if isinstance(figures, dict):
            return figures
    return "no line of JSON was printed"


def main() -> int:
    """Run every stage, print the line, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", required=True, help="what nvidia-smi says of it")
    parser.add_argument("--limit-s", type=float, required=True)
    options = parser.parse_args()
    started = time.monotonic()
    run = LOGS / "tiny"
    shutil.rmtree(run, ignore_errors=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"driver": {"status": "passed"}, "install": {"status": "passed"}}
    for stage in stages(str(ROOT / ".venv" / "bin" / "python"), run):
        if results.get("device", {}).get("status", "passed") == "passed":
            left_s = options.limit_s - (time.monotonic() - started)
            results[stage.name] = run_stage(stage, left_s)
        else:
            results[stage.name] = {"status": "not run", "reason": "jax does not run on the GPU"}
        print(f"spade-jax: {stage.name}: {results[stage.name]['status']}", file=sys.stderr)
    ok = all(result["status"] == "passed" for result in results.values())
    line = {"ok": ok, "gpu": options.gpu, "seconds": round(time.monotonic() - started, 1)}
    print(json.dumps({**line, "stages": results}))
    return 0 if ok else FAILED


if __name__ == "__main__":
    sys.exit(main())
