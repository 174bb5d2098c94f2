"""launch/tpu.sh and launch/worker.sh against a stand-in for gcloud: what goes right, and all that
can go wrong on the way."""

import os
import re
import signal
from typing import Any

import pytest

from tests.launch.conftest import OPTIONS, QUICK, wait_for

GIVE_BACK = (*OPTIONS[:4], *OPTIONS[6:], "--poll-s", "0.1", "--delete")  # without --type


def test_dry_run_prints_every_command_and_calls_none(stand_in: Any):
    code, output = stand_in.run("tpu.sh", *OPTIONS, "--spot", "--dry-run", "--", "--run.steps", "9")
    assert code == 0, output
    assert stand_in.calls() == []
    shown = [line for line in output.splitlines() if line.startswith("+ ")]
    wanted = (
        r"storage ls gs://bucket ",
        r"storage ls gs://bucket/x/asked/games/ ",
        r"queued-resources describe games ",
        r"queued-resources create games --node-id games --accelerator-type v5p-16 "
        r"--runtime-version v2-alpha-tpuv5 --async --spot ",
        r"queued-resources describe games ",
        r"tpu-vm describe games .*ipAddress",
        r"tpu-vm ssh games --worker all .*status",
        r"git -C .* ls-files",
        r"tpu-vm scp spade_jax.tar.gz games: --worker all",
        r"tpu-vm ssh games --worker all .*worker.sh\\ install",
        r"tpu-vm ssh games --worker all .*worker.sh\\ start\\ gs://bucket/x/runs/games.*run.steps",
        r"tpu-vm ssh games --worker 0 .*worker.sh\\ follow",
        r"storage ls gs://bucket/x/runs/games/summary.md",
    )
    position = 0
    for pattern in wanted:
        found = [i for i in range(position, len(shown)) if re.search(pattern, shown[i])]
        assert found, f"{pattern} is not in {shown[position:]}"
        position = found[0] + 1
    assert all("--zone us-east5-a" in line for line in shown if " compute tpus " in line)
    connections = [line for line in shown if re.search(" tpu-vm (ssh|scp) ", line)]
    assert len(connections) >= 6  # a lost one must not be waited for
    assert all(re.search("(ssh|scp)-flag=-oServerAlive", line) for line in connections)


def test_dry_run_of_delete_and_stop(stand_in: Any):
    code, output = stand_in.run("tpu.sh", *OPTIONS, "--delete", "--dry-run")
    assert code == 0
    left = r"storage cp - gs://bucket/x/asked/games/20\d{6}T\d{6}Z-delete-\d+ "
    assert re.search(left + r"(.|\n)*queued-resources delete games --force", output)
    code, output = stand_in.run("tpu.sh", *OPTIONS, "--stop", "--dry-run")
    assert code == 0
    assert re.search(r"asked/games/20\S+-stop-\d+ (.|\n)*ssh games --worker all .*\\ stop", output)
    assert stand_in.calls() == []


def test_makes_machines_runs_on_all_workers_and_shows_the_log(stand_in: Any):
    odd = "a b'c\"d$HOME;*"
    code, output = stand_in.run(
        "tpu.sh", *QUICK, "--project", "p", "--config", "configs/micro.py", "--", "--run.x", odd
    )
    assert code == 0, output
    (create,) = stand_in.calls("queued-resources", "create")
    assert "--spot" not in create
    assert create[create.index("--project") + 1] == "p"
    for index in range(2):
        (train,) = stand_in.trains(index)
        assert train == [
            *("tpu", "gs://bucket/x/jax-cache", "train", "configs/micro.py"),
            "--run.preemption-url",
            "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
            *("--run.x", odd),
            *("--run.dir", "gs://bucket/x/runs/games", "--resume-if-any"),
        ]
        home = stand_in.folder / f"worker-{index}" / "spade_jax"
        assert (home / "launch" / "worker.sh").exists()
        assert not (home / "kept out").exists()
        assert re.fullmatch(r"[0-9a-f]{40}\n", (home / ".revision").read_text())
    assert "step 2/2 of worker 0" in output
    assert "of worker 1" not in output
    assert "the run is done: gs://bucket/x/runs/games" in output
    told = "--name games --zone us-east5-a --bucket gs://bucket/x --project p --delete"
    assert told in output
    assert stand_in.calls("delete") == []


