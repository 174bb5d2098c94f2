"""A run that is killed, told to stop, or finds its disk full or its newest checkpoint damaged goes
on to the same bits as one that was left alone.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from metadata_stand_in import metadata_server

from spade_jax.cli import main
from spade_jax.envs.library import FAMILIES
from spade_jax.learner.manifest import FILES, whole_steps
from whole_runs import DEADLINE_S, assert_same_run, command, run

STOP_S = 30
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))  # of a file
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that cannot write more, as on a full disk."""
TERMS = ("amber", "basalt", "cobalt", "dolmen")


def begin(folder, environment, *options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, *options),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(sign, process) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not sign():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


def is_saving(folder: Path, step: int) -> bool:
    """Whether the checkpoint of a step has begun and is not whole."""
    begun = folder / "checkpoints" / str(step)
    return begun.exists() and not (begun / FILES).exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["designing", "saving", "after the first checkpoint"])
def test_a_killed_run_resumes_to_the_same_bits(first, environment, tmp_path, moment):
    folder = tmp_path / "killed"
    process = begin(folder, environment)
    signs = {
        "designing": (folder / "config.json").exists,
        "saving": lambda: is_saving(folder, 1),
        "after the first checkpoint": (folder / "checkpoints" / "0" / FILES).exists,
    }
    wait_for(signs[moment], process)
    if moment != "saving":
        time.sleep(1.0)  # into what comes next
    process.kill()
    process.communicate()
    if moment == "saving":
        assert is_saving(folder, 1) and whole_steps(folder / "checkpoints") == [0]
    run(folder, environment, "--resume")
    assert_same_run(folder, first[0])


def stop(process: subprocess.Popen[str]) -> str:
    """Tell a run to stop; what it says."""
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=DEADLINE_S)
    assert time.monotonic() - started < STOP_S
    assert process.returncode == 0, told[-3000:]
    return told


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_while_it_starts_leaves_nothing_half(
    first, environment, tmp_path
):
    folder = tmp_path / "stopped"
    process = begin(folder, environment)
    wait_for((folder / "checkpoints").exists, process)
    told = stop(process)
    assert "Traceback" not in told
    assert not (folder / "metrics.jsonl").exists()
    run(folder, environment, "--resume-if-any")
    assert_same_run(folder, first[0])


@pytest.mark.slow
def test_a_run_stops_in_a_play_and_on_a_full_disk_and_goes_on(first, environment, tmp_path):
    """It has no checkpoint of its own when it is told to stop: what is saved is the last whole
    step, and the play that was begun is done again. A disk that has no room for the next checkpoint
    ends the run and leaves that one alone.
    """
    folder = tmp_path / "stopped"
    process = begin(folder, environment, "--run.checkpoint-steps", "3")
    wait_for((folder / "metrics.jsonl").exists, process)
    time.sleep(1.0)  # into the play of the second step
    assert whole_steps(folder / "checkpoints") == []
    told = stop(process)
    assert "asked to stop: after step 1, which is saved" in told and "Traceback" not in told
    assert whole_steps(folder / "checkpoints") == [0]
    assert not (folder / "summary.md").exists()

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *command(folder, "--resume")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert "cannot write checkpoint 1" in last and "go on with --resume" in last
    assert main(["checkpoints", str(folder)]) == 0
    assert whole_steps(folder / "checkpoints") == [0]

    run(folder, environment, "--resume")
    assert_same_run(folder, first[0])


@pytest.mark.slow
def test_a_run_stops_at_a_notice_of_its_preemption_and_goes_on(first, environment, tmp_path):
    """On another machine, which is asked elsewhere or not at all."""
    folder = tmp_path / "preempted"
    with metadata_server() as metadata:
        process = begin(folder, environment, "--run.preemption-url", metadata.url)
        wait_for((folder / "metrics.jsonl").exists, process)
        assert metadata.asked > 0
        metadata.text, noticed = "TRUE", time.monotonic()
        _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0 and time.monotonic() - noticed < STOP_S, told[-3000:]
    assert "this machine is about to be taken" in told and "Traceback" not in told
    assert "asked to stop: after step" in told and not (folder / "summary.md").exists()
    run(folder, environment, "--resume")
    assert_same_run(folder, first[0])


@pytest.mark.slow
def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(
    first, environment, tmp_path, capsys
):
    folder = tmp_path / "copy"
    shutil.copytree(first[0], folder)
    newest = folder / "checkpoints" / "2"
    target = max((newest / "state").rglob("*"), key=lambda path: path.stat().st_size)
    with target.open("r+b") as file:
        file.seek(1_000_000)
        (byte,) = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte ^ 1]))
    assert main(["checkpoints", str(folder)]) == 1
    assert "does not match its checksum" in capsys.readouterr().out
    done = run(folder, environment, "--resume")
    assert "checkpoints/2 is damaged" in done.stderr
    assert "the one before is used, of step 2" in done.stderr
    assert_same_run(folder, first[0])
    assert main(["checkpoints", str(folder)]) == 0


@pytest.mark.slow
def test_a_run_on_programs_of_a_folder_goes_on_with_the_next_ones(environment, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for index, family in enumerate(FAMILIES[:5]):
        program = family.draw(random.Random(index), TERMS, "easy").program
        (programs / f"game_{index}.py").write_text(program)
    options = {
        "run.cycle-steps": "1",
        "run.steps": "2",
        "designer.source": "folder",
        "designer.folder": str(programs),
        "designer.designs": "2",
        "designer.gates": "none",
        "designer.no-train": None,
        "reward.kind": "solve_rate",
    }
    words = [
        word for name, value in options.items() for word in (f"--{name}", value) if word is not None
    ]
    unbroken, folder = tmp_path / "unbroken", tmp_path / "killed"
    run(unbroken, environment, *words)
    process = begin(folder, environment, *words)
    wait_for((folder / "checkpoints" / "0" / FILES).exists, process)
    process.kill()
    process.communicate()
    run(folder, environment, "--resume", *words)
    assert_same_run(folder, unbroken)
    host = json.loads((folder / "checkpoints" / "1" / "host.json").read_text())
    assert host["supply"]["rounds"] == 1 and len(host["supply"]["left"]) == 1
    played = {path.name for path in (folder / "environments").glob("*/*.py")}
    assert len(played) == 4
