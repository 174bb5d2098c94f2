"""Files are whole and in place, a full disk is one clear line, a resume cuts back to its step."""

import errno
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from helpers import make_episode, make_trajectory, make_turn
from spade_jax.errors import SpadeError, TransientError
from spade_jax.telemetry import sinks
from spade_jax.telemetry.sinks import JsonlSink, RunFolder, truncate_after, write_atomic
from spade_jax.types import (
    Design,
    Environment,
    EnvironmentSource,
    Gate,
    GateResult,
    Verdict,
)

PROGRAM = "class GuessEnv:\n    name = '\u00e9'\r\n"


def make_environment(cycle: int = 0) -> Environment:
    source = EnvironmentSource(
        PROGRAM, skill="Optimization", difficulty="easy", document_id="numpy.sum"
    )
    verdict = Verdict(admitted=True, measures={"num_solution_seeds": 5})
    return Environment(
        source, hint="halve the range", cycle=cycle, design_id=f"design-{cycle}-0", verdict=verdict
    )


def make_design(
    source: EnvironmentSource | None, cycle: int = 0, design_id: str = "design-1"
) -> Design:
    return Design(
        design_id=design_id,
        cycle=cycle,
        skill="Optimization",
        difficulty="easy",
        document_id="numpy.sum",
        completion="I would rather not.",
        trajectory=make_trajectory(),
        verdict=Verdict(False, "parse", "no program", gates={Gate.PARSE: GateResult.REFUSED}),
        source=source,
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_jsonl_puts_the_step_first_and_sorts_the_rest(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"loss/agent": 0.1, "agent/win_frac": 1.0, "progress/step": 0})
    sink.write({"progress/step": 1})
    assert sink.path.read_text() == (
        '{"progress/step": 0, "agent/win_frac": 1.0, "loss/agent": 0.1}\n{"progress/step": 1}\n'
    )


def test_jsonl_keeps_every_bit_of_a_float(tmp_path: Path):
    value = float(np.nextafter(0.1, 1))
    JsonlSink(tmp_path / "m.jsonl").write({"progress/step": 0, "loss/agent": value})
    assert lines(tmp_path / "m.jsonl")[0]["loss/agent"] == value


@pytest.mark.parametrize(("step", "kept"), [(-1, []), (0, [0]), (1, [0, 1]), (5, [0, 1, 2])])
@pytest.mark.parametrize("key", ["progress/step", "step"])
@pytest.mark.parametrize("torn", [b"", b'{"progress/st', b"\xff"])
def test_truncate_keeps_steps_up_to_the_given_one(
    tmp_path: Path, step: int, kept: list[int], key: str, torn: bytes
):
    path = tmp_path / "m.jsonl"
    path.write_bytes(
        b"".join(json.dumps({key: i, "x": i / 7}).encode() + b"\n" for i in range(3)) + torn
    )
    truncate_after(path, step)
    assert [record[key] for record in lines(path)] == kept
    JsonlSink(path).write({"progress/step": 9})  # what is appended stands on a line of its own
    assert lines(path)[-1] == {"progress/step": 9}
    assert files(tmp_path) == {"m.jsonl"}


def test_truncate_drops_a_whole_record_that_lacks_its_newline(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    truncate_after(path, 1)
    assert path.read_text() == '{"step": 0}\n'


def test_truncate_of_a_missing_file_does_nothing(tmp_path: Path):
    truncate_after(tmp_path / "m.jsonl", 3)
    assert files(tmp_path) == set()


@pytest.mark.parametrize("damage", ["nonsense", "[]", '{"loss/agent": 1.0}', '{"step": null}', ""])
def test_truncate_refuses_a_damaged_line_in_the_middle(tmp_path: Path, damage: str):
    path = tmp_path / "m.jsonl"
    before = f'{{"step": 0}}\n{damage}\n{{"step": 2}}\n'
    path.write_text(before)
    with pytest.raises(SpadeError, match=r"m\.jsonl, line 2"):
        truncate_after(path, 1)
    assert path.read_text() == before


def test_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "summary.md"
    path.write_text("old")

    def fill_up(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    with pytest.raises(SpadeError, match=r"summary\.md: No space left.*free some space.*--resume"):
        write_atomic(path, b"new")
    assert path.read_text() == "old"
    assert files(tmp_path) == {"summary.md"}


@pytest.mark.parametrize(
    ("number", "may_pass"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EIO, True),
        (errno.ESTALE, True),
        (errno.EACCES, False),
        (errno.EROFS, False),
        (errno.ENOTDIR, False),
    ],
)
def test_what_may_pass_of_a_disk_is_told_from_what_is_wrong_with_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, may_pass: bool
):
    def refuse(self: Path, data: bytes) -> int:
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(SpadeError, match="cannot write") as raised:
        write_atomic(tmp_path / "summary.md", b"new")
    assert isinstance(raised.value, TransientError) == may_pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_jsonl_on_a_really_full_disk():
    with pytest.raises(SpadeError, match=r"/dev/full: No space left.*--resume"):
        JsonlSink(Path("/dev/full")).write({"progress/step": 0})