@pytest.mark.slow
def test_finds_machines_and_a_run_that_are_there(stand_in: Any):
    """Ctrl-C leaves the run going and says how to follow it; the same command follows it again."""
    process = stand_in.followed()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "The run goes on" in output
    assert f"bash launch/tpu.sh {' '.join(QUICK)}" in output

    sent = len(stand_in.calls("scp"))
    process = stand_in.start("tpu.sh", *QUICK)
    seen = len(stand_in.calls("worker.sh status"))
    wait_for(lambda: len(stand_in.calls("worker.sh status")) >= seen + 2, "the second launcher")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert "the run is going on 2 worker(s)" in output
    assert "step 1/2 of worker 0" in output
    assert len(stand_in.calls("scp")) == sent
    assert len(stand_in.calls("create")) == 1
    assert [len(stand_in.trains(index)) for index in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5s' was exceeded",
            "no quota for v5p",
        ),
        ("ERROR: PERMISSION_DENIED: Cloud TPU API has not been used", "gcloud auth login"),
        ("ERROR: INVALID_ARGUMENT: unknown accelerator type", "was refused: ERROR: INVALID"),
    ],
)
def test_a_refused_request_ends_at_once_and_says_why(stand_in: Any, error: str, said: str):
    stand_in.scenario(create_errors=[error])
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 1
    assert said in output
    assert len(stand_in.calls("create")) == 1
    assert stand_in.calls("ssh") == []


def test_a_request_that_did_not_get_through_is_made_again(stand_in: Any):
    stand_in.scenario(create_errors=["ERROR: UNAVAILABLE: try again"])
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 0, output
    assert len(stand_in.calls("create")) == 2


def test_a_quota_told_late_is_told_and_other_failures_are_asked_again(stand_in: Any):
    stand_in.scenario(failed_reasons=["no capacity in time", "Quota 'TPUS' exceeded"])
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 1
    assert "no capacity in time" in output
    assert "no quota for v5p-16 in us-east5-a" in output
    assert len(stand_in.calls("create")) == 2


def test_a_cloud_that_does_not_answer_is_not_an_empty_one(stand_in: Any):
    stand_in.scenario(describe_errors=1000)
    code, output = stand_in.run("tpu.sh", *QUICK, "--retries", "1")
    assert code == 1
    assert "refreshing your current auth tokens" in output
    assert stand_in.calls("create") == []


@pytest.mark.slow
@pytest.mark.parametrize("step", ["worker.sh install", "worker.sh start", "worker.sh status"])
def test_machines_taken_away_are_replaced_and_the_run_resumes(stand_in: Any, step: str):
    stand_in.scenario(events=[{"on": step, "do": "preempt"}])
    if step == "worker.sh status":
        # The first look is before the run is there; the third finds it.
        stand_in.scenario(
            events=[
                {"on": step, "do": "nothing", "times": 2},
                {"on": step, "do": "preempt"},
            ]
        )
        stand_in.runs(0, "hang")
        stand_in.runs(1, "hang")
    code, output = stand_in.run("tpu.sh", *QUICK, "--spot")
    assert code == 0, output
    assert "the machines were taken away" in output
    assert len(stand_in.calls("create", "--spot")) == 2
    assert len(stand_in.calls("queued-resources delete")) == 1
    trains = stand_in.trains(0)
    assert len(trains) == (2 if step == "worker.sh status" else 1)
    assert all(train[-1] == "--resume-if-any" for train in trains)


def test_a_worker_that_cannot_be_set_up_is_named(stand_in: Any):
    stand_in.scenario(events=[{"on": "worker.sh install", "do": "fail worker 1", "times": 99}])
    code, output = stand_in.run("tpu.sh", *QUICK, "--retries", "1")
    assert code == 1
    assert output.count("not installed: worker(s) 1 of 2") == 2
    assert "failed 2 times in a row" in output
    assert "--delete" in output
    assert stand_in.trains(0) == []
    assert stand_in.calls("queued-resources delete") == []


def test_a_worker_that_fails_once_is_set_up_again(stand_in: Any):
    stand_in.scenario(events=[{"on": "worker.sh install", "do": "fail worker 0"}])
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 0, output
    assert "trying again (1 of 3)" in output


@pytest.mark.slow
def test_a_run_that_fails_on_one_worker_is_stopped_on_all_and_resumed(stand_in: Any):
    stand_in.runs(0, "hang")
    stand_in.runs(1, "fail 134")
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 0, output
    assert "the run ended on worker 1 of 2 (134)" in output
    assert "step 1/2 of worker 1: fail 134" in output  # the end of its log
    assert [len(stand_in.trains(index)) for index in range(2)] == [2, 2]
    assert len(stand_in.calls("create")) == 1


