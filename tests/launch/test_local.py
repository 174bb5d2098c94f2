"""`launch/local.sh` up to the command that it starts, with stand-ins for the set-up and for it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository whose `spade-jax` says how it was called."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "local.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").write_text(
        'say() { :; }\nfail() { echo "$*" >&2; exit 1; }\nensure_venv() { :; }\n'
    )
    (tmp_path / "configs").mkdir()
    for name in ("tiny", "other"):
        (tmp_path / "configs" / f"{name}.py").touch()
    command = tmp_path / ".venv" / "bin" / "spade-jax"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\necho "$JAX_PLATFORMS" "$GLIBC_TUNABLES" "$@"\n')
    command.chmod(0o755)
    return tmp_path


def started(checkout: Path, *arguments: str, **environment: str) -> str:
    """What the launcher starts, with the variables that it sets."""
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "GLIBC_TUNABLES")}
    done = subprocess.run(
        ["bash", str(checkout / "launch" / "local.sh"), *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


def test_a_run_is_on_the_cpu_with_huge_pages_unless_told_otherwise(checkout: Path):
    ends = "train configs/tiny.py --run.dir runs/tiny"
    assert started(checkout) == f"cpu glibc.malloc.hugetlb=1 {ends}"
    told = started(checkout, JAX_PLATFORMS="cuda", GLIBC_TUNABLES="glibc.malloc.check=1")
    assert told == f"cuda glibc.malloc.check=1 {ends}"


def test_a_run_takes_a_folder_of_its_own_and_resumes_the_last(checkout: Path):
    (checkout / "runs" / "tiny").mkdir(parents=True)
    (checkout / "runs" / "tiny" / "config.json").touch()
    assert started(checkout).endswith("--run.dir runs/tiny-2")
    assert started(checkout, "--resume").endswith("--run.dir runs/tiny --resume")
    assert started(checkout, "--run.dir", "mine").endswith("configs/tiny.py --run.dir mine")


def test_another_config_has_folders_of_its_name(checkout: Path):
    (checkout / "runs" / "tiny").mkdir(parents=True)
    told = started(checkout, "--config", "configs/other.py", "--run.steps", "3")
    assert told.endswith("train configs/other.py --run.dir runs/other --run.steps 3")


def test_a_config_that_is_not_there_is_refused(checkout: Path):
    assert "--config configs/none.py is no file" in started(checkout, "--config", "configs/none.py")
    assert "--config needs a file" in started(checkout, "--config")
