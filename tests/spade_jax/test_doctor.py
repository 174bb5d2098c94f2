"""The doctor says what stands and what does not, and is not content with anything less."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import as_user
import pytest

from spade_jax import cli, doctor
from spade_jax.envs import hostile, limits, link

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
class TriedEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        %s
        return observation, 0.0, False, False, {}
"""


def _folder(path: Path, **programs: str) -> str:
    path.mkdir()
    for name, line in programs.items():
        right, _, body = line.partition("; ")
        (path / f"{name}.py").write_text(f"# A kind. RIGHT: {right}\n" + PROGRAM % body)
    return str(path)


def _json(arguments: list[str], capsys) -> tuple[int, dict]:
    code = cli.main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_report_names_everything(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (
        f"Linux {os.uname().release} {os.uname().machine}",
        "load 2 s, reset 2 s, step 1 s",
        "new program  ready in ",
        "step         answered in ",
        "landlock    yes  ABI ",
        "seccomp     yes  ",
        "rlimits     yes  ",
        "\nuid         ",
        "\nnamespaces  ",
        "\ncgroup      ",
        "Programs are contained here.",
    ):
        assert part in text
    assert "a program could" not in text
    assert any(f"\ntier         {tier}: " in text for tier in as_user.best_tiers())


def test_json_holds_the_same(capsys):
    code, report = _json([], capsys)
    assert code == 0 and report["ok"] is True and report["problem"] is None
    assert report["tier"] in as_user.best_tiers() and report["hostile"] is None
    assert {layer["name"] for layer in report["layers"] if layer["present"]} >= {"seccomp"}
    assert all(attempt["refused"] for attempt in report["attempts"])
    assert report["limits"]["memory_bytes"] == limits.Limits().memory_bytes
    assert set(report["timings"]) == {"start_p50_ms", "start_p95_ms", "step_p50_ms", "step_p95_ms"}
    assert all(value > 0 for value in report["timings"].values())


def test_a_missing_layer_has_its_reason_and_remedy(capsys):
    assert cli.main(["doctor", "--without", "landlock"]) == 0
    text = capsys.readouterr().out
    assert "tier         B: " in text
    assert "landlock    no   Landlock is turned off\n" in text
    (remedy,) = [line for line in text.splitlines() if "CONFIG_SECURITY_LANDLOCK" in line]
    assert remedy.strip().startswith("to change that: Landlock needs Linux 5.13")


def test_each_of_the_two_walls_more_can_be_left_out(capsys):
    assert cli.main(["doctor", "--without", "namespaces", "--without", "cgroup"]) == 0
    text = capsys.readouterr().out
    assert "tier         A: " in text
    assert "namespaces  no   turned off\n" in text and "cgroup      no   turned off\n" in text
    code, report = _json(["--without", "cgroup"], capsys)
    assert (code, report["tier"]) == (0, "A")
    assert {"name": "cgroup", "present": False, "detail": "turned off", "fix": ""} in report[
        "layers"
    ]


def test_what_is_not_contained_is_refused_and_nothing_hostile_runs(capsys, tmp_path):
    folder = _folder(tmp_path / "programs", some="harmless; observation = 'x'")
    assert cli.main(["doctor", "--without", "seccomp", "--hostile", folder]) == 1
    text = capsys.readouterr().out
    assert "tier         C: NOT contained" in text
    assert "a program could open a TCP socket\n" in text
    assert "Programs are refused here." in text and "--envs.unsafe-sandbox=I-accept" in text
    assert "some" not in text


def test_a_host_where_nothing_runs_is_still_described(capsys, monkeypatch):
    monkeypatch.setattr(link, "sys", SimpleNamespace(platform="plan9"))
    assert cli.main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "kernel   " in captured.out and captured.err == ""
    assert "environments run on Linux only; this is plan9" in captured.out
    assert captured.out.endswith("Programs cannot run here.\n")
    code, report = _json([], capsys)
    assert code == 1 and report["tier"] is None and report["timings"] == {}
    assert "plan9" in report["problem"]


def test_an_ordinary_program_that_does_not_run_is_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_PROGRAM", "{}\nraise OSError('no \\x1b[m luck')")
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "an ordinary program does not run: load: OSError: no ?[m luck" in text
    assert "new program" not in text  # not measured


def test_outcomes_stand_beside_what_is_right(capsys, tmp_path):
    folder = _folder(
        tmp_path / "programs",
        tries="denied; observation = 'blocked a: E | blocked b: E'",
        breaks="schema|env_error (either); observation = None",
        plays="harmless (a remark); observation = 'fine'",
    )
    assert cli.main(["doctor", "--hostile", folder]) == 0
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines() if line.startswith(("right", "WR"))]
    assert [row[:4] for row in rows[:3]] == [
        ["right", "breaks", "schema|env_error", "schema"],
        ["right", "plays", "harmless", "harmless"],
        ["right", "tries", "denied", "denied"],
    ]
    assert {row[1] for row in rows[3:]} >= {"canary", "sibling", "processes", "descriptors"}
    assert "3 of 3 programs had a right outcome; the host is untouched." in captured.out


