"""One process that runs the covering table of the method's options, each row a small run of two
cycles, and looks for what each option does in prompts, plays and metrics; or that runs a frozen
designer beside one that moves. Called by test_pairwise.py with `table` or `frozen`, a scratch
folder and one for compiled programs; it ends with 0 if all is as it should be.

Rows that think need a chat template that can, so their policy is a small one of random weights, as
is that of the rows whose programs come from elsewhere; the others have the shipped weights. None of
them wins or designs as an option may need it, so in the table's rows three of four designs, and
their hints, are a program of the library in the policy's place, and each play ends in a return that
its name decides: every row has environments, and what its designs earn is computed a second time by
hand (pairwise_rewards.py).
"""

import contextlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from pairwise import OPTIONS, Row, covering, may_be
from pairwise_rewards import REFUSED, earned

from models import transformer
from models.config import TransformerConfig
from models.tokenizer import load_tokenizer
from models.weights import save_weights
from spade_jax.cli import load_config
from spade_jax.config import Config, DesignerConfig
from spade_jax.envs import adapters
from spade_jax.envs.library import FAMILIES, TOOL_FAMILIES
from spade_jax.envs.library.base import Draw
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.recipes import change
from spade_jax.roles import agent, digests
from spade_jax.roles.prompts import HINT_LABEL
from spade_jax.roles.supply import Problems, Supply, open_supply
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.templates import choose
from spade_jax.train import train
from spade_jax.types import Arm, Completion, Episode, Outcome, Stop

ROOT = Path(__file__).resolve().parents[2]
THINKER = ROOT / "tests" / "golden" / "chat" / "qwen3"
FAKES = str(ROOT / "tests" / "spade_jax" / "envs" / "adapters" / "fakes")
TERMS = ("amber", "basalt", "cobalt", "dolmen", "ember", "flint", "garnet", "hazel")
SKILL = {"games": "Logical Deduction", "tools": "Data Retrieval"}
DESIGN = {"games": "Write a game as one Python", "tools": "Write a tool task as one Python"}
HINT = "Write a hint for the player"
PROBLEM = "Doubling"  # of the stand-in for RLVE
DESIGNS = 4  # of a cycle, the first of them the policy's own
SMALL = TransformerConfig(
    vocab_size=1024, num_layers=2, embed=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp=32,
    num_experts=2,
)  # fmt: skip


@dataclass
class Seen:
    """What a run asked its sampler, and what it left."""

    row: Row
    chat: Chat
    recited: list[Draw] = field(default_factory=list)  # designs to come in the policy's place
    num_designs: int = 0  # asked for
    written: list[str] = field(default_factory=list)  # designs
    prompts: list[str] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)  # last ids of each prompt
    lines: list[dict[str, Any]] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    earned: dict[int, list[float]] = field(default_factory=dict)  # by hand, by step

    def designs(self) -> list[str]:
        return [text for text in self.prompts if any(each in text for each in DESIGN.values())]

    def hints(self) -> list[str]:
        return [text for text in self.prompts if HINT in text]

    def has(self, name: str) -> bool:
        return any(name in line for line in self.lines)

    def recite(self, prompt: str) -> str | None:
        """What is said in the policy's place; None where it speaks for itself."""
        if any(each in prompt for each in DESIGN.values()) and self.recited:
            self.num_designs += 1
            index, own = divmod(self.num_designs - 1, DESIGNS)
            draw = self.recited[index * (DESIGNS - 1) + own - 1]
            return f"```python\n{draw.program}```" if own else None
        if HINT in prompt:
            code = {digests.code(draw.program).strip(): draw.hint for draw in self.recited}
            return next((hint for text, hint in code.items() if text in prompt), None)
        return None


def small_weights(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jax.numpy.asarray(rng.normal(0, 0.05, leaf.shape), leaf.dtype),
        transformer.abstract_params(SMALL),
    )
    save_weights(folder, SMALL, params, "float32")
    for name, content in load_tokenizer(THINKER).files.items():
        (folder / name).write_bytes(content)
    return folder


def programs(folder: Path, setting: str) -> Path:
    """Programs of the library with their hints."""
    folder.mkdir()
    families = FAMILIES[:6] if setting == "games" else TOOL_FAMILIES[:6]
    for index, family in enumerate(families):
        draw = family.draw(random.Random(0), TERMS, "easy")
        (folder / f"game_{index}.py").write_text(draw.program)
        record = {"source": {"skill": draw.skill}, "hint": draw.hint}
        (folder / f"game_{index}.json").write_text(json.dumps(record))
    return folder


