"""What no module may do, wherever it stands: each rule is one way in which another implementation
of this method went wrong that no test of a single function would see (`docs/differences.md`).
"""

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator
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
RUNS_TEXT = {"exec", "eval", "compile"}
CLOCKS = {"wait_for", "timeout", "timeout_at", "call_later", "call_at"}
LIMITS_OF_TIME = {"timeout", "timeout_s", "deadline", "deadline_s"}
ALARMS = {"alarm", "setitimer", "SIGALRM"}
RUNS_PROGRAMS = "spade_jax.envs.worker"
KEEPS_STATES_APART = "spade_jax.envs.adapters.base"  # of the generators that packages share
DRAWS_IN_ITS_OWN_STATE = "spade_jax.envs.adapters.rlve"
MAY_WATCH_THE_CLOCK = (
    "spade_jax.envs",
    "spade_jax.rollout",
    "spade_jax.generate",
    "spade_jax.roles.endpoint",  # a server that may never answer; the policy's designs have none
    "spade_jax.roles.docstrings",  # a package that hangs while it is imported, before the run
    "spade_jax.stopping",  # to look whether the run must stop; what waits is not given up
    "spade_jax.preemption",  # to ask for a notice, in a thread of its own
    "spade_jax.heartbeat",  # to find out whether the other processes live
)
SELF_PLAY = (
    "spade_jax.selfplay",
    "spade_jax.designing",
    "spade_jax.hinting",
    "spade_jax.scoring",
    "spade_jax.curriculum",
    "spade_jax.stage",
    "spade_jax.rewards",
    "spade_jax.roles",
)
COMPARES_WITHIN_A_PROCESS = "spade_jax.envs.pool"
CHECKS = ("check", "require")
"""How functions begin that refuse settings."""
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


def imported(tree: ast.AST) -> dict[str, str]:
    """What each name stands for that an import binds to another."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def breaches(name: str, source: str) -> Iterator[str]:
    """What one module does that it may not."""
    tree = ast.parse(source)
    imports = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            head, dot, rest = dotted(node).partition(".")
            used = f"{imports.get(head, head)}{dot}{rest}".removeprefix("builtins.")
            for why in misuses(name, used):
                yield f"line {node.lineno}: {why}"
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
            steps = isinstance(node.value.func, ast.Attribute) and node.value.func.attr == "step"
            if steps and not name.startswith(STEPS_ENVIRONMENTS):
                yield f"line {node.lineno}: a second loop of play"
        if isinstance(node, ast.Call) and not name.startswith(MAY_WATCH_THE_CLOCK):
            given = {keyword.arg for keyword in node.keywords}
            if given & LIMITS_OF_TIME or dotted(node.func).split(".")[-1] in CLOCKS:
                yield f"line {node.lineno}: the clock decides what is kept"


def misuses(name: str, used: str) -> Iterator[str]:
    """Why a module may not use this name, called or passed on."""
    if used.split(".")[-1] in ALARMS:
        yield "an alarm reaches the main thread only"
    if used in RUNS_TEXT and name != RUNS_PROGRAMS:
        yield f"{used} outside of a worker"
    if used == "hash" and name != COMPARES_WITHIN_A_PROCESS:
        yield "hash() is salted anew in every process"
    for generators in ("random.", "numpy.random."):
        shared = used.startswith(generators) and used.split(".")[-1] not in OWN_GENERATORS
        if shared and name not in (KEEPS_STATES_APART, DRAWS_IN_ITS_OWN_STATE):
            yield f"{used} draws from the process's generator"
    watched = used.startswith("time.") and name.startswith(SELF_PLAY)
    if watched and not name.startswith(MAY_WATCH_THE_CLOCK):
        yield f"{used}: the clock decides what is kept"


@pytest.mark.parametrize("name", PATHS)
def test_module_breaks_no_rule(name: str):
    assert list(breaches(name, PATHS[name].read_text())) == []


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("spade_jax.designing", "exec(program)", "outside of a worker"),
        ("spade_jax.roles.memory", "x = random.sample(records, 2)", "process's generator"),
        ("spade_jax.designing", "import builtins\nbuiltins.exec(program)", "outside of a worker"),
        ("spade_jax.designing", "from builtins import eval as run\nrun(x)", "outside of a worker"),
        ("spade_jax.designing", "list(map(exec, programs))", "outside of a worker"),
        (
            "spade_jax.roles.memory",
            "from random import sample\nsample(x, 2)",
            "process's generator",
        ),
        ("spade_jax.roles.memory", "import random as r\nr.shuffle(x)", "process's generator"),
        ("spade_jax.roles.memory", "draw = random.sample", "process's generator"),
        ("spade_jax.roles.corpus", "import numpy as np\nnp.random.seed(0)", "process's generator"),
        ("spade_jax.roles.corpus", "from numpy.random import rand\nrand()", "process's generator"),
        ("spade_jax.stage", "seed = hash(path) % 2**31", "salted"),
        ("spade_jax.selfplay", "async def f():\n    await asyncio.wait_for(g(), 900)", "clock"),
        (
            "spade_jax.selfplay",
            "async def f():\n    await asyncio.wait(tasks, timeout=900)",
            "clock",
        ),
        ("spade_jax.selfplay", "while time.monotonic() < end: pass", "clock"),
        ("spade_jax.roles.agent", "from time import time\nx = time() - begun", "clock"),
        ("spade_jax.roles.asking", "x = SamplingParams(1.0, 9, (), deadline_s=300)", "clock"),
        ("spade_jax.envs.adapters.gem", "signal.alarm(5)", "main thread"),
        ("spade_jax.batched", "async def f():\n    await instance.step('a')", "second loop"),
    ],
)
def test_planted_breach_is_caught(name: str, line: str, why: str):
    (found,) = breaches(name, line)
    assert why in found


SECTIONS = {name: type(values).__name__ for name, values in vars(Config()).items()}


def reads(source: str) -> dict[str, set[str]]:
    """Settings such as "run.steps" that a module reads, by the property of a section that reads
    them, "" for all else. Whatever checks a setting does not use it.

    `config.run.steps` reads that of one section, as does `run.steps` after `run = config.run`; a
    name of which no more is known reads that of each section whose class the module names.
    """
    tree = ast.parse(source)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    named = classes.keys() | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    sections = {section for section, name in SECTIONS.items() if name in named}
    bound = taken_from_sections(tree)
    found: dict[str, set[str]] = {}
    checks = set[ast.AST]()
    for section in sections:
        for node in getattr(classes.get(SECTIONS[section]), "body", ()):
            if isinstance(node, ast.FunctionDef):
                own = [each for each in ast.walk(node) if dotted(each).startswith("self.")]
                checks |= set(ast.walk(node))
                if any(dotted(each) == "property" for each in node.decorator_list):
                    read = {f"{section}.{dotted(each).split('.')[1]}" for each in own}
                    found[f"{section}.{node.name}"] = read
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith(CHECKS):
            checks |= set(ast.walk(node))
    found[""] = {
        f"{section}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in checks
        for section in sections_of(node.value, bound, sections)
    }
    return found


def taken_from_sections(tree: ast.AST) -> dict[str, set[str]]:
    """The sections that names and attributes are assigned, as `batch` in `batch = config.batch`."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for to, value in pairs:
                if isinstance(value, ast.Attribute) and value.attr in SECTIONS:
                    found.setdefault(dotted(to).split(".")[-1], set()).add(value.attr)
    return found


