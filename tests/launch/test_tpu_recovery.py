"""launch/tpu.sh when something goes wrong while it is about something else: machines that vanish in
the middle of a failure, gcloud or the bucket out of reach, reasons that may pass, and what somebody
asks for elsewhere."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launch.conftest import OPTIONS, QUICK, wait_for

RUNNING = {"on": "worker.sh status", "do": "nothing", "times": 2}  # then both workers run
GIVE_BACK = (*OPTIONS[:4], *OPTIONS[6:], "--poll-s", "0.1", "--delete")


@pytest.fixture
def launchers() -> Iterator[list["subprocess.Popen[str]"]]:
    """Those that are put in here end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def assert_resumed(stand_in: Any, code: int, output: str) -> None:
    """It came to its end on a second set of machines."""
    assert code == 0, output
    assert "the machines were taken away" in output
    assert len(stand_in.calls("queued-resources create")) == 2
    assert len(stand_in.trains(0)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "what"),
    [
        ("worker.sh tail", "preempt"),
        ("worker.sh tail", "node PREEMPTED"),
        ("worker.sh tail", "node TERMINATED"),
        ("worker.sh tail", "node GONE"),
        ("worker.sh stop", "node PREEMPTED"),
    ],
)
def test_machines_that_vanish_while_a_failed_run_is_handled(stand_in: Any, step: str, what: str):
    """It is no failure on machines that are there, so `--retries 0` bears it."""
    stand_in.runs(0, "fail 134")
    stand_in.runs(1, "hang")
    stand_in.scenario(events=[{"on": step, "do": what}])
    code, output = stand_in.run("tpu.sh", *QUICK, "--spot", "--retries", "0")
    assert_resumed(stand_in, code, output)
    assert "the run ended on worker 0 of 2 (134)" in output


@pytest.mark.slow
@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED", "GONE"])
def test_a_node_that_is_gone_in_an_active_resource_is_replaced(stand_in: Any, state: str):
    stand_in.runs(0, "hang")
    stand_in.runs(1, "hang")
    gone = {"on": "worker.sh status", "do": f"node {state}"}
    stand_in.scenario(events=[RUNNING, gone])
    code, output = stand_in.run("tpu.sh", *QUICK, "--retries", "0")
    assert_resumed(stand_in, code, output)


@pytest.mark.slow
def test_a_worker_that_dies_before_its_machine_is_said_to_be_gone(stand_in: Any):
    stand_in.runs(0, "hang")
    stand_in.runs(1, "hang")
    dies = {"on": "worker.sh status", "do": "die 1"}
    stand_in.scenario(events=[RUNNING, dies, {"on": "worker.sh stop", "do": "node PREEMPTED"}])
    code, output = stand_in.run("tpu.sh", *QUICK, "--retries", "0")
    assert_resumed(stand_in, code, output)
    assert "not every worker answers" in output
    assert "heard: 0 running;" in output


def test_a_worker_that_stays_away_is_named_and_the_launcher_ends(stand_in: Any):
    stand_in.scenario(events=[{"on": "worker.sh install", "do": "die 1"}])
    code, output = stand_in.run("tpu.sh", *QUICK, "--retries", "1")
    assert code == 1
    assert "not installed: worker(s) 1 of 2" in output
    assert "failed 2 times in a row on machines that are there" in output
    assert len(stand_in.calls("queued-resources create")) == 1


@pytest.mark.slow
def test_an_outage_on_this_side_is_waited_out(stand_in: Any, launchers: list):
    """The run goes on meanwhile and is not touched; its machines are replaced afterwards."""
    process = stand_in.followed(*OPTIONS, "--poll-s", "0.05")
    launchers.append(process)
    outage = stand_in.folder / "outage"
    outage.touch()
    before = len(stand_in.calls())
    wait_for(
        lambda: process.poll() is not None or len(stand_in.calls()) >= before + 30,
        "the launcher to ask again and again",
    )
    assert process.poll() is None, process.communicate()[0]
    assert stand_in.calls("worker.sh stop") == []
    stand_in.happens("preempt")
    outage.unlink()
    output, _ = process.communicate(timeout=60)
    assert_resumed(stand_in, process.returncode, output)
    assert "Network is unreachable" in output
    assert output.count("gcloud does not say what games is") >= 5
    assert "gcloud answers again" in output


