"""What a converted coder model designs by a long prompt: raw validity, admitted share, refusals.

    python benchmarks/prompts.py --checkpoint FOLDER --prompt corpus [--designs 20] [--words 300]
        [--max-tokens 1500] [--repair-turns 0] [--out FOLDER]

FOLDER is what `spade-jax convert` wrote. Documents are the docstrings of numpy and scipy. Each
answer is judged by the admission of a run; no hint is written. Designs are spread over all skills
of the prompt. With --out every answer is kept there beside its verdict. The last line is JSON.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import get_args

from designs import opened_stage

from models.config import read_config
from spade_jax.config import (
    AgentConfig,
    BatchConfig,
    Config,
    DesignerConfig,
    EngineConfig,
    RunConfig,
)
from spade_jax.designing import attempt, requests
from spade_jax.measures import designs as measure
from spade_jax.reward_config import RewardConfig
from spade_jax.roles_config import (
    GAME_SKILLS,
    TOOL_PROMPTS,
    TOOL_SKILLS,
    DesignPrompt,
    Difficulty,
)
from spade_jax.types import Design

GOALS = {"designer/raw_valid_frac": 0.6, "designer/raw_solved_frac": 0.15}
ROOM = 3000  # tokens of the longest prompt without its document


def settings(arguments: argparse.Namespace) -> Config:
    """A run of one cycle that writes this many designs and no hint."""
    model = read_config(arguments.checkpoint)
    repairs = arguments.repair_turns * (arguments.max_tokens + 400)
    context = ROOM + 3 * arguments.words + arguments.max_tokens + repairs
    context = min(-(-context // 512) * 512, model.max_positions)
    skills = TOOL_SKILLS if arguments.prompt in TOOL_PROMPTS else GAME_SKILLS
    return Config(
        run=RunConfig(init_from=str(arguments.checkpoint), seed=arguments.seed),
        model=model,
        batch=BatchConfig(row_tokens=context, device_tokens=context),
        engine=EngineConfig(
            slots=arguments.slots,
            context_tokens=context,
            queue=0,
        ),
        designer=DesignerConfig(
            prompt=arguments.prompt,
            designs=len(skills),
            skills=skills,
            skills_per_cycle=len(skills),
            difficulty=arguments.difficulty,
            document_words=arguments.words,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            repair_turns=arguments.repair_turns,
        ),
        agent=AgentConfig(max_turns=25),
        reward=RewardConfig(kind="solve_rate"),  # which looks at no hint
    )


def keep(folder: Path, design: Design) -> None:
    """Write one answer and its verdict."""
    folder.mkdir(parents=True, exist_ok=True)
    verdict = f"{design.verdict.gate or 'admitted'}: {design.verdict.reason}\n"
    (folder / f"{design.design_id}.txt").write_text(
        f"{design.skill}\n{verdict}\n{design.completion}", errors="backslashreplace"
    )


def main() -> None:
    """Write the designs, judge them, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompt", choices=get_args(DesignPrompt), default="corpus")
    parser.add_argument("--difficulty", choices=get_args(Difficulty), default="easy")
    parser.add_argument("--designs", type=int, default=20)
    parser.add_argument("--words", type=int, default=300, help="of a document")
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--repair-turns", type=int, default=0)
    parser.add_argument("--slots", type=int, default=10, help="designs sampled together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = settings(arguments)
    with opened_stage(config) as stage:
        started = time.perf_counter()
        asked = requests(stage, 0, range(arguments.designs), 0)
        attempts = [attempt(stage, request) for request in asked]
        made = stage.runner.run(stage.engine.gather(attempts))
        wall_s = time.perf_counter() - started
    answers = [design for each in made for design in each]
    for design in answers:
        verdict = design.verdict
        print(f"{design.design_id} {design.skill}: {verdict.gate or 'admitted'} {verdict.reason}")
        if arguments.out is not None:
            keep(arguments.out, design)
    found = measure(answers)
    print(dict(Counter(design.verdict.gate or "admitted" for design in answers)))
    names = ("raw_valid_frac", "raw_solved_frac", "raw_admissible_frac", "admitted_frac")
    for name in names:
        print(f"{name} {found[f'designer/{name}']:.2f}")
    tokens = found["sampler/design_tokens_count"] + found["sampler/repair_tokens_count"]
    print(f"{tokens} tokens in {wall_s:.0f} s")
    goals = [
        {"name": name, "value": found[name], "goal": goal, "holds": found[name] >= goal}
        for name, goal in GOALS.items()
    ]
    print(json.dumps({"goals": goals}))


if __name__ == "__main__":
    main()