def library(setting: str) -> list[Draw]:
    """Different programs for the designs of two cycles, none of them long."""
    families = FAMILIES if setting == "games" else TOOL_FAMILIES[:5]
    return [
        families[index % len(families)].draw(
            random.Random(index), TERMS[index // len(families) :], "easy"
        )
        for index in range(2 * (DESIGNS - 1))
    ]


def config_of(row: Row, scratch: Path, compiled: Path, run_dir: Path) -> Config:
    base = load_config(ROOT / "configs" / "micro.py")
    small = row["thinking"] == "on" or row["source"] != "policy"
    thinking = {"thinking": row["thinking"] == "on"}
    tools = row["setting"] == "tools"
    designer: dict[str, Any] = {
        "prompt": "compact_tools" if tools else "compact",
        "skills": (SKILL[row["setting"]],),
        "skills_per_cycle": 1,
        "train": row["designer"] == "trained",
        "source": row["source"],
        "designs": 1 if row["source"] == "rlve" else DESIGNS,
        "delay_steps": 1,
    }
    if row["source"] == "folder":
        designer |= {"folder": str(scratch / row["setting"]), "gates": "none"}
    if row["source"] == "rlve":
        designer |= {"problems": (PROBLEM,)}
    return change(
        base,
        run={
            "dir": str(run_dir),
            "checkpoint_steps": 3,
            "compile_cache": str(compiled),
            **({"init_from": str(scratch / "small")} if small else {}),
        },
        **({"model": vars(SMALL)} if small else {}),
        designer=designer | thinking | ({"max_tokens": 48} if small else {}),
        hint=thinking
        | {"source": "designer" if row["source"] == "folder" else "policy", "max_tokens": 48},
        agent=thinking
        | {"plays": 2, "max_observation_tokens": 500, "max_turns": 8}
        | ({"max_tokens": 16} if small else {}),
        reward={"kind": row["reward"], "regret_caution": "none"},
        learner={"zero_variance": "keep"},  # so that no luck is needed for an update on both roles
        batch={"row_tokens": 2048},  # a recited design may be longer than one that is sampled
        corpus={"enabled": row["corpus"] == "on"},
        memory={"size": 200 if row["memory"] == "on" else 0},
        envs={"probe_seeds": 10},
        telemetry={"live": False},
    )


@contextlib.contextmanager
def listening(seen: Seen) -> Iterator[None]:
    """Note what the sampler is asked, and recite."""
    generate, play = Engine.generate, agent.play
    chat = seen.chat.with_thinking(seen.row["thinking"] == "on")

    async def noted(self: Engine, tokens: Any, params: Any, key: Any) -> Any:
        prompt = seen.chat.decode(tokens)
        seen.prompts.append(prompt)
        seen.ends.append(tokens[-12:].tolist())
        text = seen.recite(prompt)  # in the order of the requests, not of the replies
        completion = await generate(self, tokens, params, key)
        if text is not None:
            ids = chat.finish(text, "hm" if seen.row["thinking"] == "on" else None)
            sure = np.full(len(ids), -0.01, np.float32)
            version = completion.policy_version
            completion = Completion(ids, sure, sure, Stop.STOP_ID, version)
        if any(each in prompt for each in DESIGN.values()):
            seen.written.append(seen.chat.decode(completion.tokens))
        return completion

    async def ended(*given: Any) -> Episode:
        episode = await play(*given)
        name = f"{episode.environment_id} {episode.seed} {episode.play_index} {episode.arm}"
        # hinted plays are won more often, and half a win is none
        drawn = random.Random(name).randrange(8) + 2 * (episode.arm is Arm.HINTED)
        value = 1.0 if drawn > 4 else 0.5 if drawn == 4 else 0.0
        return replace(episode, outcome=Outcome.FINISHED, episode_return=value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "generate", noted)
        if seen.recited:
            patch.setattr(agent, "play", ended)
        patch.setattr("spade_jax.train.Pool", stand_in_pool)
        patch.setattr("spade_jax.train.open_supply", stand_in_supply)
        yield


def stand_in_pool(limits: Limits, packages: list[str]) -> Pool:
    return Pool(limits, packages, [FAKES])


def stand_in_supply(config: DesignerConfig, seed: int) -> Supply | None:
    if config.source != "rlve":
        return open_supply(config, seed)
    return Problems.load(config, seed, lambda package: adapters.catalogue(package, [FAKES]))


def run(row: Row, config: Config, recited: list[Draw]) -> Seen:
    tokenizer = load_tokenizer(Path(config.run.init_from))
    seen = Seen(row, Chat(tokenizer, choose(tokenizer)), recited)
    with listening(seen):
        folder = train(config)
    seen.lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for path in sorted((folder / "episodes").glob("*.jsonl")):
        seen.episodes += [json.loads(line) for line in path.read_text().splitlines()]
    if recited:
        seen.earned = earned(row["reward"], folder, seen.episodes)
    assert [line["progress/step"] for line in seen.lines] == [0, 1, 2]
    assert all(line["sampler/late_compiles_count"] == 0 for line in seen.lines)
    return seen


def check_designs(seen: Seen) -> None:
    """Who writes, of what kind, and what is shown of documents and memory."""
    row, designs = seen.row, seen.designs()
    assert bool(designs) == (row["source"] == "policy")
    assert seen.has("designer/raw_valid_frac") == (row["source"] == "policy")
    if row["source"] != "policy":
        assert {line.get("sampler/design_tokens_count", 0) for line in seen.lines} == {0}
        assert {line.get("designer/admitted_frac", 1) for line in seen.lines} == {1}
    for text in designs:
        assert DESIGN[row["setting"]] in text and SKILL[row["setting"]] in text
        document, _, terms = text.partition("Document: ")[2].partition("\n")
        assert bool(document.strip()) == (row["corpus"] == "on"), text
        assert ("Terms: none" not in terms) == (row["corpus"] == "on"), text
        if row["memory"] == "off":
            assert "Memory: none\n" in text
    if row["memory"] == "off":
        assert all(line["memory/size_count"] == 0 for line in seen.lines)
    else:
        assert seen.lines[-1]["memory/size_count"] > 0
        if row["source"] == "policy":
            assert all("Memory: none\n" in text for text in designs[:DESIGNS])
            assert all("Memory: none\n" not in text for text in designs[DESIGNS:])


def check_training(seen: Seen) -> None:
    """Whose tokens are trained on."""
    assert seen.has("loss/designer") == (seen.row["designer"] == "trained")
    assert seen.has("loss/agent")


def check_reward(seen: Seen) -> None:
    """Which arms there are, and what the designs earn."""
    kind = seen.row["reward"]
    hinted = {episode["arm"] for episode in seen.episodes} == {"hinted", "unhinted"}
    compared = kind in ("blend", "regret")
    assert hinted == compared
    assert compared or not seen.hints()
    assert seen.has("designer/regret_mean") == compared
    told = [text for text in seen.prompts if HINT_LABEL in text]
    assert bool(told) == hinted
    for step, rewards in {0: [], **seen.earned}.items():
        logged = seen.lines[step].get("designer/reward_mean")
        assert logged == (pytest.approx(np.mean(rewards)) if rewards else None), (step, rewards)


def check_thinking(seen: Seen) -> None:
    """Whether completions are opened for a thought: the template closes an empty one where not."""
    ids = seen.chat.thinking_ids
    if seen.row["thinking"] == "on":
        assert ids is not None and not any(ids[1] in end for end in seen.ends)
    elif ids is not None:
        assert seen.ends and all(ids[1] in end for end in seen.ends)


def check_setting(seen: Seen) -> None:
    """What is played."""
    source, tools = seen.row["source"], seen.row["setting"] == "tools"
    first = [episode["turns"][0]["observation"] for episode in seen.episodes if episode["turns"]]
    if source == "policy":
        assert all(DESIGN[seen.row["setting"]] in text for text in seen.designs())
    elif source == "rlve":
        assert first and all("Double" in text for text in first)
    else:
        assert first and all(("<tools>" in text) == tools for text in first)


def table(scratch: Path, compiled: Path) -> None:
    """Every row of the table."""
    small_weights(scratch / "small")
    for setting in SKILL:
        programs(scratch / setting, setting)
    seen = []
    for index, row in enumerate(covering(OPTIONS, may_be)):
        print(index, row, flush=True)
        config = config_of(row, scratch, compiled, scratch / "runs" / f"row_{index:02d}")
        one = run(row, config, library(row["setting"]))
        for check in (check_designs, check_training, check_reward, check_thinking, check_setting):
            check(one)
        seen.append(one)
    # by each reward some designs earned more than others
    for kind in OPTIONS["reward"]:
        rewards = [
            each
            for one in seen
            if one.row["reward"] == kind
            for each in itertools.chain(*one.earned.values())
            if each != REFUSED
        ]
        assert len({round(each, 6) for each in rewards}) > 1, (kind, rewards)


def frozen(scratch: Path, compiled: Path) -> None:
    """What a frozen copy of the starting weights writes does not change however far the weights
    move; what the weights themselves write does.
    """
    row = {
        "reward": "solve_rate", "source": "policy", "setting": "games", "memory": "off",
        "corpus": "on", "designer": "untrained", "thinking": "off",
    }  # fmt: skip
    runs = {"far": ("initial", 3e-2), "near": ("initial", 3e-5), "moving": ("current", 3e-2)}
    seen: dict[str, Seen] = {}
    for name, (policy, lr) in runs.items():
        config = change(
            config_of(row, scratch, compiled, scratch / "runs" / name),
            designer={"policy": policy},
            learner={"lr": lr},
            agent={"plays": 4, "max_turns": 8, "max_tokens": 64},
        )
        seen[name] = run(row, config, [])
        # there was an update between the two cycles
        assert seen[name].lines[-1]["progress/policy_version"] > 0
        assert len(seen[name].written) == 2 * config.designer.designs
    count = len(seen["far"].written) // 2
    assert len({tuple(one.written[:count]) for one in seen.values()}) == 1
    assert seen["far"].written == seen["near"].written
    assert seen["moving"].written[count:] != seen["far"].written[count:]
    played = {n: [e["turns"] for e in one.episodes if e["step"] == 2] for n, one in seen.items()}
    assert played["far"] != played["near"]  # the agent is the moved weights


if __name__ == "__main__":
    {"table": table, "frozen": frozen}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
