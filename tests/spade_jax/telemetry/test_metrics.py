"""Names are declared, means carry their count, and nothing unmeasured or infinite is logged."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from spade_jax.errors import SpadeError
from spade_jax.telemetry import metrics
from spade_jax.types import Gate, Outcome


def test_mean_writes_its_count_and_leaves_out_what_was_not_measured():
    assert metrics.mean("agent/return_mean", [1.0, None, 0.0, -0.25]) == {
        "agent/return_mean": 0.25,
        "agent/return_mean_count": 3,
    }


def test_mean_of_flags_is_a_share():
    assert metrics.mean("agent/win_frac", [True, False, False, False])["agent/win_frac"] == 0.25


@pytest.mark.parametrize("values", [[], [None, None]])
def test_mean_of_nothing_logs_nothing(values: list[None]):
    assert metrics.mean("designer/regret_mean", values) == {}


def test_mean_does_not_depend_on_the_order():
    values = [1e16, 1.0, -1e16, 3.0]
    name = "agent/return_mean"
    assert metrics.mean(name, values) == metrics.mean(name, values[::-1])
    assert metrics.mean(name, values)[name] == 1.0


def test_mean_refuses_an_undeclared_name():
    with pytest.raises(ValueError, match="agent/retrun_mean"):
        metrics.mean("agent/retrun_mean", [1.0])


def test_check_returns_plain_numbers():
    logged = metrics.check(
        {
            "progress/step": 3,
            "loss/agent": jnp.float32(0.5),
            "optim/grad_norm": np.float64(2.0),
            "batch/tokens_count": np.array(7),
        }
    )
    assert logged == {
        "progress/step": 3,
        "loss/agent": 0.5,
        "optim/grad_norm": 2.0,
        "batch/tokens_count": 7,
    }
    assert {type(value) for value in logged.values()} == {int, float}


@pytest.mark.parametrize(
    "name", ["loss/agnet", "designer/refused_luck_count", "designer/refused__frac"]
)
def test_check_refuses_an_undeclared_name(name: str):
    with pytest.raises(ValueError, match=name):
        metrics.check({"progress/step": 0, name: 1.0})


def test_each_skill_has_names_of_its_own():
    name = metrics.skill_metric("Multi-Step Workflows", "win_frac")
    assert name == "skill/multi_step_workflows_win_frac"
    assert metrics.check(metrics.mean(name, [1.0, 0.0])) == {name: 0.5, f"{name}_count": 2}
    with pytest.raises(ValueError, match=f"{name}_count"):
        metrics.check({name: 0.5})
    fast = metrics.skill_metric("Optimization", "tracker_fast")
    assert metrics.check({fast: -1.0}) == {fast: -1.0}
    for unknown in ("skill/win_frac", "skill/optimization_luck", "skill/Optimization_win_frac"):
        assert not metrics.declared(unknown)


def test_every_gate_of_admission_has_its_count_and_share():
    for gate in Gate:
        assert f"designer/refused_{gate.value}_count" in metrics.DECLARED
        assert f"designer/refused_{gate.value}_frac" in metrics.DECLARED


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.inf, jnp.float32("nan")])
def test_check_refuses_what_is_not_finite(value: float):
    with pytest.raises(SpadeError, match=r"loss/agent.*finite"):
        metrics.check({"loss/agent": value})


@pytest.mark.parametrize("value", [None, "0.5", True, [1.0], np.bool_(True)])
def test_check_refuses_what_is_not_a_number(value: object):
    with pytest.raises(ValueError, match="loss/agent"):
        metrics.check({"loss/agent": value})


def test_check_refuses_a_mean_without_its_count():
    with pytest.raises(ValueError, match="agent/return_mean_count"):
        metrics.check({"agent/return_mean": 0.5})
    assert metrics.check(metrics.mean("agent/return_mean", [0.5]))["agent/return_mean"] == 0.5


def test_every_outcome_has_its_count():
    for outcome in Outcome:
        assert f"agent/outcome_{outcome.value}_count" in metrics.DECLARED
        assert (f"sandbox/fault_{outcome.value}_count" in metrics.DECLARED) == outcome.void


def test_declared_names_follow_the_scheme_and_say_what_they_mean():
    for name, meaning in metrics.DECLARED.items():
        assert re.fullmatch(r"[a-z]+/[a-z][a-z0-9_]*", name), name
        assert meaning
    for name in metrics.AVERAGED:
        assert name.endswith(("_mean", "_frac"))
        assert f"{name}_count" in metrics.DECLARED
