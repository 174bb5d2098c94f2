"""A run whose folder is in a bucket loses nothing when its machine does not come back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
