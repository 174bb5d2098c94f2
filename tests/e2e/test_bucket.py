"""A run whose folder is in a bucket loses nothing when its machine does not come back, and comes to
its end on several hosts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bucket_stand_in import bucket_store
from several import ROOT, ended, free_port, start


@pytest.mark.slow
def test_a_run_in_a_bucket_resumes_on_a_new_machine_to_the_same_bits(tmp_path: Path):
    """In a process of its own: one device, and none of the checks that slow the tests down."""
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "e2e" / "bucket_scenario.py"), str(tmp_path)],
        env=kept
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(path),
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),  # the three runs compile once
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_two_processes_run_in_a_bucket_to_the_end_and_go_on(tmp_path, monkeypatch):
    """As on hosts of their own, which share nothing but the bucket; one of them writes to it."""
    name = "bucket/runs/two"
    with bucket_store(monkeypatch) as store:
        for steps in (1, 2):
            store.writes.clear()
            spool, port = tmp_path / str(steps), free_port()
            command = [
                *(str(ROOT / "tests" / "e2e" / "bucket_process.py"),),
                *(str(ROOT / "configs" / "micro.py"), "--run.dir", f"gs://{name}"),
                *("--run.spool-dir", str(spool), "--run.compile-cache", "gs://bucket/compiled"),
                *("--run.steps", str(steps), "--run.cycle-steps", "1", "--resume-if-any"),
            ]
            several = [
                start(
                    command,
                    port,
                    index,
                    devices=1,
                    JAX_COMPILATION_CACHE_DIR="",
                    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
                )
                for index in range(2)
            ]
            (status, text), (other_status, other_text) = ended(several)
            assert (status, other_status) == (0, 0), text + other_text
            assert "run folder: gs://" in text and "run folder: " not in other_text
            assert "Traceback" not in text + other_text
            sent = [one for one in store.writes if "/checkpoints/" not in one]
            again = {one for one in sent if sent.count(one) > 1}
            assert again <= {f"{name}/checkpointed.txt"}  # before each save, and at the end
            assert steps == 2 or any(one.startswith("bucket/compiled/jit") for one in sent)
            lines = store.objects[f"{name}/metrics.jsonl"][0].splitlines()
            assert [json.loads(line)["progress/step"] for line in lines] == list(range(steps))
            assert f"- {steps} steps" in store.objects[f"{name}/summary.md"][0].decode()
        assert f"{name}/checkpoints/1/files.json" in store.objects