def test_run_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpadeError, match=r"file/run.*--run\.dir"):
        RunFolder(tmp_path / "file" / "run")


def test_config_comes_back_and_the_revision_is_kept(tmp_path: Path):
    run = RunFolder(tmp_path / "run")
    assert run.saved_config() is None
    run.save_config({"run": {"seed": 3}})
    assert run.saved_config() == {"run": {"seed": 3}}
    assert (run.path / "revision.txt").read_text().strip() == sinks.code_revision()
    (run.path / "config.json").write_text("{")
    with pytest.raises(SpadeError, match=r"config\.json is damaged"):
        run.saved_config()


def test_revision_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert sinks.code_revision() == "unknown"


def test_log_checks_names(tmp_path: Path):
    run = RunFolder(tmp_path)
    run.log({"progress/step": 0, "loss/agent": np.float32(0.5)})
    with pytest.raises(ValueError, match="loss/agnet"):
        run.log({"progress/step": 1, "loss/agnet": 0.5})
    assert lines(tmp_path / "metrics.jsonl") == [{"progress/step": 0, "loss/agent": 0.5}]


def test_episodes_hold_what_a_reader_needs(tmp_path: Path):
    run = RunFolder(tmp_path)
    shown = "caf\u00e9 \ud800 \u2028"  # an environment may show any code point
    episode = make_episode(step=3, turns=(make_turn(observation=shown),))
    void = make_episode(episode_id="episode-1", episode_return=None, trajectory=None, turns=())
    run.save_episodes(3, [episode, void])
    first, second = [
        json.loads(line)
        for line in (tmp_path / "episodes/step_00003.jsonl").read_bytes().split(b"\n")[:-1]
    ]
    assert first["turns"] == [
        {"observation": shown, "completion": "\\boxed{5}", "action": "5", "reward": 0.0}
    ]
    assert first["trajectory"]["tokens"] == [10, 11, 12, 13, 14]
    assert first["trajectory"]["loss_mask"] == [False, False, False, True, True]
    logprobs = np.array(first["trajectory"]["sampler_logprobs"], np.float32)
    assert np.array_equal(logprobs, episode.trajectory.sampler_logprobs)
    assert first["trajectory"]["policy_version"] == 0
    assert (first["outcome"], first["arm"], first["seed"], first["step"]) == (
        "finished",
        "unhinted",
        0,
        3,
    )
    assert second["episode_return"] is None and second["trajectory"] is None


def test_environment_is_written_byte_for_byte_under_its_hash(tmp_path: Path):
    RunFolder(tmp_path).save_environment(make_environment(cycle=2))
    name = hashlib.sha256(PROGRAM.encode()).hexdigest()[:12]
    assert files(tmp_path) == {f"environments/002/{name}.py", f"environments/002/{name}.json"}
    assert (tmp_path / f"environments/002/{name}.py").read_bytes() == PROGRAM.encode()
    record = json.loads((tmp_path / f"environments/002/{name}.json").read_text())
    assert record["hint"] == "halve the range"
    assert record["verdict"]["admitted"] is True and record["verdict"]["measures"] == {
        "num_solution_seeds": 5
    }
    assert record["source"] == {
        "skill": "Optimization",
        "difficulty": "easy",
        "document_id": "numpy.sum",
    }


