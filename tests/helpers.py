"""What tests share: makers of the glossary's types, a byte tokenizer and a policy that recites.

`from helpers import make_episode`. Every maker takes the fields to change by name.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spade_jax.config import BatchConfig, LearnerConfig
from spade_jax.learner.batch import Batch, make_batch, make_entries
from spade_jax.telemetry.metrics import repeatable
from spade_jax.types import (
    Arm,
    Completion,
    Episode,
    Group,
    Outcome,
    Role,
    SamplingParams,
    Stop,
    Trajectory,
    Turn,
)


def make_turn(**overrides: Any) -> Turn:
    fields: dict[str, Any] = {
        "observation": "Guess a number from 1 to 9.",
        "completion": "\\boxed{5}",
        "action": "5",
        "reward": 0.0,
    }
    return Turn(**(fields | overrides))


def make_trajectory(num_prompt: int = 3, num_sampled: int = 2, **overrides: Any) -> Trajectory:
    """A trajectory of one turn: a prompt, then sampled tokens, their values all different."""
    seq = num_prompt + num_sampled
    sampled = np.arange(seq) >= num_prompt
    logprobs = np.where(sampled, -0.5 - 0.01 * np.arange(seq), 0).astype(np.float32)
    fields: dict[str, Any] = {
        "tokens": np.arange(10, 10 + seq, dtype=np.int32),
        "loss_mask": sampled,
        "sampler_logprobs": logprobs,
        "untruncated_logprobs": overrides.get("sampler_logprobs", logprobs),
        "turn_index": np.zeros(seq, np.int16),
        "policy_version": 0,
        "temperature": 1.0,
    }
    return Trajectory(**(fields | overrides))


def make_episode(**overrides: Any) -> Episode:
    """A won episode of one turn, in the unhinted arm."""
    fields: dict[str, Any] = {
        "episode_id": "episode-0",
        "environment_id": "0123456789ab",
        "arm": Arm.UNHINTED,
        "seed": 0,
        "play_index": 0,
        "outcome": Outcome.FINISHED,
        "episode_return": 1.0,
        "turns": (make_turn(reward=1.0),),
        "trajectory": make_trajectory(),
        "step": 0,
    }
    return Episode(**(fields | overrides))


def make_group(**overrides: Any) -> Group:
    """A group of the agent with one trajectory better and one worse than their mean."""
    fields: dict[str, Any] = {
        "role": Role.AGENT,
        "key": "group-0",
        "trajectories": (make_trajectory(), make_trajectory(num_sampled=4)),
        "rewards": np.array([1.0, 0.0], np.float32),
        "advantages": np.array([1.0, -1.0], np.float32),
    }
    return Group(**(fields | overrides))


def pack_groups(
    groups: Sequence[Group],
    row_tokens: int = 32,
    rows: int = 2,
    *,
    weights: Mapping[Role, float] | None = None,
    learner: LearnerConfig | None = None,
    shards: int = 1,
    version: int = 0,
    align: int = 1,
) -> Batch:
    """One batch of all trajectories; `rows` are those of a device in one microbatch."""
    settings = LearnerConfig() if learner is None else learner
    return make_batch(
        make_entries(groups, settings),
        BatchConfig(row_tokens=row_tokens, device_tokens=row_tokens * rows, align_tokens=align),
        dict.fromkeys(Role, 1.0) if weights is None else weights,
        policy_version=version,
        learner=settings,
        shards=shards,
    )


def tree_allclose(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Whether two trees agree in structure, shapes, dtypes and, nearly, values."""
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        return False

    def close(a: Any, b: Any) -> bool:
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype.kind in "biuSU":
            return bool(np.array_equal(a, b))
        # bfloat16 and its kin are not NumPy's own: compare what they hold.
        return bool(
            np.allclose(a.astype(np.float64), b.astype(np.float64), rtol, atol, equal_nan=True)
        )

    return all(jax.tree.leaves(jax.tree.map(close, actual, expected)))


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics that a second run with the same seed must repeat."""
    return {name: value for name, value in metrics.items() if repeatable(name)}


class ByteTokenizer:
    """One token per byte of UTF-8, after three special ones."""

    pad_id = 0
    bos_id = 1
    eos_id = 2
    vocab_size = 3 + 256

    def encode(self, text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens; special ones have none."""
        return bytes(int(token) - 3 for token in tokens if token >= 3).decode(errors="replace")


class ScriptedPolicy:
    """Stands in for the engine: answers each request with its next text and keeps the requests.

    A text that ends in "<eos>" ends with the first stop id, another as if out of tokens.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: Any = None, policy_version: int = 0
    ) -> None:
        self.texts = list(texts)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.policy_version = policy_version
        self.requests: list[list[int]] = []

    async def generate(self, tokens: Any, params: SamplingParams, key: Any) -> Completion:
        if len(self.requests) == len(self.texts):
            raise AssertionError(f"the script of {len(self.texts)} texts is used up")
        text = self.texts[len(self.requests)]
        self.requests.append([int(token) for token in tokens])
        ids = list(self.tokenizer.encode(text.removesuffix("<eos>")))
        stop = Stop.MAX_TOKENS
        if text.endswith("<eos>"):
            ids.append(params.stop_ids[0])
            stop = Stop.STOP_ID
        if len(ids) > params.max_tokens:
            ids, stop = ids[: params.max_tokens], Stop.MAX_TOKENS
        await asyncio.sleep(0)  # as the engine does, let the other coroutines get ahead
        return Completion(
            tokens=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.25, np.float32),
            untruncated_logprobs=np.full(len(ids), -0.25, np.float32),
            stop=stop,
            policy_version=self.policy_version,
        )

    async def gather(self, coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        return list(await asyncio.gather(*coroutines))