def test_a_wrong_outcome_is_told_in_full_and_is_exit_code_1(capsys, tmp_path):
    folder = _folder(
        tmp_path / "programs",
        calm="timeout; observation = 'fine'",
        won="denied; observation = 'blocked a: E | PWNED b: \\x1b]0;hi\\x07'",
    )
    assert cli.main(["doctor", "--hostile", folder]) == 1
    text = capsys.readouterr().out
    assert "WRONG  calm" in text and "WRONG  won" in text
    assert "\n       blocked a: E | PWNED b: ?]0;hi?\n" in text
    assert "0 of 2 programs had a right outcome" in text


def test_a_touched_host_and_an_outcome_that_says_nothing_are_exit_code_1(
    capsys, monkeypatch, tmp_path
):
    async def run_folder(*_: object, **__: object) -> list[hostile.Result]:
        return [
            hostile.Result("program", "spins", ("timeout",), "timeout"),
            hostile.Result("program", "waits", ("timeout",), "infrastructure"),
            hostile.Result("host", "canary", ("untouched",), "changed: weights.bin"),
        ]

    monkeypatch.setattr(hostile, "run_folder", run_folder)
    folder = _folder(tmp_path / "programs", spins="timeout; pass")
    assert cli.main(["doctor", "--hostile", folder]) == 1
    text = capsys.readouterr().out
    assert "void   waits" in text
    assert (
        "1 of 2 programs had a right outcome; the host was touched: canary; 1 could not be judged"
    ) in text
    code, report = _json(["--hostile", folder], capsys)
    assert code == 1 and report["ok"] is False
    assert [(row["kind"], row["right"], row["ok"]) for row in report["hostile"]] == [
        ("program", ["timeout"], True),
        ("program", ["timeout"], False),
        ("host", ["untouched"], False),
    ]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--hostile", "nowhere"], ["'nowhere' is not a folder"]),
        (["--hostile", "a" * 5000], ["is not a folder"]),
        (["--hostile", "EMPTY"], ["holds no program"]),
        (["--hostile", "SILENT"], ["silent.py", "RIGHT"]),
        (["--hostile", "BINARY"], ["cannot be read", "utf-8"]),
        (["--hostile", "HUGE"], ["cannot be read", "more than 1048576 bytes"]),
        (["--hostile", "ESCAPE"], [r"a\x1b[2J", "RIGHT"]),
        (["--hostile", "PIPE"], ["cannot be read", "is not a file"]),
        (["--hostile"], ["--hostile"]),
        (["--hostle", "x"], ["unknown option --hostle", "did you mean --hostile"]),
        (["stray"], ["unknown argument stray"]),
        (["--without", "walls"], ["'walls'", "landlock"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, parts, capsys, tmp_path):
    contents = {"EMPTY": None, "SILENT": b"x = 1\n", "BINARY": b"\xff\n", "HUGE": b"#" * 2**21}
    contents |= dict.fromkeys(("ESCAPE", "PIPE"))
    for name, data in contents.items():
        (tmp_path / name).mkdir()
        if data is not None:
            (tmp_path / name / f"{name.lower()}.py").write_bytes(data)
    (tmp_path / "ESCAPE" / "a\x1b[2J.py").write_text("x = 1\n")
    os.mkfifo(tmp_path / "PIPE" / "pipe.py")
    arguments = [str(tmp_path / word) if word in contents else word for word in arguments]
    assert cli.main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    (message,) = captured.err.splitlines()
    assert message.startswith("spade-jax: ") and captured.out == ""
    for part in parts:
        assert part in message


def test_a_canary_that_cannot_be_laid_out_is_one_line(capsys, monkeypatch, tmp_path):
    (tmp_path / "canary").write_text("somebody's file")
    monkeypatch.setattr(hostile, "CANARY", tmp_path / "canary")
    folder = _folder(tmp_path / "programs", calm="harmless; observation = 'x'")
    assert cli.main(["doctor", "--hostile", folder]) == 2
    assert "canary" in capsys.readouterr().err
    assert (tmp_path / "canary").read_text() == "somebody's file"


def test_results_go_where_nobody_looks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    folder = _folder(tmp_path / "programs", calm="harmless; observation = 'x'")
    assert cli.main(["doctor", "--hostile", folder]) == 0


def test_doctor_loads_no_jax():
    code = (
        "import sys; from spade_jax import cli; cli.main(['doctor']); "
        "print(sorted({'jax', 'flax', 'jaxlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_an_interrupt_leaves_no_process(
    tmp_path: Path,
    descendants: Callable[[int], set[int]],
    all_gone: Callable[[set[int]], bool],
):
    folder = _folder(tmp_path / "programs", spins="timeout; import time; time.sleep(60)")
    command = [sys.executable, "-m", "spade_jax.cli", "doctor", "--hostile", folder]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"running the programs of ")
        give_up = time.monotonic() + 60
        while len(below := descendants(process.pid)) < 4:  # a supervisor, two zygotes, a worker
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"spade-jax: interrupted\n"
        assert process.wait() == 130
    assert all_gone(below)