@pytest.mark.slow
def test_a_run_killed_with_all_that_watched_it_is_resumed(stand_in: Any):
    stand_in.runs(0, "fail 137")
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 0, output
    assert "(137)" in output


def test_a_run_that_refuses_its_settings_is_not_tried_again(stand_in: Any):
    stand_in.runs(0, "fail 3")  # told by the other one
    stand_in.runs(1, "fail 2")
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 1
    assert "the run ended on worker 1 of 2 (2)" in output
    assert "refused its settings" in output
    assert len(stand_in.trains(0)) == 1


@pytest.mark.slow
def test_a_run_that_saved_and_ended_early_is_not_taken_for_done(stand_in: Any):
    for index in range(2):
        stand_in.runs(index, "early")
    code, output = stand_in.run("tpu.sh", *QUICK)
    assert code == 0, output
    assert "stopped before its last step" in output
    assert [len(stand_in.trains(index)) for index in range(2)] == [2, 2]


@pytest.mark.slow
def test_stop_lets_the_run_save_and_delete_gives_the_machines_back(stand_in: Any):
    process = stand_in.followed()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    code, output = stand_in.run("tpu.sh", *QUICK, "--stop")
    assert code == 0, output
    for index in range(2):
        home = stand_in.folder / f"worker-{index}" / ".spade_jax"
        assert "saved on SIGTERM" in (home / "log").read_text()
        assert (home / "exit").read_text() == "0\n"
    code, output = stand_in.run("tpu.sh", *GIVE_BACK)
    assert code == 0, output
    assert "games is gone" in output
    assert not list(stand_in.folder.glob("worker-*"))
    code, output = stand_in.run("tpu.sh", *GIVE_BACK)  # again: nothing to do
    assert code == 0, output
    assert len(stand_in.calls("queued-resources delete")) == 1


def test_machines_of_another_type_are_left_alone(stand_in: Any):
    assert stand_in.run("tpu.sh", *QUICK)[0] == 0
    other = [word if word != "v5p-16" else "v5p-128" for word in QUICK]
    code, output = stand_in.run("tpu.sh", *other)
    assert code == 1
    assert "games is a v5p-16, and --type is v5p-128" in output
    assert stand_in.calls("queued-resources delete") == []


def test_a_bucket_that_is_not_there_is_refused_before_machines_are_asked_for(stand_in: Any):
    code, output = stand_in.run("tpu.sh", *QUICK[:6], "--bucket", "gs://other")
    assert code == 1
    assert "--bucket gs://other cannot be used" in output
    assert stand_in.calls("create") == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--name is missing"),
        (OPTIONS[:2], "--zone is missing"),
        (OPTIONS[:4], "--type is missing"),
        (OPTIONS[:6], "--bucket is missing"),
        ((*OPTIONS[:4], "--stop"), "--bucket is missing: there a launcher that follows the run"),
        ((*OPTIONS[:4], "--delete"), "queued-resources delete games --zone us-east5-a --force"),
        ((*OPTIONS[:6], "--bucket", "s3://b"), "expected gs://BUCKET"),
        ((*OPTIONS[:4], "--bucket", "b", "--delete"), "expected gs://BUCKET"),
        ((*OPTIONS, "--name", "Games"), "--name Games: expected"),
        ((*OPTIONS, "--type=h100-8"), "name its runtime with --version"),
        ((*OPTIONS, "--config", "configs/none.py"), "there is no such file"),
        ((*OPTIONS, "--zoen", "x"), "unknown option --zoen"),
        ((*OPTIONS, "--run.steps", "3"), "settings stand after --"),
        ((*OPTIONS, "--", "--run.dir", "x"), "the launcher's"),
        ((*OPTIONS, "--poll-s", "soon"), "expected seconds"),
        ((*OPTIONS, "--retries"), "--retries needs a value"),
        ((*OPTIONS, "now"), "unexpected argument now"),
    ],
)
def test_bad_options_are_refused_in_one_line(stand_in: Any, arguments: tuple, said: str):
    code, output = stand_in.run("tpu.sh", *arguments)
    assert code == 1
    assert said in output
    assert output.count("\n") == 1
    assert stand_in.calls() == []


def test_help_lists_every_option(stand_in: Any):
    code, output = stand_in.run("tpu.sh", "--help")
    assert code == 0
    script = (stand_in.root / "launch" / "tpu.sh").read_text()
    options = set(re.findall(r"(?<=[ |])--[a-z][a-z-]+(?= *[|)])", script)) - {"--help"}
    assert {"--spot", "--name", "--poll-s"} <= options
    for option in options:
        assert option in output
    assert "set -euo" not in output
