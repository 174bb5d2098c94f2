"""A run folder in a bucket, which is a stand-in: what is there when, and how a machine resumes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_stand_in import SharedStore, Store, bucket_store

from helpers import make_episode
from spade_jax.errors import SpadeError, TransientError
from spade_jax.telemetry.sinks import RunFolder
from spade_jax.types import Environment, EnvironmentSource, Verdict

URL = "gs://bucket/runs/one"
CHECKPOINT = "bucket/runs/one/checkpoints/1/_METADATA"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with bucket_store(monkeypatch) as made:
        made.put("bucket/runs/one-other/metrics.jsonl", b"another run's")
        yield made


def opened(spool: Path, **options: bool) -> RunFolder:
    return RunFolder(URL, spool=spool, **options)


def write_step(run: RunFolder, step: int) -> None:
    source = EnvironmentSource(
        f"class A{step}Env: ...", skill="Optimization", difficulty="easy", document_id="d"
    )
    verdict = Verdict(admitted=True, measures={})
    run.save_environment(
        Environment(source, hint="h", cycle=step, design_id=f"design-{step}", verdict=verdict)
    )
    run.save_episodes(step, [make_episode()])
    run.log({"progress/step": step, "progress/cycle": step, "time/step_s": 1.0})


def names(store: Store) -> set[str]:
    """The first two parts of the name of each object of the run."""
    found = [name.removeprefix("bucket/runs/one/") for name in store.names("bucket/runs/one/")]
    return {"/".join(name.split("/")[:2]) for name in found}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_sent_before_push_and_all_of_it_then(store: Store, tmp_path: Path):
    run = opened(tmp_path)
    assert run.name == URL
    assert str(run.checkpoints) == f"{URL}/checkpoints"
    with run.locked():
        assert run.saved_config() is None
        assert run.foreign_files() == []
        run.save_file("tokenizer.json", b"{}")
        run.save_config({"run": {"seed": 3}})
        write_step(run, 0)
        assert names(store) == set()
        run.push()
    assert names(store) == {
        *("config.json", "revision.txt", "tokenizer.json", "metrics.jsonl"),
        *("episodes/step_00000.jsonl", "environments/000"),
    }
    # What only grows has left the local disk.
    assert files(run.path) == {"config.json", "revision.txt", "tokenizer.json", "metrics.jsonl"}


def test_only_what_changed_is_sent_again(store: Store, tmp_path: Path):
    run = opened(tmp_path)
    with run.locked():
        run.save_config({})
        write_step(run, 0)
        run.push()
        del store.writes[:]
        write_step(run, 1)
        run.push()
        sent = {name.removeprefix("bucket/runs/one/").split("/")[0] for name in store.writes}
        assert sent == {"metrics.jsonl", "episodes", "environments"}
        del store.writes[:]
        run.push()
        assert store.writes == []
    lines = store.objects["bucket/runs/one/metrics.jsonl"][0].splitlines()
    assert [json.loads(line)["progress/step"] for line in lines] == [0, 1]


def test_a_new_machine_goes_on_where_the_bucket_stands(store: Store, tmp_path: Path):
    run = opened(tmp_path / "old")
    with run.locked():
        run.save_config({"run": {"seed": 3}})
        for step in range(3):
            write_step(run, step)
        run.save_summary("done")
        run.push()
        write_step(run, 3)  # lost with the machine
    store.put(CHECKPOINT, b"orbax's own")

    new = opened(tmp_path / "new")
    with new.locked():
        assert new.saved_config() == {"run": {"seed": 3}}
        assert new.logged_steps() == [0, 1, 2]
        assert new.has_summary()
        new.cut(1, 1)
        assert new.logged_steps() == [0, 1]
        new.push()
    assert names(store) == {
        *("config.json", "revision.txt", "metrics.jsonl", "checkpoints/1"),
        *("episodes/step_00000.jsonl", "episodes/step_00001.jsonl"),
        *("environments/000", "environments/001"),
    }
    assert len(store.objects["bucket/runs/one/metrics.jsonl"][0].splitlines()) == 2
    assert store.objects["bucket/runs/one-other/metrics.jsonl"][0] == b"another run's"
    before = dict(store.objects)
    with opened(tmp_path / "new").locked() as _:
        again = opened(tmp_path / "third")
        with again.locked():
            again.cut(1, 1)
            again.push()
    assert {name: data for name, (data, _) in store.objects.items()} == {
        name: data for name, (data, _) in before.items()
    }


def test_a_spool_that_was_left_behind_is_not_believed(store: Store, tmp_path: Path):
    run = opened(tmp_path)
    with run.locked():
        run.save_config({})
        write_step(run, 0)
        run.push()
        write_step(run, 1)  # killed here
    again = opened(tmp_path)
    with again.locked():
        assert again.logged_steps() == [0]
        assert files(again.path) == {"config.json", "revision.txt", "metrics.jsonl"}


def test_one_process_of_several_writes(store: Store, tmp_path: Path):
    first = opened(tmp_path / "0")
    with first.locked():
        first.save_config({"run": {}})
        write_step(first, 0)
        first.push()
        before = dict(store.objects)
        second = opened(tmp_path / "1", writes=False)
        with second.locked():
            assert second.saved_config() == {"run": {}}
            assert second.logged_steps() == [0]
            write_step(second, 1)
            second.save_config({"run": {"seed": 1}})
            second.save_summary("x")
            second.cut(-1, -1)
            second.push()
            assert second.logged_steps() == [0]
    assert store.objects == before


def test_a_process_that_does_not_write_leaves_a_local_folder_alone(tmp_path: Path):
    first = RunFolder(tmp_path)
    with first.locked():
        write_step(first, 0)
        before = files(tmp_path)
        second = RunFolder(tmp_path, writes=False)
        with second.locked():
            write_step(second, 1)
            second.cut(-1, -1)
            second.push()
    assert files(tmp_path) == before
    assert first.logged_steps() == [0]


def test_processes_that_a_test_starts_share_its_stand_in(store: Store):
    other = SharedStore(os.environ["TENSORSTORE_GCS_HTTP_URL"])
    name = "bucket/runs/one/a b?#é.txt"
    assert other.read(name) is None and not other.remove(name) and other.sizes(name) == {}
    other.put(name, b"123")
    assert store.objects[name][0] == other.read(name) == b"123"
    assert other.sizes("bucket/runs/one/") == store.sizes("bucket/runs/one/") == {name: 3}
    assert other.remove(name) and name not in store.objects
    store.deny = "no access"
    with pytest.raises(PermissionError, match="no access"):
        other.put(name, b"")


def test_two_runs_of_a_machine_do_not_share_a_spool(store: Store, tmp_path: Path):
    with (
        opened(tmp_path).locked(),
        pytest.raises(SpadeError, match=r"gs://bucket/runs/one is in use"),
        opened(tmp_path).locked(),
    ):
        pass


def test_a_folder_with_other_things_is_told(store: Store, tmp_path: Path):
    store.put("bucket/runs/one/thesis.pdf", b"x")
    run = opened(tmp_path)
    with run.locked():
        assert run.foreign_files() == ["thesis.pdf"]


def test_a_bucket_that_refuses_is_one_clear_line(store: Store, tmp_path: Path):
    run = opened(tmp_path)
    with run.locked():
        run.save_config({})
        store.deny = "no storage.objects.create access"
        with pytest.raises(
            TransientError,
            match=r"cannot reach gs://bucket/runs/one/config\.json: .*no s.*--resume",
        ):
            run.push()
        store.deny = ""
        run.push()
    assert names(store) == {"config.json", "revision.txt"}


def test_without_the_cloud_packages_the_extra_is_named(tmp_path: Path):
    run = RunFolder("s3://bucket/x", spool=tmp_path)
    with (
        pytest.raises(SpadeError, match=r"s3://bucket/x cannot be opened: .*s3fs") as raised,
        run.locked(),
    ):
        pass
    assert not isinstance(raised.value, TransientError)


@pytest.mark.parametrize("part", ["one/environments", "one/config.json"])
def test_a_bucket_that_does_not_answer_lacks_nothing(store: Store, tmp_path: Path, part: str):
    store.put("bucket/runs/one/config.json", b"{}")
    store.put("bucket/runs/one/environments/001/a.py", b"x")
    run = opened(tmp_path)
    before = dict(store.objects)
    store.unreachable = part
    with pytest.raises(TransientError, match=r"cannot reach gs://bucket/runs/one/"), run.locked():
        pass
    store.unreachable = ""
    with run.locked():
        assert run.saved_config() == {}
        store.unreachable = "environments/001"
        with pytest.raises(TransientError, match="cannot reach"):
            run.cut(-1, 0)
    assert store.objects == before
