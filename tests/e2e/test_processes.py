"""Two processes of four devices each, as one run: what they exchange, learn, and how they end."""

import json
import shutil
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from learning import CONFIG, MODELS, draw_params, three_updates
from several import DEADLINE_S, ROOT, ended, free_port, last_line, start

from helpers import untimed
from models.sharding import build_mesh
from spade_jax.learner.step import Learner
from spade_jax.telemetry.metrics import DIVIDED

STOP_S = 30


def scenario(name, scratch, **more):
    port = free_port()
    arguments = [str(ROOT / "tests" / "e2e" / "processes_scenario.py"), name, str(scratch)]
    return [start(arguments, port, index, **more) for index in range(2)]


@pytest.mark.slow
def test_values_and_work_are_shared(tmp_path):
    for status, text in ended(scenario("exchanges", tmp_path)):
        assert status == 0, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("another_config", "process 1 was started with another config: run.seed is 1 there and 0"),
        ("another_folder", "run.dir='x' is another folder for process 1 than for process 0"),
    ],
)
def test_what_cannot_be_one_run_is_refused_by_all(tmp_path, name, part):
    for status, text in ended(scenario(name, tmp_path)):
        assert status == 2 and part in last_line(text), text
        assert "Traceback" not in text


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_its_reason(tmp_path):
    (waiting, heard), (failed, said) = ended(scenario("fails", tmp_path))
    assert (waiting, failed) == (3, 2), heard + said
    assert (
        last_line(said)
        == "spade-jax: the disk is full: 0 bytes left, expected some; free some space"
    )
    assert "process 1 of 2 failed: the disk is full: 0 bytes left" in last_line(heard)
    assert "Traceback" not in heard + said

    (failed, said), (working, heard) = ended(scenario("fails_first", tmp_path))
    assert failed == 1 and last_line(said) == "ValueError: a bug"
    assert working == 3 and "process 0 of 2 failed: ValueError: a bug" in last_line(heard), heard


def lose(tmp_path, victim, aside, how=signal.SIGKILL):
    """End one of two processes, of which one waits for the other in a program of both; what became
    of the other.
    """
    started = scenario("waits", tmp_path, WAITS_ASIDE=str(aside))
    deadline = time.monotonic() + DEADLINE_S
    while not all((tmp_path / f"ready{index}").exists() for index in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)
    began = time.monotonic()
    started[victim].send_signal(how)
    found = ended([started[1 - victim]])
    assert time.monotonic() - began < 30
    started[victim].kill()
    started[victim].communicate()
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("aside", [0, 1])
def test_a_killed_process_ends_the_other_with_the_reason(tmp_path, aside):
    """The other waits for it in the network, or is busy with something else."""
    status, text = lose(tmp_path, 1, aside)
    assert status == 3, text
    assert "process 1 of 2 is lost: nothing was heard of it for" in last_line(text)
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aside", "how", "reason"),
    [
        (0, signal.SIGKILL, "it no longer listens"),
        (1, signal.SIGKILL, "it no longer listens"),
        (0, signal.SIGSTOP, "nothing was heard of it for 4 s"),  # as of a machine that is gone
    ],
)
def test_a_lost_process_0_ends_the_other_with_the_reason(tmp_path, aside, how, reason):
    """Its service of the run goes with it, and jax aborts the other: not before that says why."""
    status, text = lose(tmp_path, 0, aside, how)
    assert status == 3, text
    assert f"process 0 of 2 is lost: {reason}; see its log" in last_line(text)
    assert "Traceback" not in text


@pytest.mark.slow
def test_three_updates_over_two_processes_equal_those_of_one_device(tmp_path):
    for status, text in ended(scenario("learns", tmp_path)):
        assert status == 0, text
    for name, model in MODELS.items():
        learner = Learner(model, CONFIG, build_mesh(1, 1, 1, 1, devices=jax.devices()[:1]))
        params, told = three_updates(learner, draw_params(model))
        for index in range(2):
            with np.load(tmp_path / f"{name}{index}.npz") as found:
                np.testing.assert_allclose(found["told"], told, rtol=1e-5, atol=1e-6)
                for place, leaf in enumerate(jax.tree.leaves(params)):
                    np.testing.assert_allclose(found[f"arr_{place}"], leaf, rtol=0, atol=1e-5)


