"""Playing in the terminal: files, pipes and a person; every mistake is one line, every fault a
sentence, and nothing is left running."""

import contextlib
import functools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spade_jax import cli
from spade_jax import play as play_module
from spade_jax.envs.pool import Pool

ROOT = Path(__file__).resolve().parents[2]

COUNTER = """
class CounterEnv:
    def reset(self, seed=None):
        self.left = 2 + seed
        return f"{self.left} left", {}

    def step(self, action):
        if action == "fail":
            raise ValueError("no \\x1b[2J way")
        if action == "hang":
            import time; time.sleep(60)
        if action == "exit":
            import os; os._exit(3)
        if action == "number":
            return 3, 0.0, False, False, {}
        if action == "stop":
            return "stopped", 0.0, False, True, {}
        if action.startswith("say "):
            return action[4:], 0.0, False, False, {}
        self.left -= action == "down"
        return f"{self.left} left", float(not self.left), not self.left, False, {}
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "counter.py"
    path.write_text(COUNTER)
    return path


def _play(program: Path, actions: list[str], *options: str) -> int:
    path = program.with_name("actions.json")
    path.write_text(json.dumps(actions))
    return cli.main(["play", str(program), "--actions", str(path), *options])


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spade_jax.cli", "play", *arguments]


def test_actions_win_the_game_and_the_transcript_tells_it_all(program, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    assert _play(program, ["up", "down", "down", "down"], "--transcript", str(out)) == 0
    text = capsys.readouterr().out
    assert "finished: won with reward 1 after 3 turns" in text
    assert "1 of the 4 actions were not played" in text
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0] == {
        "seed": 0,
        "turn": 0,
        "action": None,
        "observation": "2 left",
        "reward": None,
        "terminated": False,
        "truncated": False,
        "outcome": None,
        "sandbox": lines[1]["sandbox"],
    }
    assert [line["action"] for line in lines] == [None, "up", "down", "down"]
    assert [line["reward"] for line in lines] == [None, 0.0, 0.0, 1.0]
    assert lines[3]["terminated"] is True and lines[3]["outcome"] == "finished"


def test_a_transcript_can_be_played_again(program, capsys, tmp_path):
    first, again = tmp_path / "first.jsonl", tmp_path / "again.jsonl"
    actions = ["say two\nlines", "down", "down"]
    assert _play(program, actions, "--transcript", str(first)) == 0
    arguments = ["play", str(program), "--actions", str(first), "--transcript", str(again)]
    assert cli.main(arguments) == 0
    assert first.read_text() == again.read_text()
    assert "\n| two\n| lines\n" in capsys.readouterr().out


def test_the_seed_reaches_the_program(program, capsys):
    assert _play(program, [], "--seed", "5") == 0
    assert "| 7 left\nthe actions ended after 0 turns; the episode did not" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("action", "outcome", "code", "parts"),
    [
        ("fail", "env_error", 1, ["the program failed, in turn 1", "ValueError: no ?[2J way"]),
        ("hang", "timeout", 1, ["missed its deadline", "limit of 1 s"]),
        ("exit", "worker_died", 1, ["ended, in turn 1"]),
        ("number", "schema", 1, ["breaks the contract", "int"]),
        ("stop", "env_truncated", 0, ["without a result after 1 turn"]),
    ],
)
def test_an_end_is_a_sentence_with_its_outcome(
    action, outcome, code, parts, program, capsys, tmp_path
):
    out = tmp_path / "out.jsonl"
    assert _play(program, [action], "--transcript", str(out)) == code
    captured = capsys.readouterr()
    last_line = captured.out.strip().splitlines()[-1]
    assert last_line.startswith(f"{outcome}: ") and captured.err == ""
    for part in parts:
        assert part in last_line
    last = json.loads(out.read_text().splitlines()[-1])
    assert (last["action"], last["outcome"]) == (action, outcome)
    assert (last["reward"] is None) == (code == 1)


def test_a_program_that_cannot_start_is_a_fault_too(tmp_path, capsys):
    program = tmp_path / "broken.py"
    program.write_text("class BrokenEnv(:")
    out = tmp_path / "out.jsonl"
    assert _play(program, ["x"], "--transcript", str(out)) == 1
    assert "env_error: the program failed, before the first turn" in capsys.readouterr().out
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["action"] is None and line["observation"] is None
    assert "SyntaxError" in line["detail"]


def test_escapes_do_not_reach_the_terminal_and_lines_cannot_be_forged(program, capsys):
    evil = "say \x1b]52;c;AAAA\x07\x9b2J\u202e\r\nfinished: won\x0b\u2028turn 9"
    assert _play(program, [evil]) == 0
    text = capsys.readouterr().out
    assert set(text) - set("\n") == {c for c in text if c.isprintable()}
    assert r"| \x1b]52;c;AAAA\x07\x9b2J\u202e" in text.splitlines()
    assert r"| finished: won\x0b\u2028turn 9" in text.splitlines()
    assert not any(line.startswith("finished") for line in text.splitlines())


@pytest.mark.parametrize(
    ("name", "text", "actions"),
    [
        ("a.txt", "one\n\ntwo \r\n\x0b\n[1]", ["one", "two ", "\x0b", "[1]"]),
        ("a.json", '["a\\nb", ""]', ["a\nb", ""]),
        ("a.jsonl", '"a\\nb"\n\n""\n', ["a\nb", ""]),
        ("a.jsonl", '{"action": null}\n{"action": "x"}\n', ["x"]),
        ("none.txt", "", []),
    ],
)
def test_actions_files(name, text, actions, tmp_path):
    from spade_jax.play import read_actions

    path = tmp_path / name
    path.write_bytes(text.encode())
    assert read_actions(path) == actions


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.json", b"{}", "not a list of strings"),
        ("a.json", b'["x", 1]', "action 2 is 1"),
        ("a.json", b'["\\ud800"]', "expected a string of encodable text"),
        ("a.json", b"[", "is not JSON"),
        ("a.jsonl", b'"x"\nnope\n', "line 2 is not JSON"),
        ("a.jsonl", b'"x"\n{"action": "y"}\n', "action 2 is {"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("", b"", "Is a directory"),
        ("missing.txt", None, "No such file"),
    ],
)
def test_bad_actions_are_one_line(name, text, part, program, capsys):
    path = program.parent / name
    if name and text is not None:
        path.write_bytes(text)
    _refused(["play", str(program), "--actions", str(path)], [part], capsys)


def _refused(arguments: list[str], parts: list[str], capsys) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("spade-jax: ") and captured.err.count("\n") == 1
    assert captured.out == ""
    for part in parts:
        assert part in captured.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["nothing to play", "--help"]),
        (["--hint"], ["nothing to play"]),
        (["missing.py"], ["missing.py", "No such file"]),
        ([""], ["nothing to play"]),
        (["a\0b"], ["null"]),
        (["a" * 5000], ["File name too long"]),
        (["nopackage:" + "a" * 5000], ["neither a file nor"]),
        (["PROGRAM", "--transcript", "a" * 5000], ["File name too long"]),
        (["FOLDER"], ["Is a directory"]),
        (["EMPTY"], ["is empty", "ends in Env"]),
        (["BINARY"], ["not UTF-8", "at byte 1"]),
        (["LARGE"], ["more than 65536 bytes"]),
        (["nopackage:thing"], ["neither a file nor", "'nopackage'", "reasoning_gym", "textarena"]),
        (["gem:thing", "--hint"], ["gem:thing comes without a hint", "--hint TEXT"]),
        (["PROGRAM", "--sed", "3"], ["unknown option --sed", "did you mean --seed"]),
        (["PROGRAM", "more"], ["unknown argument more"]),
        (["PROGRAM", "--seed"], ["--seed"]),
        (["PROGRAM", "--seed", "x"], ["--seed", "'x'"]),
        (["PROGRAM", "--seed", "-1"], ["--seed", "'-1'"]),
        (["PROGRAM", "--seed", "1.5"], ["--seed", "'1.5'"]),
        (["PROGRAM", "--hint"], ["no hint", "counter.json", "--hint TEXT"]),
        (["--hint", "PROGRAM"], ["no hint", "counter.json"]),
        (["PROGRAM", "--hint", "missing.txt"], ["hint file", "missing.txt"]),
        (["PROGRAM", "--hint", "BADHINT"], ["holds no hint"]),
        (["PROGRAM", "--transcript", "/nowhere/out"], ["transcript", "/nowhere/out"]),
        (["PROGRAM", "--transcript", "FOLDER"], ["transcript", "Is a directory"]),
        (["PROGRAM", "--transcript", "PROGRAM"], ["would overwrite"]),
        (["PROGRAM", "--transcript", "/dev/full"], ["transcript", "No space left"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, parts, program, capsys):
    files = {
        "PROGRAM": COUNTER.encode(),
        "EMPTY": b" \n",
        "BINARY": b"#\xff",
        "LARGE": b"#" * 65537,
        "BADHINT": b'{"hint": null}',
    }
    folder = program.parent
    for name, data in files.items():
        (folder / f"{name.lower()}.json").write_bytes(data)
    named = {name: str(folder / f"{name.lower()}.json") for name in files}
    named |= {"PROGRAM": str(program), "FOLDER": str(folder)}
    arguments = [named.get(argument, argument) for argument in arguments]
    if "/dev/full" in arguments:  # told once something is written
        assert cli.main(["play", *arguments]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and all(part in message for part in parts)
    else:
        _refused(["play", *arguments], parts, capsys)
    assert program.read_text() == COUNTER


def test_hints_come_from_the_run_a_file_or_the_line(program, capsys, tmp_path):
    program.with_suffix(".json").write_text(json.dumps({"hint": "go\x1b[m down"}))
    (tmp_path / "note.txt").write_text("from a note\n")
    assert _play(program, [], "--hint") == 0
    assert "\nhint: go\\x1b[m down\n" in capsys.readouterr().out
    assert _play(program, [], "--hint", str(tmp_path / "note.txt")) == 0
    assert "\nhint: from a note\n" in capsys.readouterr().out
    assert _play(program, [], "--hint", "say down twice.") == 0
    assert "\nhint: say down twice.\n" in capsys.readouterr().out
    assert _play(program, []) == 0
    assert "\nhint: " not in capsys.readouterr().out


def test_an_environment_of_a_package_is_played(program, capsys, monkeypatch):
    fakes = Path(__file__).with_name("envs") / "adapters" / "fakes"
    monkeypatch.setattr(play_module, "Pool", functools.partial(Pool, package_path=[str(fakes)]))
    actions = program.with_name("actions.json")
    actions.write_text('["heads", "heads"]')
    assert cli.main(["play", "gem:game:Flip-v0-easy", "--actions", str(actions)]) == 0
    text = capsys.readouterr().out
    assert "gem:game:Flip-v0-easy, seed 0" in text and "| Guess the flip." in text
    assert "after 2 turns" in text


def _piped(data: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(_command(*arguments), input=data, cwd=ROOT, capture_output=True)


def test_piped_input_plays(program):
    done = _piped(b"up\n\ndown\r\ndown", str(program))
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"> up\nturn 1, reward 0\n| 2 left\n> down\n" in done.stdout
    assert done.stdout.endswith(b"finished: won with reward 1 after 3 turns\n")


def test_piped_input_that_ends_or_is_no_text(program):
    done = _piped(b"up\n", str(program))
    assert done.returncode == 0
    assert done.stdout.endswith(b"the input ended after 1 turn; the episode did not\n")
    done = _piped(b"up\n" + b"x" * 2**18, str(program))
    assert done.returncode == 2
    assert done.stderr == b"spade-jax: line 2 of standard input has more than 131072 bytes\n"
    done = _piped(b"up\n\xff\n", str(program))
    assert done.returncode == 2
    assert done.stderr.startswith(b"spade-jax: line 2 of standard input is not UTF-8")
    assert done.stderr.count(b"\n") == 1


def test_closed_streams_are_borne(program):
    shell = 'exec "$@" <&-'
    arguments = ["sh", "-c", shell, "sh", *_command(str(program))]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and b"the input ended after 0 turns" in done.stdout
    # A reader that leaves: a quiet end, not a traceback.
    shell = '"$@" | head -n 1'
    arguments = ["sh", "-c", shell, "sh", *_command(str(program))]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, input=b"up\n" * 5000)
    assert done.stderr == b"" and done.stdout.count(b"\n") == 1


@pytest.mark.parametrize("command", ["play", "doctor"])
def test_an_output_that_takes_nothing_is_one_line(command, program):
    arguments = [sys.executable, "-m", "spade_jax.cli", command]
    arguments += [str(program)] if command == "play" else []
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            arguments, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2
    assert done.stderr == b"spade-jax: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("given", [False, True])
def test_a_hint_that_is_played_with_is_not_overwritten(given, program, capsys):
    path = program.with_suffix(".json")
    path.write_text('{"hint": "go down"}')
    hint = ["--hint", str(path)] if given else ["--hint"]
    arguments = ["play", str(program), "--transcript", str(path), *hint]
    _refused(arguments, ["would overwrite"], capsys)
    assert path.read_text() == '{"hint": "go down"}'


def test_letters_that_the_output_cannot_show_are_escaped(program):
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        _command(str(program)),
        input="say ☃ ü\n".encode(),
        cwd=ROOT,
        capture_output=True,
        env=environment,
    )
    assert done.returncode == 0 and b"| \\u2603 \xfc\n" in done.stdout


def test_play_loads_no_jax(program):
    code = (
        "import sys; from spade_jax import cli; "
        f"code = cli.main(['play', {str(program)!r}]); "
        "print(code, sorted({'jax', 'flax', 'jaxlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, input="", text=True
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


class _Terminal:
    """A play on a terminal of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.text = ""
        self.end, terminal = pty.openpty()
        start = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *_command(*arguments)],
            cwd=ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(terminal)

    def wait_for(self, text: str) -> None:
        give_up = time.monotonic() + 60
        while text not in self.text:
            assert time.monotonic() < give_up, f"no {text!r} in {self.text!r}"
            self._look(1)

    def type(self, text: str) -> None:
        self.text = ""
        os.write(self.end, text.encode())

    def type_until_it_ends(self, text: str) -> None:
        """As a person would: a Ctrl-C that comes just as `input` begins is lost in Python."""
        give_up = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < give_up, f"{text!r} does not end it; {self.text!r}"
            os.write(self.end, text.encode())
            quiet = time.monotonic() + 5
            while self.process.poll() is None and time.monotonic() < quiet:
                self._look(0.1)

    def _look(self, patience_s: float) -> None:
        if select.select([self.end], [], [], patience_s)[0]:
            with contextlib.suppress(OSError):  # how a terminal says that nobody is left
                self.text += os.read(self.end, 1 << 16).decode()

    def rest(self) -> str:
        with contextlib.suppress(OSError):
            while data := os.read(self.end, 1 << 16):
                self.text += data.decode()
        return self.text


