"""Keeps the token record of one sequence while it grows, so that what was sampled is what is
trained on (decision 1).
"""

import numpy as np
from jaxtyping import Int

from spade_jax.types import Completion, Stop, Trajectory


class Recorder:
    """Append-only record of prompt pieces (mask 0) and completions (mask 1)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._turns: list[int] = []
        self._turn = 0
        self._version: int | None = None
        self._end = 0  # behind the last sampled token
        self._truncated = False

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Int[np.ndarray, " seq"]:
        """Everything so far, as the next request to the engine."""
        return np.asarray(self._tokens, np.int32)

    def add_prompt(self, ids: Int[np.ndarray, " piece"]) -> None:
        """Append text of ours or of the environment; it belongs to the turn that answers it."""
        self._extend(ids.tolist(), [0.0] * len(ids), sampled=False)

    def add_completion(self, completion: Completion, *, trained: bool = True) -> None:
        """Append what the policy sampled and close the turn; without `trained` it has no loss."""
        if self._version is not None and completion.policy_version != self._version:
            raise ValueError(
                f"one trajectory sampled by policy versions {self._version} and "
                f"{completion.policy_version}"
            )
        self._version = completion.policy_version
        self._truncated = completion.stop in (Stop.MAX_TOKENS, Stop.CONTEXT)
        self._extend(completion.tokens.tolist(), completion.logprobs.tolist(), sampled=trained)
        self._end = len(self._tokens)
        self._turn += 1

    def build(self, temperature: float) -> Trajectory | None:
        """The finished record up to the last sampled token, or None when nothing was sampled."""
        if self._version is None:
            return None
        end = self._end
        return Trajectory(
            tokens=np.asarray(self._tokens[:end], np.int32),
            loss_mask=np.asarray(self._mask[:end], bool),
            sampler_logprobs=np.asarray(self._logprobs[:end], np.float32),
            turn_index=np.asarray(self._turns[:end], np.int16),
            policy_version=self._version,
            temperature=temperature,
            truncated=self._truncated,
        )

    def _extend(self, ids: list[int], logprobs: list[float], *, sampled: bool) -> None:
        self._tokens += ids
        self._mask += [sampled] * len(ids)
        self._logprobs += logprobs
        self._turns += [self._turn] * len(ids)
