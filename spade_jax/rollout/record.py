"""Keeps the token record of one sequence while it grows, so that what was sampled is what is
trained on (decision 1).
"""

import numpy as np
from jaxtyping import Int, Integer

from spade_jax.types import Completion, Stop, Trajectory


class Recorder:
    """Append-only record of prompt pieces (mask 0) and completions (mask 1, but for forced ids)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._untruncated: list[float] = []
        self._turns: list[int] = []
        self._turn = 0
        self._version: int | None = None
        self._end = 0  # behind the last sampled token
        self._truncated = False
        self._num_untrained = 0
        self._routing: list[np.ndarray] = []
        self._routed = 0  # tokens whose routing is known

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Int[np.ndarray, " seq"]:
        """Everything so far, as the next request to the engine."""
        return np.asarray(self._tokens, np.int32)

    def add_prompt(self, ids: Int[np.ndarray, " piece"]) -> None:
        """Append text of ours or of the environment; it belongs to the turn that answers it."""
        nothing = [0.0] * len(ids)
        self._extend(ids.tolist(), nothing, nothing, [False] * len(ids))

    def add_completion(self, completion: Completion, *, trained: bool = True) -> None:
        """Append what the policy sampled and close the turn; without `trained` it has no loss."""
        if self._version is not None and completion.policy_version != self._version:
            raise ValueError(
                f"one trajectory sampled by policy versions {self._version} and "
                f"{completion.policy_version}"
            )
        self._version = completion.policy_version
        self._truncated = completion.stop in (Stop.MAX_TOKENS, Stop.CONTEXT)
        forced = completion.forced
        sampled = np.ones(len(completion.tokens), bool) if forced is None else ~forced
        if sampled.any():
            self._end = len(self._tokens) + int(np.flatnonzero(sampled)[-1]) + 1
        self._num_untrained += 0 if trained else int(sampled.sum())
        self._extend(
            completion.tokens.tolist(),
            completion.logprobs.tolist(),
            completion.untruncated_logprobs.tolist(),
            (sampled & trained).tolist(),
        )
        if completion.routing is not None:
            # Of a token seen before, the first choice counts: under it the next one was sampled.
            self._routing.append(completion.routing[self._routed :])
            self._routed = max(self._routed, len(completion.routing))
        self._turn += 1

    def build(self, temperature: float) -> Trajectory | None:
        """The finished record up to the last sampled token, or None when nothing was sampled."""
        if self._version is None or not self._end:
            return None
        end = self._end
        mask = np.asarray(self._mask[:end], bool)
        if self._routing:  # what was sampled under choices that nobody knows cannot be replayed
            mask[sum(map(len, self._routing)) + 1 :] = False
        return Trajectory(
            tokens=np.asarray(self._tokens[:end], np.int32),
            loss_mask=mask,
            sampler_logprobs=np.asarray(self._logprobs[:end], np.float32),
            untruncated_logprobs=np.asarray(self._untruncated[:end], np.float32),
            turn_index=np.asarray(self._turns[:end], np.int16),
            policy_version=self._version,
            temperature=temperature,
            routing=self._routing_to(end),
            truncated=self._truncated,
            num_untrained=self._num_untrained,
        )

    def _routing_to(self, end: int) -> Integer[np.ndarray, "seq layers chosen"] | None:
        """The experts of the first `end` tokens; the last one's are not known and stand for any."""
        if not self._routing:
            return None
        known = np.concatenate(self._routing)[:end]
        chosen = np.arange(known.shape[2], dtype=known.dtype)
        unknown = np.broadcast_to(chosen, (end - len(known), *known.shape[1:]))
        return np.concatenate([known, unknown])

    def _extend(
        self, ids: list[int], logprobs: list[float], untruncated: list[float], sampled: list[bool]
    ) -> None:
        self._tokens += ids
        self._mask += sampled
        self._logprobs += logprobs
        self._untruncated += untruncated
        self._turns += [self._turn] * len(ids)
