"""Whether a long run of the embedded default compiles anything after its first cycle."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sampler_ours import ROOT, goal, say

WATCH = """
import sys
from pathlib import Path
import jax
from spade_jax.cli import main
lines, log = Path(sys.argv.pop(1)), open(sys.argv.pop(1), "w")

def note(event, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
        print(len(lines.read_text().splitlines()) if lines.exists() else 0, file=log, flush=True)

jax.monitoring.register_event_duration_secs_listener(note)
sys.exit(main())
"""


def run(cycles: int) -> list[dict[str, Any]]:
    """Train for that many cycles; count what the sampler and what XLA compiled after the first."""
    config = ROOT / "configs" / "tiny.py"
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "run", Path(scratch) / "compiles"
        lines = folder / "metrics.jsonl"
        cycle_steps = 4
        command = [sys.executable, "-c", WATCH, lines, log, "train", config]
        command += ["--run.dir", folder, "--run.steps", cycles * cycle_steps]
        command += ["--run.cycle-steps", cycle_steps]
        subprocess.run([str(part) for part in command], check=True, cwd=ROOT)
        steps = [json.loads(line) for line in lines.read_text().splitlines()]
        compiles = [int(line) for line in log.read_text().split()]
    late = int(sum(step.get("sampler/late_compiles_count", 0) for step in steps))
    after = [done for done in compiles if done >= cycle_steps]
    say(
        f"{len(steps)} steps: {len(compiles)} compilations, {len(after)} of them after the first "
        f"cycle (steps done before each: {after}); late programs of the sampler {late}"
    )
    return [
        goal(f"late_sampler_compiles_{cycles}_cycles", late, 0, least=False),
        goal(f"compiles_after_first_of_{cycles}_cycles", len(after), 0, least=False),
    ]
