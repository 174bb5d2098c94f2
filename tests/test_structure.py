"""What no module may do, wherever it stands: each rule is one way in which another implementation
of this method went wrong that no test of a single function would see (`docs/differences.md`).
"""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from spade_jax.config import Config
from spade_jax.envs.limits import Limits

ROOT = Path(__file__).resolve().parents[1]
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for top in ("models", "spade_jax", "configs")
    for path in sorted((ROOT / top).rglob("*.py"))
}

OWN_GENERATORS = {"Random", "SystemRandom", "default_rng", "Generator", "SeedSequence"}
CLOCKS = {"wait_for", "timeout", "timeout_at"}
ALARMS = {"alarm", "setitimer", "SIGALRM"}
RUNS_PROGRAMS = "spade_jax.envs.worker"
KEEPS_STATES_APART = "spade_jax.envs.adapters.base"  # of the generators that packages share
DRAWS_IN_ITS_OWN_STATE = "spade_jax.envs.adapters.rlve"
MAY_WATCH_THE_CLOCK = (
    "spade_jax.envs",
    "spade_jax.rollout",
    "spade_jax.generate",
    "spade_jax.roles.endpoint",  # a server that may never answer; the policy's designs have none
)
COMPARES_WITHIN_A_PROCESS = "spade_jax.envs.pool"
STEPS_ENVIRONMENTS = (
    "spade_jax.envs",
    "spade_jax.roles.agent",  # the policy's only one
    "spade_jax.roles.examples",  # experts, for the warm start
    "spade_jax.play",  # a person
    "spade_jax.doctor",
)


def dotted(node: ast.AST) -> str:
    """A name such as `np.random.seed`; empty for what is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def breaches(name: str, source: str) -> Iterator[str]:
    """What one module does that it may not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name) and dotted(node).split(".")[-1] in ALARMS:
            yield f"line {node.lineno}: an alarm reaches the main thread only"
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
            steps = isinstance(node.value.func, ast.Attribute) and node.value.func.attr == "step"
            if steps and not name.startswith(STEPS_ENVIRONMENTS):
                yield f"line {node.lineno}: a second loop of play"
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        if called in ("exec", "eval", "compile") and name != RUNS_PROGRAMS:
            yield f"line {node.lineno}: {called} outside of a worker"
        if called == "hash" and name != COMPARES_WITHIN_A_PROCESS:
            yield f"line {node.lineno}: hash() is salted anew in every process"
        for generators in ("random.", "np.random.", "numpy.random."):
            shared = called.startswith(generators) and called.split(".")[-1] not in OWN_GENERATORS
            if shared and name not in (KEEPS_STATES_APART, DRAWS_IN_ITS_OWN_STATE):
                yield f"line {node.lineno}: {called} draws from the process's generator"
        if not name.startswith(MAY_WATCH_THE_CLOCK):
            given = {keyword.arg for keyword in node.keywords}
            if called.split(".")[-1] in CLOCKS or "deadline_s" in given:
                yield f"line {node.lineno}: the clock decides what is kept"


@pytest.mark.parametrize("name", PATHS)
def test_module_breaks_no_rule(name: str):
    assert list(breaches(name, PATHS[name].read_text())) == []


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("spade_jax.designing", "exec(program)", "outside of a worker"),
        ("spade_jax.roles.memory", "x = random.sample(records, 2)", "process's generator"),
        ("spade_jax.roles.corpus", "np.random.seed(0)", "process's generator"),
        ("spade_jax.stage", "seed = hash(path) % 2**31", "salted"),
        ("spade_jax.selfplay", "async def f():\n    await asyncio.wait_for(g(), 900)", "clock"),
        ("spade_jax.roles.asking", "x = SamplingParams(1.0, 9, (), deadline_s=300)", "clock"),
        ("spade_jax.envs.adapters.gem", "signal.alarm(5)", "main thread"),
        ("spade_jax.batched", "async def f():\n    await instance.step('a')", "second loop"),
    ],
)
def test_planted_breach_is_caught(name: str, line: str, why: str):
    (found,) = breaches(name, line)
    assert why in found


def reads(source: str) -> set[str]:
    """Attributes that a module reads; what checks a setting does not use it."""
    tree = ast.parse(source)
    checks = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("__post_init__", "_check_together")
        for part in ast.walk(node)
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in checks
    }


def test_every_setting_is_read():
    used = set().union(*(reads(path.read_text()) for path in PATHS.values()))
    used |= {field.name for field in dataclasses.fields(Limits)}  # taken over by name
    used |= {field.name for field in dataclasses.fields(Config().mesh)}  # given on as keywords
    settings = {
        f"{section}.{field.name}"
        for section, values in vars(Config()).items()
        for field in dataclasses.fields(values)
    }
    assert {"designer.difficulty", "reward.kind", "learner.tis_cap"} <= settings
    assert sorted(each for each in settings if each.split(".")[1] not in used) == []


def test_a_setting_that_is_only_checked_counts_as_dead():
    source = "class A:\n    def __post_init__(self):\n        assert self.gamma\n    def f(self):\n"
    assert reads(source + "        return self.rate") == {"rate"}


def test_the_page_of_differences_names_tests_that_are_there():
    sections = (ROOT / "docs" / "differences.md").read_text().split("\n## ")[:2]
    rows, seen = (dict(re.findall(r"^\| (\d+) \| (.*)$", text, re.MULTILINE)) for text in sections)
    assert list(rows) == list(seen) == [str(number) for number in range(1, 36)]
    for number, row in rows.items():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, f"row {number} names no test"
        for path, test in named:
            defined = rf"^(?:async )?def {test}\("
            assert re.search(defined, (ROOT / "tests" / path).read_text(), re.MULTILINE), test


def test_the_settings_on_the_page_of_differences_exist():
    text = (ROOT / "docs" / "differences.md").read_text()
    config, seen = Config(), 0
    for section, name, value in re.findall(r"`([a-z]+)\.([a-z_]+)(?:=(\w+))?`", text):
        if not hasattr(config, section):
            continue
        values = getattr(config, section)
        assert hasattr(values, name), f"{section}.{name}"
        if value and isinstance(getattr(values, name), str):
            changed = dataclasses.replace(values, **{name: value})
            dataclasses.replace(config, **{section: changed})  # refuses what is no choice
        seen += 1
    assert seen > 15
