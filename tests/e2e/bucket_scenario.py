"""One process that plays a run in a bucket being cut off and resumed on a new machine; called by
test_bucket.py with a scratch folder. It ends with 0 if all is as it should be.
"""

import json
import shutil
import sys
from pathlib import Path

import jax
import pytest
from bucket_stand_in import bucket_store

from helpers import untimed
from spade_jax.cli import main
from spade_jax.learner.checkpoint import Checkpoints

ROOT = Path(__file__).resolve().parents[2]
URL = "gs://bucket/runs/micro"
OPTIONS = ("--run.steps", "2", "--run.cycle-steps", "1", "--telemetry.no-live")


class Gone(Exception):
    """The machine is."""


def train(run_dir: str, spool: Path, *options: str) -> int:
    command = ["train", str(ROOT / "configs" / "micro.py"), "--run.dir", run_dir, *OPTIONS]
    return main([*command, "--run.spool-dir", str(spool), *options])


def lines(text: bytes) -> list[dict]:
    return [untimed(json.loads(line)) for line in text.splitlines()]


def scenario(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = scratch / "unbroken"
    assert train(str(unbroken), scratch / "none") == 0
    with bucket_store(monkeypatch) as store:
        save = Checkpoints.save

        def cut_off(self: Checkpoints, step: int, *rest: object) -> None:
            if step == 1:  # its metrics and episodes are in the bucket, the checkpoint is not
                raise Gone
            save(self, step, *rest)

        with monkeypatch.context() as patch, pytest.raises(Gone):
            patch.setattr(Checkpoints, "save", cut_off)
            train(URL, scratch / "first", "--resume-if-any")
        name = "bucket/runs/micro"
        assert len(store.objects[f"{name}/metrics.jsonl"][0].splitlines()) == 2
        assert f"{name}/summary.md" not in store.objects
        assert any(f"{name}/checkpoints/0/state" in one for one in store.objects)
        shutil.rmtree(scratch / "first")  # the machine

        store.writes.clear()
        assert train(URL, scratch / "second", "--resume-if-any", "--profile") == 0
        assert f"{name}/episodes/step_00000.jsonl" not in store.writes
        metrics, _ = store.objects[f"{name}/metrics.jsonl"]
        assert lines(metrics) == lines((unbroken / "metrics.jsonl").read_bytes())
        for kind in ("episodes", "environments", "rejected"):
            ours = {
                path.relative_to(unbroken).as_posix(): path.read_bytes()
                for path in unbroken.glob(f"{kind}/**/*")
                if path.is_file()
            }
            there = {
                one.removeprefix(f"{name}/"): store.objects[one][0]
                for one in store.names(f"{name}/{kind}/")
            }
            assert ours == there
        assert f"{name}/summary.md" in store.objects
        assert any(one.endswith(".xplane.pb") for one in store.names(f"{name}/profile/"))
        before = dict(store.objects)
        assert train(URL, scratch / "third", "--resume-if-any") == 0  # finished
        assert store.objects == before
        assert train(URL, scratch / "third", "--resume") == 2
        assert train(URL, scratch / "fourth") == 2  # holds a run


if __name__ == "__main__":
    assert jax.local_device_count() == 1
    with pytest.MonkeyPatch.context() as monkeypatch:
        scenario(Path(sys.argv[1]), monkeypatch)