@pytest.mark.slow
def test_workers_that_cannot_be_reached_from_here_are_left_alone(stand_in: Any, launchers: list):
    process = stand_in.followed(*OPTIONS, "--poll-s", "0.05")
    launchers.append(process)
    stand_in.happens("mute 12")
    told = "no worker answers"
    before = len(stand_in.calls("worker.sh status"))
    wait_for(
        lambda: process.poll() is not None or len(stand_in.calls("worker.sh status")) > before + 12,
        "the workers to answer again",
    )
    assert process.poll() is None, process.communicate()[0]
    assert stand_in.calls("worker.sh stop") == []
    stand_in.happens("preempt")
    output, _ = process.communicate(timeout=60)
    assert_resumed(stand_in, process.returncode, output)
    assert told in output


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_does_not_lack_the_summary(stand_in: Any):
    stand_in.scenario(storage_errors=["summary.md"] * 3)
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 0, output
    assert output.count("gcloud does not say what is in gs://bucket/x/runs/games/summary.md") == 3
    assert len(stand_in.trains(0)) == 1


@pytest.mark.slow
def test_new_machines_are_asked_for_until_they_are_there(stand_in: Any):
    """What was refused at first sight ends the launcher, but not on the way to the second set."""
    stand_in.runs(0, "hang")
    stand_in.runs(1, "hang")
    stand_in.scenario(
        events=[RUNNING, {"on": "worker.sh status", "do": "preempt"}],
        create_errors=[
            None,
            "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5s' was exceeded",
            "ERROR: Failed to establish a new connection: Network is unreachable",
        ],
        failed_reasons=[None, "no capacity in time", "Quota 'TPUS' exceeded"],
        delete_errors=["ERROR: FAILED_PRECONDITION: it is being suspended"] * 3,
    )
    code, output = stand_in.run("tpu.sh", *OPTIONS, "--poll-s", "0.1", "--retries", "0")
    assert code == 0, output
    assert output.count("deleting games did not go through") == 3
    for refusal in ("RESOURCE_EXHAUSTED", "Failed to establish", "Quota 'TPUS'"):
        assert re.search(f"granted before and is now refused; trying again: .*{refusal}", output)
    assert "the request for v5p-16 failed, for the 1. time: no capacity in time" in output
    assert len(stand_in.calls("queued-resources create")) == 6


@pytest.mark.slow
def test_what_may_pass_is_tried_more_often(stand_in: Any):
    """One worker says what happened (75), the other was told by it (3)."""
    stand_in.runs(0, *["fail 3"] * 3)
    stand_in.runs(1, *["fail 75"] * 3)
    code, output = stand_in.run("tpu.sh", *QUICK, "--retries", "1")
    assert code == 0, output
    assert output.count("the run ended on worker 1 of 2 (75)") == 3
    assert "trying again (3 of 4)" in output
    assert len(stand_in.trains(0)) == 4


@pytest.mark.slow
def test_what_does_not_pass_ends_the_launcher(stand_in: Any):
    for index in range(2):
        stand_in.runs(index, *["fail 75"] * 9)
    code, output = stand_in.run("tpu.sh", *OPTIONS, "--poll-s", "0.05", "--retries", "1")
    assert code == 1
    assert "failed 5 times in a row" in output
    assert len(stand_in.trains(0)) == 5