def sections_of(node: ast.AST, bound: dict[str, set[str]], sections: set[str]) -> set[str]:
    """Which sections an expression may be, of those that its module knows."""
    if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
        return {node.attr}
    return bound.get(dotted(node).split(".")[-1]) or sections


def unread(sources: Iterable[str], settings: set[str]) -> list[str]:
    """The settings that no source reads, nor a property that one of them reads."""
    found: dict[str, set[str]] = {}
    for source in sources:
        for reader, read in reads(source).items():
            found.setdefault(reader, set()).update(read)
    used, waiting = set[str](), {""}
    while waiting:
        used |= set().union(*(found.pop(reader) for reader in waiting))
        waiting = found.keys() & used
    return sorted(settings - used)


def test_every_setting_is_read():
    settings = {
        f"{section}.{field.name}"
        for section, values in vars(Config()).items()
        for field in dataclasses.fields(values)
    }
    assert {"designer.difficulty", "reward.kind", "learner.tis_cap"} <= settings
    settings -= {f"envs.{field.name}" for field in dataclasses.fields(Limits)}  # taken over by name
    # given on as keywords
    settings -= {f"mesh.{field.name}" for field in dataclasses.fields(Config().mesh)}
    assert unread((path.read_text() for path in PATHS.values()), settings) == []


@pytest.mark.parametrize(
    "source",
    [
        "class RunConfig:\n    def __post_init__(self):\n        assert self.steps",
        "class RunConfig:\n    def _require_all(self):\n        assert self.steps",
        "class RunConfig:\n    @property\n    def half(self):\n        return self.steps / 2",
        "def check_run(config):\n    assert config.run.steps",
        "def f(config):\n    return config.warmstart.steps",
        "def f(config):\n    warm = config.warmstart\n    return warm.steps",
        "def f(warm: WarmstartConfig):\n    return warm.steps",
        "def f(plan):\n    return plan.steps",
    ],
)
def test_a_setting_that_is_only_checked_or_of_another_section_counts_as_dead(source):
    assert unread([source], {"run.steps"}) == ["run.steps"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(config):\n    return config.run.steps",
        "def f(config):\n    run, rows = config.run, 3\n    return run.steps",
        "def f(given: RunConfig):\n    return given.steps",
        "class RunConfig:\n    @property\n    def half(self):\n        return self.steps / 2\n"
        "def f(config):\n    return config.run.half",
    ],
)
def test_a_setting_that_is_used_counts_as_read(source):
    assert unread([source], {"run.steps"}) == []


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
