"""The options of the method together: a table in which every two of them meet runs in one process,
and each shows its effect; and a frozen designer, which does not change with the weights.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pairwise import OPTIONS, covering, may_be, pairs_of

ROOT = Path(__file__).resolve().parents[2]


def test_every_two_values_that_may_meet_do():
    table = covering(OPTIONS, may_be)
    found = set().union(*map(pairs_of, table))
    values = (
        dict(zip(OPTIONS, each, strict=True)) for each in itertools.product(*OPTIONS.values())
    )
    assert found == set().union(*(pairs_of(row) for row in values if may_be(row)))
    assert all(map(may_be, table))
    # no fewer can do: six rewards with the policy and with a folder, four of them with RLVE
    assert 16 <= len(table) <= 20
    assert covering({"a": "12", "b": "12"}, lambda row: row != {"a": "2", "b": "2"}) == [
        {"a": "1", "b": "1"},
        {"a": "1", "b": "2"},
        {"a": "2", "b": "1"},
    ]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """What one scenario compiles the other finds."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["table", "frozen"])
def test_each_option_shows_its_effect_in_every_company(scenario, tmp_path: Path, compiled: Path):
    """In a process of its own: one device, and none of the checks that slow the tests down."""
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    script = str(ROOT / "tests" / "e2e" / "pairwise_scenario.py")
    done = subprocess.run(
        [sys.executable, script, scenario, str(tmp_path), str(compiled)],
        env=kept
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(path),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
