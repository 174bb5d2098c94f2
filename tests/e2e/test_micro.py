"""`configs/micro.py` as a user runs it, in processes of their own: what it leaves, that it repeats,
that a kill loses nothing.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers import untimed

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One device, as on a laptop, and compiled programs shared by the runs of this module."""
    cache = tmp_path_factory.mktemp("compiled")
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def command(folder, *options):
    return [
        sys.executable,
        "-m",
        "spade_jax.cli",
        "train",
        str(ROOT / "configs" / "micro.py"),
        "--run.dir",
        str(folder),
        *options,
    ]


def run(folder, environment, *options):
    done = subprocess.run(
        command(folder, *options),
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def episodes(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "episodes").glob("*.jsonl"))}


def checkpoint(folder):
    """Every array and the whole host state of the newest checkpoint."""
    steps = [int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()]
    newest = folder / "checkpoints" / str(max(steps))
    with warnings.catch_warnings(action="ignore"):  # Orbax asks for shardings, which NumPy lacks
        arrays = ocp.PyTreeCheckpointer().restore(newest / "state")
    host = json.loads((newest / "host" / "metadata").read_text())
    return max(steps), jax.tree.map(np.asarray, arrays), host


def assert_same_run(folder, other):
    assert [untimed(line) for line in metrics(folder)] == [untimed(line) for line in metrics(other)]
    assert episodes(folder) == episodes(other)
    (step, arrays, host), (other_step, other_arrays, other_host) = map(checkpoint, (folder, other))
    assert step == other_step and host == other_host
    assert len(jax.tree.leaves(arrays)) > 100
    assert jax.tree.all(jax.tree.map(np.array_equal, arrays, other_arrays))


@pytest.fixture(scope="module")
def first(tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, run(folder, environment)


def test_a_run_leaves_what_it_says(first):
    folder, done = first
    lines = metrics(folder)
    assert [line["progress/step"] for line in lines] == [0, 1, 2]
    assert next(iter(lines[0])) == "progress/step"
    assert str(folder) in done.stderr and "summary.md" in done.stderr
    assert (folder / "summary.md").read_text().startswith("# Summary")
    assert json.loads((folder / "config.json").read_text())["run"]["steps"] == 3
    attempted = sum(line.get("designer/attempted_count", 0) for line in lines)
    admitted = sum(line.get("designer/admitted_count", 0) for line in lines)
    assert attempted == 12
    assert len(list((folder / "environments").glob("*/*.py"))) == admitted >= attempted / 2
    refused = list((folder / "rejected").glob("*/*.json"))
    assert len(refused) == attempted - admitted
    for path in refused:
        assert json.loads(path.read_text())["verdict"]["gate"]
    for path in (folder / "environments").glob("*/*.json"):
        assert json.loads(path.read_text())["hint"]
    assert len(list((folder / "episodes").glob("*.jsonl"))) == 3


def test_both_roles_learn_and_the_sampler_is_the_learner(first):
    lines = metrics(first[0])
    for role in ("agent", "designer"):
        assert max(line.get(f"optim/{role}_grad_norm", 0.0) for line in lines) > 0
    gaps = [
        line["sampler/learner_logprob_gap_max"]
        for line in lines
        if "sampler/learner_logprob_gap_max" in line
    ]
    assert gaps and max(gaps) <= 1e-4
    assert all(line["sampler/late_compiles_count"] == 0 for line in lines)


def test_an_episode_line_is_whole(first):
    lines = (first[0] / "episodes" / "step_00000.jsonl").read_text().splitlines()
    played = [json.loads(line) for line in lines]
    assert {episode["arm"] for episode in played} == {"hinted", "unhinted"}
    # equal arms on the same seeds
    arms = {
        arm: sorted(
            (e["environment_id"], e["seed"], e["play_index"]) for e in played if e["arm"] == arm
        )
        for arm in ("hinted", "unhinted")
    }
    assert arms["hinted"] == arms["unhinted"]
    for episode in played:
        trajectory = episode["trajectory"]
        assert (
            len({len(trajectory[name]) for name in ("tokens", "loss_mask", "sampler_logprobs")})
            == 1
        )
        assert trajectory["policy_version"] == 0
        assert all(turn["observation"] for turn in episode["turns"])


def test_a_taken_folder_is_refused_in_one_line(first, environment):
    folder, _ = first
    for options, part in (
        ((), "already holds a run"),
        (("--resume", "--run.seed", "5"), "run.seed"),
        (("--resume",), "is finished"),
    ):
        done = subprocess.run(
            command(folder, *options),
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 2
        assert part in done.stderr.strip().splitlines()[-1]
        assert "Traceback" not in done.stderr


def break_checkpoints(folder):
    shutil.rmtree(folder / "checkpoints")


def break_last_line(folder):
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])


def break_host_state(folder):
    newest = folder / "checkpoints" / "2"
    (newest / "files.json").unlink()
    (newest / "host" / "metadata").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (break_checkpoints, "metrics of 3 steps but no checkpoint"),
        (break_last_line, "whole lines of the steps [0, 1], but the checkpoint is of step 2"),
        (break_host_state, "misstates 'curriculum'"),
    ],
)
def test_a_damaged_run_is_refused_and_left_alone(first, environment, tmp_path, damage, part):
    folder = tmp_path / "copy"
    shutil.copytree(first[0], folder)
    damage(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = subprocess.run(
        command(folder, "--resume", "--run.steps", "4"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert part in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert before.items() <= {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}.items()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(first, environment, tmp_path):
    folder = tmp_path / "again"
    run(folder, environment)
    assert_same_run(folder, first[0])


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["designing", "logged", "after the first checkpoint"])
def test_a_killed_run_resumes_to_the_same_bits(first, environment, tmp_path, moment):
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        command(folder), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    signs = {
        "designing": folder / "config.json",
        "logged": folder / "metrics.jsonl",
        "after the first checkpoint": folder / "checkpoints" / "0" / "files.json",
    }
    deadline = time.monotonic() + DEADLINE_S
    while not signs[moment].exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    if moment != "logged":
        time.sleep(1.0)  # into the next step
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(folder, environment, "--resume")
    assert_same_run(folder, first[0])