@pytest.fixture
def terminal(program) -> Iterator[_Terminal]:
    terminal = _Terminal([str(program)])
    try:
        terminal.wait_for("> ")
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.end)


def test_a_person_plays_and_wins(terminal):
    assert "| 2 left" in terminal.text and "Ctrl-D leaves" in terminal.text
    terminal.type("\n")  # no action
    terminal.wait_for("> ")
    terminal.type("down\n")
    terminal.wait_for("| 1 left\r\n> ")
    terminal.type("down\n")
    assert "finished: won with reward 1 after 2 turns" in terminal.rest()
    assert terminal.process.wait() == 0


def test_ctrl_d_leaves(terminal):
    terminal.type("\x04")
    assert "the input ended after 0 turns" in terminal.rest()
    assert terminal.process.wait() == 0


@pytest.mark.parametrize("typed", ["\x03", "hang\n\x03"], ids=["waiting", "in a step"])
def test_ctrl_c_leaves_nothing_behind(
    typed: str,
    terminal: _Terminal,
    descendants: Callable[[int], set[int]],
    all_gone: Callable[[set[int]], bool],
):
    below = descendants(terminal.process.pid)
    assert len(below) >= 4  # a supervisor, two zygotes, a worker
    *first, last = typed.splitlines(keepends=True)
    for line in first:
        terminal.type(line)
        time.sleep(0.2)
    terminal.type_until_it_ends(last)
    rest = terminal.rest()
    assert "interrupted after" in rest and "Traceback" not in rest
    assert terminal.process.wait() == 130
    assert all_gone(below)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_no_process(
    number: signal.Signals,
    program: Path,
    descendants: Callable[[int], set[int]],
    all_gone: Callable[[set[int]], bool],
):
    with subprocess.Popen(
        _command(str(program)), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"| 2 left\n":
            pass
        below = descendants(process.pid)
        process.send_signal(number)
        assert process.wait() == (130 if number is signal.SIGINT else -number)
    assert len(below) >= 4 and all_gone(below)
