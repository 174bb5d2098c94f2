"""Imports run one way, as in the table of the design, and `spade_jax.envs` loads no jax."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

GLOSSARY = {"spade_jax.types", "spade_jax.errors"}
TERMINAL = GLOSSARY | {"spade_jax.envs", "spade_jax.terminal"}  # commands without jax
SETTINGS = {
    "spade_jax.config",
    "spade_jax.engine_config",
    "spade_jax.envs_config",
    "spade_jax.learner_config",
    "spade_jax.reward_config",
    "spade_jax.roles_config",
    "spade_jax.settings",
    "models.config",
    "models.execution",
}
ROLLOUT = GLOSSARY | SETTINGS | {"models", "spade_jax.rollout"}
ROLES = ROLLOUT | {"spade_jax.roles", "spade_jax.envs", "spade_jax.rewards"}
SELFPLAY = ROLES | {
    "spade_jax.telemetry",
    "spade_jax.curriculum",
    "spade_jax.scoring",
    "spade_jax.processes",
    "spade_jax.stage",
    "spade_jax.stopping",
    "spade_jax.hinting",
    "spade_jax.designing",
    "spade_jax.selfplay",
}
COMMAND = SELFPLAY | {
    "spade_jax.measures",
    "spade_jax.profiling",
    "spade_jax.resuming",
    "spade_jax.learner",
    "spade_jax.train",
    "spade_jax.warmstart",
    "spade_jax.plan",
    "spade_jax.checkpoints",
}

ALLOWED: dict[str, set[str]] = {
    "models": {"models"},
    "spade_jax.errors": set(),
    "spade_jax.types": GLOSSARY,
    "spade_jax.config": GLOSSARY | SETTINGS,
    "spade_jax.engine_config": GLOSSARY | {"spade_jax.settings"},
    "spade_jax.envs_config": GLOSSARY | {"spade_jax.settings"},
    "spade_jax.learner_config": GLOSSARY | {"spade_jax.settings"},
    "spade_jax.reward_config": GLOSSARY | {"spade_jax.settings"},
    "spade_jax.roles_config": GLOSSARY | {"spade_jax.settings"},
    "spade_jax.settings": GLOSSARY,
    "spade_jax.envs": GLOSSARY | {"spade_jax.envs"},
    "spade_jax.terminal": GLOSSARY | {"spade_jax.terminal"},
    "spade_jax.details": set(),
    "spade_jax.play": TERMINAL | {"spade_jax.play"},
    "spade_jax.doctor": TERMINAL | {"spade_jax.doctor"},
    "spade_jax.rewards": GLOSSARY | {"spade_jax.rewards"},
    "spade_jax.telemetry": GLOSSARY | {"spade_jax.telemetry"},
    "spade_jax.rollout": ROLLOUT,
    "spade_jax.roles": ROLES,
    "spade_jax.learner": GLOSSARY
    | SETTINGS
    | {"models", "spade_jax.learner", "spade_jax.processes"},
    "spade_jax.curriculum": ROLES | {"spade_jax.curriculum"},
    "spade_jax.scoring": SETTINGS | GLOSSARY | {"spade_jax.rewards", "spade_jax.curriculum"},
    "spade_jax.heartbeat": GLOSSARY | {"spade_jax.terminal"},
    "spade_jax.processes": GLOSSARY | {"models", "spade_jax.heartbeat"},
    "spade_jax.preemption": set(),
    "spade_jax.stopping": GLOSSARY | {"spade_jax.preemption", "spade_jax.processes"},
    "spade_jax.stage": ROLES
    | {"spade_jax.curriculum", "spade_jax.processes", "spade_jax.stopping"},
    "spade_jax.hinting": ROLES | {"spade_jax.curriculum", "spade_jax.stage"},
    "spade_jax.designing": ROLES | {"spade_jax.curriculum", "spade_jax.stage", "spade_jax.hinting"},
    "spade_jax.selfplay": SELFPLAY,
    "spade_jax.measures": SELFPLAY,
    "spade_jax.profiling": GLOSSARY,
    "spade_jax.train": COMMAND,
    "spade_jax.resuming": COMMAND,
    "spade_jax.warmstart": COMMAND,
    "spade_jax.plan": COMMAND | {"spade_jax.terminal"},
    "spade_jax.checkpoints": COMMAND,
    "spade_jax.convert": COMMAND | {"spade_jax.convert"},
    "spade_jax.generate": COMMAND
    | {"spade_jax.convert", "spade_jax.terminal", "spade_jax.generate"},
    "spade_jax.cli": COMMAND
    | TERMINAL
    | {
        "spade_jax.play",
        "spade_jax.convert",
        "spade_jax.details",
        "spade_jax.doctor",
        "spade_jax.generate",
        "spade_jax.cli",
    },
    "spade_jax.recipes": GLOSSARY | SETTINGS,
    "configs": SETTINGS | {"spade_jax.recipes"},
    "launch": GLOSSARY | SETTINGS | {"models"},
}
"""What of ours the modules below each name may import; the longest matching name counts."""

OURS = {"models", "spade_jax", "configs", "launch"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorflow_datasets"}
NO_JAX = (
    "spade_jax.envs",
    "spade_jax.rewards",
    "spade_jax.types",
    "spade_jax.errors",
    "spade_jax.telemetry",
    "spade_jax.terminal",
    "spade_jax.play",
    "spade_jax.doctor",
    "spade_jax.roles.digests",
    "spade_jax.roles.diversity",
)
NUMPY_ONLY = {"spade_jax.types": {"numpy", "jaxtyping"}, "spade_jax.errors": set()}
STDLIB_ONLY = (
    "spade_jax.envs.worker",
    "spade_jax.envs.zygote",
    "spade_jax.envs.tool_calls",
    "spade_jax.envs.tool_schema",
    "spade_jax.envs.tool_task",
    "spade_jax.envs.tool_use_base_env",
    "spade_jax.envs.wire",
    "spade_jax.envs.limits",
    "spade_jax.envs.supervisor",
    "spade_jax.envs.tier",
    "spade_jax.envs.apart",
    "spade_jax.envs.cgroup",
    "spade_jax.envs.namespaces",
    "spade_jax.envs.confine",
    "spade_jax.envs.landlock",
    "spade_jax.envs.seccomp",
    "spade_jax.envs.probe",
    "spade_jax.envs.nursery",
    "spade_jax.envs.verdicts",
    "spade_jax.envs.adapters.base",
    "spade_jax.envs.adapters.bfcl",
    "spade_jax.envs.adapters.gem",
    "spade_jax.envs.adapters.reasoning_gym",
    "spade_jax.envs.adapters.rlve",
    "spade_jax.envs.adapters.textarena",
    "spade_jax.envs.adapters.words",
)
PACKAGE_OF_STDLIB_ONLY = ("spade_jax.envs", "spade_jax.envs.adapters")


def modules() -> dict[str, Path]:
    """Every module of the packages, configs and launch scripts by its dotted name."""
    found = {}
    for top in sorted(OURS):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, source: str, known: set[str], is_package: bool) -> set[str]:
    """The names that a module imports, anywhere in it; `from a import b` is a.b if that is one."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                package = parts[: len(parts) - node.level + is_package]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in known else base)
    return found


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def violations(name: str, source: str, known: set[str], is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one module."""
    if name == "spade_jax":
        rule = set()
    else:
        rules = [prefix for prefix in ALLOWED if below(name, prefix)]
        if not rules:
            return [f"{name} is not in the table of tests/test_imports.py; give it its place"]
        rule = ALLOWED[max(rules, key=len)]
    wrong = []
    for target in sorted(imports(name, source, known, is_package)):
        top = target.split(".")[0]
        if top in OURS:
            # The package itself is empty, so `import spade_jax` brings nothing along.
            empty = target == "spade_jax" and not below(name, "models")
            if not empty and not any(below(target, prefix) for prefix in rule):
                wrong.append(f"{name} imports {target}")
        elif top not in sys.stdlib_module_names:
            if top == "tyro" and name != "spade_jax.cli":
                wrong.append(f"{name} imports tyro: only spade_jax.cli does")
            if top in JAX and any(below(name, prefix) for prefix in NO_JAX):
                wrong.append(f"{name} imports {target}: it must do without jax")
            if name in NUMPY_ONLY and top not in NUMPY_ONLY[name]:
                wrong.append(f"{name} imports {target}: NumPy only")
            if name in STDLIB_ONLY:
                wrong.append(f"{name} imports {target}: standard library only")
        if (
            name in STDLIB_ONLY
            and top in OURS
            and target
            not in (
                *STDLIB_ONLY,
                *PACKAGE_OF_STDLIB_ONLY,
            )
        ):
            wrong.append(f"{name} imports {target}: standard library only")
    return wrong


def test_imports_follow_the_table():
    paths = modules()
    known = set(paths)
    assert {"models.config", "spade_jax.types", "spade_jax.envs"} <= known
    wrong = [
        problem
        for name, path in paths.items()
        for problem in violations(name, path.read_text(), known, path.name == "__init__.py")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("models.moe", "import spade_jax.types"),
        ("models.moe", "from spade_jax import errors"),
        ("spade_jax.rollout.engine", "from spade_jax.roles import agent"),
        ("spade_jax.rollout.engine", "def f():\n    from spade_jax import selfplay"),
        ("spade_jax.roles.agent", "from spade_jax.selfplay import play"),
        ("spade_jax.roles.agent", "from spade_jax.learner.losses import policy_loss"),
        ("spade_jax.roles.agent", "from .. import train"),
        ("spade_jax.selfplay", "import spade_jax.train"),
        ("spade_jax.selfplay", "from spade_jax.learner import batch"),
        ("spade_jax.learner.losses.grpo", "from spade_jax.rollout import engine"),
        ("spade_jax.envs.pool", "import jax.numpy as jnp"),
        ("spade_jax.envs.pool", "from spade_jax.config import EnvsConfig"),
        ("spade_jax.envs.worker", "import numpy"),
        ("spade_jax.envs.worker", "from spade_jax.types import Outcome"),
        ("spade_jax.rewards.regret", "from jax import numpy"),
        ("spade_jax.rewards.regret", "from spade_jax.envs import pool"),
        ("spade_jax.types", "import scipy"),
        ("spade_jax.train", "import tyro"),
        ("spade_jax.train", "from spade_jax import cli"),
        ("spade_jax.train", "import launch.tpu"),
        ("spade_jax.cli", "from configs.tiny import config"),
        ("configs.micro", "from configs import tiny"),
        ("spade_jax", "from spade_jax import types"),
        ("spade_jax.newcomer", "import os"),
    ],
)
def test_planted_violation_is_caught(name: str, line: str):
    planted = {
        "spade_jax.cli",
        "spade_jax.envs.pool",
        "spade_jax.errors",
        "spade_jax.learner.batch",
        "spade_jax.roles.agent",
        "spade_jax.rollout.engine",
        "spade_jax.selfplay",
        "spade_jax.train",
        "spade_jax.types",
        "configs.tiny",
    }
    assert violations(name, line, planted, is_package=name == "spade_jax")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("spade_jax.config", "from models.config import TransformerConfig"),
        ("spade_jax.learner.step", "from models import transformer"),
        ("spade_jax.train", "from spade_jax import learner, selfplay"),
        ("spade_jax.envs.pool", "from . import wire\nfrom ..types import Fault\nimport numpy"),
        ("spade_jax.cli", "import tyro\nfrom spade_jax.train import train"),
        ("configs.micro", "from spade_jax.config import Config"),
    ],
)
def test_permitted_import_passes(name: str, line: str):
    known = {"models.transformer", "spade_jax.learner", "spade_jax.selfplay", "spade_jax.envs.wire"}
    assert violations(name, line, known) == []


def test_envs_load_no_jax():
    paths = [name for name in modules() if below(name, "spade_jax.envs")]
    code = (
        f"import sys, importlib\nfor name in {paths}: importlib.import_module(name)\n"
        f"print(sorted({JAX} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_types_need_no_beartype():
    code = "import sys; sys.modules['beartype'] = None; import spade_jax.types, spade_jax.config"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_every_third_party_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_normal(re.split(r"[^\w.-]", need)[0]) for need in project["dependencies"]}
    distributions = importlib.metadata.packages_distributions()
    paths = modules()
    for name, path in paths.items():
        for target in imports(name, path.read_text(), set(paths), path.name == "__init__.py"):
            top = target.split(".")[0]
            if top in OURS or top in sys.stdlib_module_names:
                continue
            providers = {_normal(distribution) for distribution in distributions.get(top, ())}
            assert providers & declared, (
                f"{name} imports {target}; no installed dependency of pyproject.toml provides it"
            )


def _normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")
