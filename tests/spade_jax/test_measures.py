"""Every number of the environment pool has a declared name, and none is made up."""

from array import array

import pytest

from spade_jax import measures
from spade_jax.envs.pool_stats import PoolStats
from spade_jax.telemetry.metrics import check, repeatable
from spade_jax.types import Outcome

IDLE = PoolStats(
    requests=0,
    spawned=0,
    rebuilt=0,
    retries=0,
    faults={},
    refused=0,
    programs=frozenset(),
    instances=0,
    steps=0,
    step_s=array("d"),
    spawn_s=array("d"),
    busy_s=0.0,
    peak_bytes=0,
    workers=0,
    quarantined=0,
)


def test_what_the_pool_did_is_logged():
    stats = PoolStats(
        requests=250,
        spawned=4,
        rebuilt=3,
        retries=2,
        faults={Outcome.TIMEOUT: 5},
        refused=6,
        programs=frozenset(map(str, range(7))),
        instances=20,
        steps=100,
        step_s=array("d", (i / 1000 for i in range(1, 101))),
        spawn_s=array("d", [0.5, 0.25]),
        busy_s=4.0,
        peak_bytes=2**20,
        workers=8,
        quarantined=9,
    )
    logged = check(measures.sandbox(stats))
    assert logged == {
        "sandbox/fault_timeout_count": 5,
        "sandbox/programs_count": 7,
        "sandbox/instances_count": 20,
        "sandbox/steps_count": 100,
        "sandbox/refused_count": 6,
        "sandbox/quarantined_count": 9,
        "sandbox/retries_count": 2,
        "sandbox/rebuilt_count": 3,
        "sandbox/workers_count": 8,
        "sandbox/memory_peak_bytes": 2**20,
        "sandbox/steps_per_s": 25.0,
        "time/sandbox_step_p50_s": pytest.approx(0.0505),
        "time/sandbox_step_p95_s": pytest.approx(0.09505),
        "time/sandbox_step_p99_s": pytest.approx(0.09901),
        "time/sandbox_spawn_p95_s": pytest.approx(0.4875),
    }


def test_a_pool_that_did_nothing_has_no_times():
    logged = check(measures.sandbox(IDLE))
    assert not any(name.startswith("time/") or name.endswith("_per_s") for name in logged)
    assert logged["sandbox/steps_count"] == 0


def test_what_a_second_run_need_not_repeat():
    hanging = {name for name in measures.sandbox(IDLE) if not repeatable(name)}
    assert hanging == {
        "sandbox/retries_count",
        "sandbox/rebuilt_count",
        "sandbox/workers_count",
        "sandbox/memory_peak_bytes",
    }
    assert not repeatable("time/sandbox_step_p50_s")
    assert not repeatable("sandbox/steps_per_s")
    assert repeatable("sandbox/fault_timeout_count")
