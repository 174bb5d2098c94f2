"""Every shell script is free of what shellcheck finds, and says what it is for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    [
        *(ROOT / "launch").glob("*.sh"),
        *(ROOT / "launch").glob("*.sbatch"),
        *(ROOT / "tests").glob("*.sh"),
        ROOT / ".ci" / "run",
    ]
)


def shellcheck() -> str:
    """The one of this environment (extra `dev`), else the system's."""
    found = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which(
        "shellcheck"
    )
    assert found, "shellcheck is not installed; it comes with the extra `dev`"
    return found


def test_all_scripts_are_looked_at():
    names = {path.name for path in SCRIPTS}
    assert {
        "tpu.sh",
        "gpu.sh",
        "local.sh",
        "gpu_check.sh",
        "slurm.sbatch",
        "run.sh",
        "run",
    } <= names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_is_clean(path: Path):
    result = subprocess.run(
        [shellcheck(), "-x", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_shellcheck_finds_something(tmp_path: Path):
    (tmp_path / "bad.sh").write_text("#!/bin/bash\nrm $1\n")
    result = subprocess.run([shellcheck(), tmp_path / "bad.sh"], capture_output=True, text=True)
    assert "SC2086" in result.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_and_says_what_it_is_for(path: Path):
    lines = path.read_text().splitlines()
    assert len(lines) < 300
    comments = [line for line in lines[:3] if line.startswith("# ") and "shellcheck" not in line]
    assert comments, f"{path.name} does not say what it is for"