def test_rejected_designs_keep_their_reason(tmp_path: Path):
    run = RunFolder(tmp_path)
    run.save_rejected(make_design(make_environment().source, cycle=1, design_id="a"))
    run.save_rejected(make_design(None, cycle=1, design_id="b"))
    assert files(tmp_path) == {
        f"rejected/001/{name}" for name in ("a.py", "a.json", "b.txt", "b.json")
    }
    assert (tmp_path / "rejected/001/a.py").read_bytes() == PROGRAM.encode()
    assert (tmp_path / "rejected/001/b.txt").read_text() == "I would rather not."
    record = json.loads((tmp_path / "rejected/001/b.json").read_text())
    assert record["verdict"] == {
        "admitted": False,
        "gate": "parse",
        "reason": "no program",
        "measures": {},
        "gates": {"parse": "refused"},
    }
    assert "trajectory" not in record


@pytest.mark.parametrize("design_id", ["../../etc/passwd", "", ".hidden", "a/b", "a\nb", "a\x00"])
def test_only_our_own_ids_become_file_names(tmp_path: Path, design_id: str):
    with pytest.raises(ValueError, match="cannot name a file"):
        RunFolder(tmp_path / "run").save_rejected(make_design(None, design_id=design_id))
    assert files(tmp_path) == set()


def test_cut_leaves_the_folder_as_it_was_at_the_step(tmp_path: Path):
    run = RunFolder(tmp_path)

    def do_step(step: int) -> None:
        if step % 2 == 0:
            run.save_environment(make_environment(cycle=step // 2))
            run.save_rejected(make_design(None, cycle=step // 2))
        run.save_episodes(step, [make_episode(step=step)])
        run.log({"progress/step": step, "loss/agent": step / 7})

    run.save_config({})
    do_step(0)
    do_step(1)
    do_step(2)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    do_step(3)
    do_step(4)
    run.save_summary("# done\n")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"progress/step": 5, "los')
    (tmp_path / "episodes/step_00005.jsonl.tmp").write_text("half")
    run.checkpoints.mkdir()
    (run.checkpoints / "state.tmp").write_text("Orbax's")
    before["checkpoints/state.tmp"] = b"Orbax's"
    for _ in range(2):
        run.cut(step=2, cycle=1)
        assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_cut_to_nothing(tmp_path: Path):
    run = RunFolder(tmp_path)
    run.cut(step=-1, cycle=-1)
    run.save_environment(make_environment())
    run.save_episodes(0, [])
    run.log({"progress/step": 0})
    run.cut(step=-1, cycle=-1)
    assert files(tmp_path) == {"metrics.jsonl"}
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_folder_has_one_run_at_a_time(tmp_path: Path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with (
        first.locked(),
        pytest.raises(TransientError, match="in use by another run"),
        second.locked(),
    ):
        raise AssertionError("two runs in one folder")
    with RunFolder(tmp_path / "run").locked():
        pass


@pytest.mark.parametrize("name", ["checkpoints", "episodes", "environments", "rejected"])
def test_a_file_in_a_folders_place_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_text("")
    with pytest.raises(SpadeError, match=f"{name} is not a folder"):
        RunFolder(tmp_path)


def test_a_folder_in_a_files_place_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(SpadeError, match=r"metrics\.jsonl is a folder"):
        RunFolder(tmp_path)


def test_logged_steps_are_those_with_a_whole_line(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.logged_steps() == []
    whole = [
        json.dumps({"progress/step": step, "progress/cycle": 0, "time/step_s": 1.0})
        for step in range(2)
    ]
    lacking = json.dumps({"progress/step": 2})
    (tmp_path / "metrics.jsonl").write_text("\n".join([*whole, lacking, whole[0][:-9]]))
    assert folder.logged_steps() == [0, 1]
    (tmp_path / "metrics.jsonl").write_text('{"progress/step": NaN}\n')
    with pytest.raises(SpadeError, match="line 1, is damaged"):
        folder.logged_steps()


def test_push_brings_what_a_resume_needs_to_the_disk(tmp_path: Path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(sinks, "_sync", synced.append)
    run = RunFolder(tmp_path)
    run.push()
    assert synced == []
    run.save_environment(make_environment())
    run.save_episodes(0, [])
    run.log({"progress/step": 0})
    run.push()
    names = {path.relative_to(tmp_path).as_posix() for path in synced}
    assert names == {".", "metrics.jsonl", "episodes", "episodes/step_00000.jsonl"}
    run.push()
    assert len(synced) == len(names)  # once
    run.note_checkpoint(3)
    assert run.had_checkpoint()