TRAIN = """
import sys
from spade_jax import cli, heartbeat
heartbeat.LOST_S = 10.0
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


def train(folder, scratch, count, *options):
    """The micro run by so many processes of one device each, compiled programs shared."""
    port = free_port()
    arguments = ["-c", TRAIN, str(ROOT / "configs" / "micro.py"), "--run.dir", str(folder)]
    more = {
        "JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return [
        start([*arguments, *options], port, index, devices=1, count=count, **more)
        for index in range(count)
    ]


def arrays(folder):
    """All arrays of the newest checkpoint, whatever the devices that wrote it."""
    steps = [int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()]
    path = folder / "checkpoints" / str(max(steps)) / "state"
    reader = ocp.PyTreeCheckpointer()
    names = dict(reader.metadata(path).item_metadata.tree)
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    return reader.restore(path, restore_args=dict.fromkeys(names, as_numpy))


def assert_same_but_rounding(folder, other):
    """Every number that does not tell how the work was divided; the same text and token ids."""
    for kind in ("environments", "rejected"):
        ours, theirs = (
            {p.relative_to(f): p.read_bytes() for p in f.glob(f"{kind}/**/*") if p.is_file()}
            for f in (folder, other)
        )
        assert ours == theirs
    for path in sorted((folder / "episodes").iterdir()):
        ours, theirs = (
            [json.loads(line) for line in (f / "episodes" / path.name).read_text().splitlines()]
            for f in (folder, other)
        )
        for played, again in zip(ours, theirs, strict=True):
            token_ids = [(each["trajectory"] or {}).pop("tokens", []) for each in (played, again)]
            assert token_ids[0] == token_ids[1]
            assert {**played, "trajectory": 0} == {**again, "trajectory": 0}
    first, second = (
        [json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()]
        for f in (folder, other)
    )
    divided = DIVIDED | {"batch/packed_frac"}  # the rows are of two devices
    for line, again in zip(first, second, strict=True):
        assert untimed(line).keys() == untimed(again).keys()
        for name in untimed(line).keys() - divided:
            assert line[name] == pytest.approx(again[name], rel=1e-5, abs=2e-5), name
    ours, theirs = arrays(folder), arrays(other)
    for name in ours:
        if name.startswith("params"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5)


def stop(started):
    """Tell the second process to stop; what the first says of it."""
    began = time.monotonic()
    started[1].send_signal(signal.SIGTERM)
    (status, text), (other_status, other_text) = ended(started)
    assert (status, other_status) == (0, 0), text + other_text
    assert time.monotonic() - began < STOP_S
    assert "Traceback" not in text + other_text
    return text


@pytest.mark.slow
def test_a_run_of_two_processes_that_is_stopped_and_killed_is_that_of_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    options = ("--run.steps", "2", "--run.cycle-steps", "1")
    ((status, text),) = ended(train(one, tmp_path, 1, *options))
    assert status == 0, text

    started = train(two, tmp_path, 2, *options)
    deadline = time.monotonic() + DEADLINE_S
    while not (two / "metrics.jsonl").exists():
        assert all(each.poll() is None for each in started) and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)  # into the designs of the second step
    assert "asked to stop: after step 1, which is saved" in stop(started)
    assert not (two / "summary.md").exists()

    started = train(two, tmp_path, 2, *options, "--resume-if-any")
    while "resuming after step 1" not in (line := started[0].stdout.readline()):
        assert line, "the run ended"
    time.sleep(5)
    started[1].send_signal(signal.SIGKILL)
    (status, text), _ = ended(started)
    assert status == 3 and "Traceback" not in text, text
    assert "process 1 of 2 is lost" in last_line(text)

    newer = two / "checkpoints" / "1"
    shutil.rmtree(newer, ignore_errors=True)  # a save that the kill cut off
    shutil.copytree(two / "checkpoints" / "0", newer)
    host = newer / "host.json"
    host.write_bytes(host.read_bytes()[:-1] + b" ")
    ((status, text), (other_status, other_text)) = ended(
        train(two, tmp_path, 2, *options, "--resume-if-any")
    )
    assert (status, other_status) == (0, 0), text + other_text
    assert "host.json does not match its checksum; the one before is used, of step 1" in text
    assert "summary.md" in text and "summary.md" not in other_text
    assert_same_but_rounding(one, two)
