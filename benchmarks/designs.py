"""What the shipped weights design: validity, variety and grounding, at two temperatures.

    python benchmarks/designs.py [--designs 100] [--config configs/tiny.py] [--temperatures 0.6 1.0]

Needs nothing beyond the package. Each design is judged by the admission of a run. Then the same
prompt is given another document, with the same sampling key, and the two programs are compared. The
last line is JSON.
"""

import argparse
import ast
import asyncio
import contextlib
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from models import backends
from models.sharding import build_mesh
from models.tokenizer import load_tokenizer
from models.weights import load_weights
from spade_jax.cli import load_config
from spade_jax.config import Config
from spade_jax.designing import attempt
from spade_jax.envs.library import FAMILIES
from spade_jax.roles.corpus import excerpt
from spade_jax.roles.designer import MAX_TERMS, Request
from spade_jax.roles.prompts import Material
from spade_jax.stage import Stage
from spade_jax.train import make_stage
from spade_jax.types import Design, Document, Gate, GateResult

WORD = r"[a-z]{4,12}"
SHIFT = 1009  # between a design's document and the other one it is given
ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def opened_stage(config: Config) -> Iterator[Stage]:
    """What self-play needs, with the weights that `config` starts from."""
    with asyncio.Runner() as runner:
        mesh = build_mesh(**dataclasses.asdict(config.mesh))
        execution = backends.resolve(config.execution, config.model, mesh.devices.flat[0])
        tokenizer = load_tokenizer(config.run.init_from)
        stage = make_stage(config, runner, mesh, execution, tokenizer)
        try:
            stage.engine.compile()
            params = load_weights(config.run.init_from, config.model, mesh, execution)
            stage.engine.load(params, 0)
            yield stage
        finally:
            runner.run(stage.pool.close())


class _Blank(ast.NodeTransformer):
    """Forget every name, number and string, so that only the shape of the program is left."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("id", "attr", "arg", "name"):
            if isinstance(getattr(node, name, None), str):
                setattr(node, name, "_")
        if isinstance(node, ast.Constant):
            node.value = "" if isinstance(node.value, str) else 0
        return node


def skeleton(program: str) -> str:
    """The program's syntax tree without names, comments, numbers and strings."""
    return ast.dump(_Blank().visit(ast.parse(program)))


def family(program: str) -> str:
    """Class name of the environment."""
    names = re.findall(r"^class (\w+Env)\b", program, re.MULTILINE)
    return names[-1] if names else ""


def documents(stage: Stage, index: int, offset: int) -> Document:
    """The document of design `index`; `offset` shifts all of them."""
    return stage.corpus[(index * 37 + offset) % len(stage.corpus)]


def design_all(stage: Stage, config: Config, count: int, offset: int) -> list[Design]:
    """`count` designs over all skills; `offset` shifts the documents and nothing else."""
    requests = []
    for index in range(count):
        document = documents(stage, index, offset)
        skill = config.designer.skills[index % len(config.designer.skills)]
        shown = excerpt(document, config.designer.document_words)
        requests.append(
            Request(
                f"bench_{index:03d}",
                0,
                document.document_id,
                Material(
                    "compact",
                    skill,
                    config.designer.difficulty,
                    config.agent.max_turns,
                    shown,
                    stage.corpus.rare_terms(shown)[:MAX_TERMS],
                ),
            )
        )
    made = stage.runner.run(stage.engine.gather([attempt(stage, request) for request in requests]))
    return [answers[0] for answers in made]


def carried(stage: Stage, config: Config, design: Design, index: int) -> set[str]:
    """Rare words of the design's document that its program contains."""
    assert design.source is not None
    words = set(re.findall(WORD, design.source.program.lower()))
    shown = excerpt(documents(stage, index, 0), config.designer.document_words)
    return set(stage.corpus.rare_terms(shown)) & words


def measure(stage: Stage, config: Config, count: int, temperature: float) -> dict[str, float]:
    """Shares over `count` designs; the grounding shares are over the admitted ones."""
    config = dataclasses.replace(
        config, designer=dataclasses.replace(config.designer, temperature=temperature)
    )
    stage = dataclasses.replace(stage, config=config)
    first = design_all(stage, config, count, 0)
    second = design_all(stage, config, count, SHIFT)
    admitted = [(i, d) for i, d in enumerate(first) if d.verdict.admitted and d.source is not None]
    refusals = Counter(design.verdict.gate for design in first if not design.verdict.admitted)
    terms = {i: carried(stage, config, design, i) for i, design in admitted}
    compared = changed = 0
    for i, _ in admitted:
        other = second[i].source
        if terms[i] and other is not None:
            compared += 1
            # words that the other document offers as well may stay
            shown = excerpt(documents(stage, i, SHIFT), config.designer.document_words)
            kept = set(re.findall(WORD, other.program.lower())) - set(
                re.findall(WORD, shown.lower())
            )
            changed += not terms[i] & kept
    families = {family(design.source.program) for _, design in admitted if design.source}
    skeletons = {skeleton(design.source.program) for _, design in admitted if design.source}
    print(
        f"temperature {temperature}: admitted {len(admitted)} of {count}; refused by gate "
        f"{dict(refusals)}"
    )
    print(f"  families {sorted(families)}")
    known = {item.class_name for item in FAMILIES}
    print(f"  class names outside the library: {sorted(families - known)}")
    return {
        "admitted_frac": len(admitted) / count,
        "solution_wins_frac": sum(
            d.verdict.gates.get(Gate.SOLUTION) == GateResult.PASSED for d in first
        )
        / count,
        "families": float(len(families)),
        "distinct_frac": len(skeletons) / max(len(admitted), 1),
        "document_term_frac": sum(bool(found) for found in terms.values()) / max(len(admitted), 1),
        "term_changes_frac": changed / max(compared, 1),
    }


def main() -> None:
    """Measure at each temperature and print the goals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--designs", type=int, default=100)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "tiny.py")
    parser.add_argument("--weights", type=Path, help="folder with tokenizer and weights")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    if arguments.weights is not None:
        run = dataclasses.replace(config.run, init_from=str(arguments.weights))
        config = dataclasses.replace(config, run=run)
    goals = {
        "admitted_frac": 0.5,
        "families": 8,
        "distinct_frac": 0.3,
        "document_term_frac": 0.5,
        "term_changes_frac": 0.9,
    }
    results = []
    with opened_stage(config) as stage:
        for temperature in arguments.temperatures:
            values = measure(stage, config, arguments.designs, temperature)
            print("  " + "  ".join(f"{name} {value:.3f}" for name, value in values.items()))
            results += [
                {
                    "name": f"{name}@T={temperature}",
                    "value": value,
                    "goal": goals[name],
                    "holds": value >= goals[name],
                }
                for name, value in values.items()
                if name in goals
            ]
    print(json.dumps({"goals": results}))


if __name__ == "__main__":
    main()