@pytest.mark.parametrize(
    ("first", "second", "told", "last"),
    [
        ("fail 75", "fail 2", "worker 1 of 2 (2)", "it is not tried again"),
        ("fail 75", "fail 134", "worker 1 of 2 (134)", "failed 1 times in a row"),
        ("fail 3", "fail 75", "worker 1 of 2 (75)", "failed 1 times in a row"),
    ],
)
def test_the_worker_that_knows_most_is_the_one_that_is_heard(
    stand_in: Any, first: str, second: str, told: str, last: str
):
    stand_in.runs(0, first)
    stand_in.runs(1, second)
    code, output = stand_in.run("tpu.sh", *QUICK, "--retries", "0")
    assert code == 1
    assert f"the run ended on {told}" in output
    assert last in output


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--stop", "--delete"])
def test_a_launcher_that_follows_lets_be_what_is_asked_for_elsewhere(
    stand_in: Any, launchers: list, flag: str
):
    stand_in.scenario(deleting_looks=3)
    process = stand_in.followed()
    launchers.append(process)
    asked = (*QUICK, "--stop") if flag == "--stop" else GIVE_BACK
    code, output = stand_in.run("tpu.sh", *asked)
    assert code == 0, output
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "somebody asked to" in output
    assert f"to go on with the run: bash launch/tpu.sh {' '.join(QUICK)}" in output
    assert len(stand_in.calls("queued-resources create")) == 1
    assert len(stand_in.trains(0)) == 1

    code, output = stand_in.run("tpu.sh", *QUICK)  # a later wish than that
    assert code == 0, output
    assert len(stand_in.calls("queued-resources create")) == (1 if flag == "--stop" else 2)
    assert len(stand_in.trains(0)) == 2


def test_a_launcher_that_waits_for_machines_lets_them_be_given_back(stand_in: Any, launchers: list):
    stand_in.scenario(waiting_looks=10_000)
    process = stand_in.start("tpu.sh", *QUICK)
    launchers.append(process)
    wait_for(lambda: len(stand_in.calls("queued-resources describe")) >= 3, "it to wait")
    code, output = stand_in.run("tpu.sh", *GIVE_BACK)
    assert code == 0, output
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "somebody asked to give games back" in output
    assert len(stand_in.calls("queued-resources create")) == 1


def test_a_run_that_somebody_stopped_meanwhile_is_not_started(stand_in: Any):
    stand_in.scenario(events=[{"on": "worker.sh install", "do": "ask stop"}])
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 130, output
    assert "somebody asked to stop the run" in output
    assert stand_in.trains(0) == []


def test_a_request_that_cannot_be_read_is_not_taken_for_none(stand_in: Any):
    """The first look is at what was asked before, the second would ask for machines."""
    stand_in.scenario(
        storage_errors=["asked/games"] * 3, events=[{"on": "queued-resources", "do": "ask delete"}]
    )
    code, output = stand_in.run("tpu.sh", *OPTIONS, "--poll-s", "0.05")
    assert code == 130, output
    assert output.count("gcloud does not say what is in gs://bucket/x/asked/games/") == 3
    assert stand_in.calls("queued-resources create") == []


@pytest.mark.slow
def test_machines_that_somebody_else_deletes_are_replaced(stand_in: Any):
    """Nobody asked a launcher for it: it may have been the cloud."""
    stand_in.runs(0, "hang")
    stand_in.runs(1, "hang")
    stand_in.scenario(events=[RUNNING, {"on": "worker.sh status", "do": "delete"}])
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert_resumed(stand_in, code, output)


def test_machines_are_given_back_even_if_the_request_cannot_be_left(stand_in: Any):
    assert stand_in.run("tpu.sh", *QUICK)[0] == 0
    stand_in.scenario(storage_errors=["-delete-"])
    code, output = stand_in.run("tpu.sh", *GIVE_BACK)
    assert code == 0, output
    assert "the request could not be left in gs://bucket/x" in output
    assert "games is gone" in output


def test_machines_that_cannot_be_given_back_are_a_loud_failure(stand_in: Any):
    assert stand_in.run("tpu.sh", *QUICK)[0] == 0
    stand_in.scenario(delete_errors=["ERROR: PERMISSION_DENIED"] * 9)
    code, output = stand_in.run("tpu.sh", *GIVE_BACK, "--retries", "1")
    assert code == 1
    assert "IT MAY STILL COST MONEY" in output
    assert len(stand_in.calls("queued-resources delete")) == 2
    stand_in.scenario(describe_errors=1000)
    code, output = stand_in.run("tpu.sh", *GIVE_BACK, "--retries", "1")
    assert code == 1
    assert "IT MAY STILL COST MONEY" in output


def test_stop_without_machines_says_so(stand_in: Any):
    code, output = stand_in.run("tpu.sh", *QUICK, "--stop")
    assert code == 1
    assert "games has no machines now" in output
