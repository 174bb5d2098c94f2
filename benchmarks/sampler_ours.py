"""Our side of the sampler benchmark: an engine with a model in it, and episodes played through it.

Each episode is a coroutine, as in a run: it asks the engine for a completion, then its environment
for a reply, which takes ENV_S seconds and is fixed in advance.
"""

import asyncio
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from sampler_workload import Scripted, Timed, num_sampled, timed

from models import backends
from models.config import TransformerConfig, read_config
from models.execution import Execution
from models.sharding import build_mesh
from models.tokenizer import load_tokenizer
from models.transformer import Params, init_params
from models.weights import load_weights
from spade_jax.config import EngineConfig
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.keys import episode_key
from spade_jax.rollout.record import Recorder
from spade_jax.types import SamplingParams, Trajectory

ENV_S = 0.001
ROOT = Path(__file__).resolve().parents[1]


class Model(NamedTuple):
    """A model on the devices, and how it runs."""

    config: TransformerConfig
    params: Params
    execution: Execution


def load_model(checkpoint: Path, dtype: Any = "auto") -> Model:
    """Open a converted checkpoint."""
    config = read_config(checkpoint)
    execution = backends.resolve(Execution(compute_dtype=dtype), config)
    params = load_weights(checkpoint, config, build_mesh(-1, 1, 1, 1), execution)
    return Model(config, params, execution)


def random_qwen3(like: TransformerConfig) -> Model:
    """A Qwen3 with random weights and the sizes of another model."""
    config = dataclasses.replace(like, family="qwen3", qk_norm=True, norm_eps=1e-6)
    execution = backends.resolve(Execution(), config)
    params = init_params(config, jax.random.key(0), build_mesh(-1, 1, 1, 1), execution)
    return Model(config, params, execution)


def token_text(checkpoint: Path) -> list[int]:
    """Ordinary text as token ids: what this project says of itself, and its code."""
    files = [ROOT / "README.md", ROOT / "BUILD.md", *sorted((ROOT / "spade_jax").glob("*.py"))]
    tokenizer = load_tokenizer(checkpoint)
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return np.asarray(tokenizer.encode(text)).tolist()


def make_engine(model: Model, slots: int, context_tokens: int, **fields: Any) -> Engine:
    """Compile an engine: it is warm."""
    config = EngineConfig(slots=slots, context_tokens=-(-context_tokens // 64) * 64, **fields)
    engine = Engine(model.config, config, build_mesh(-1, 1, 1, 1), model.execution)
    engine.compile()
    return engine


class Played(NamedTuple):
    """One run of episodes."""

    time: Timed
    stats: dict[str, float]  # the engine's own
    trajectories: list[Trajectory]


def play(
    engine: Engine,
    model: Model,
    episodes: list[Scripted],
    *,
    env_s: float = ENV_S,
    keep: bool = False,
) -> Played:
    """Play all episodes, from an empty cache whose memory is given back; with `keep`, in a loaded
    engine, from and into what others computed.
    """
    if not keep:
        engine.load(model.params, 0)
    engine.stats()
    trajectories: list[Any] = []

    async def episode(index: int, script: Scripted) -> Trajectory:
        record = Recorder()
        record.add_prompt(np.array(script.prompt, np.int32))
        key = episode_key(0, f"episode {index}")
        for turn, length in enumerate(script.lengths):
            params = SamplingParams(1.0, length, ())
            record.add_completion(await engine.generate(record.tokens, params, key))
            if turn < len(script.replies):
                if env_s:
                    await asyncio.sleep(env_s)
                record.add_prompt(np.array(script.replies[turn], np.int32))
        trajectory = record.build(1.0)
        assert trajectory is not None
        assert trajectory.loss_mask.sum() == sum(script.lengths)
        return trajectory

    def run() -> int:
        coroutines = [episode(index, script) for index, script in enumerate(episodes)]
        trajectories.extend(asyncio.run(gather(engine, coroutines)))
        return num_sampled(episodes)

    time = timed(run)
    if not keep:
        engine.release()
    return Played(time, dataclasses.asdict(engine.stats()), trajectories)


async def gather(engine: Engine, coroutines: list[Any]) -> list[Any]:
    """Give the engine a loop of its own."""
    return await engine.gather(coroutines)


def wanted_prefill(episodes: list[Scripted]) -> int:
    """Tokens to run through the model if nothing is ever computed twice.

    A group's prompt once, and for each later turn the reply and the token before it, which was
    sampled last and not read yet.
    """
    prompts = {episode.group: len(episode.prompt) for episode in episodes}
    later = [len(reply) + 1 for episode in episodes for reply in episode.replies]
    return sum(prompts.values()) + sum(later)


def say(*words: Any) -> None:
    """Print with the load of the machine."""
    load = os.getloadavg()[0]
    print(f"[{time.strftime('%H:%M:%S')} load {load:.1f}]", *words, flush=True)


def describe(time: Timed) -> str:
    """One line of a run."""
    return (
        f"{time.tokens} tokens in {time.wall_s:.1f} s ({time.tokens_per_s:.1f} a second), "
        f"processor {time.cpu_s:.1f} s ({1e3 * time.cpu_s / time.tokens:.1f} ms a token)"
    )


def goal(name: str, value: float | None, limit: float, *, least: bool) -> dict[str, Any]:
    """A line of the result: `least` says that the value has to reach the limit, not stay below.

    What was not measured does not hold.
    """
    holds = value is not None and (value >= limit if least else value <= limit)
    shown = None if value is None else float(f"{value:.4g}")
    return {"name": name, "value": shown, "goal": limit, "holds": holds}


def to_line(goals: list[dict[str, Any]]) -> str:
    """The last line."""
    return json.dumps({"goals": goals})
