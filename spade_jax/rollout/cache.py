"""The host's record of the KV cache: the tokens each slot holds, and which slots are in use.

A slot keeps its tokens after its completion, so the next turn of an episode finds its own keys and
values and only the rest is prefilled. Slots share nothing: a prompt that several sequences have in
common is prefilled for each.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


class SlotTable:
    """Tokens whose keys and values are in the cache, slot by slot."""

    def __init__(self, num_slots: int, context: int) -> None:
        # -1, which equals no token, beyond what a slot holds
        self._tokens = np.full((num_slots, context), -1, np.int32)
        self._lengths = np.zeros(num_slots, np.int64)
        self._used_at = np.zeros(num_slots, np.int64)
        self._busy = np.zeros(num_slots, np.bool_)
        self._uses = 0

    @property
    def num_idle(self) -> int:
        """Slots that no request is using."""
        return int((~self._busy).sum())

    def length(self, slot: int) -> int:
        """Tokens the slot holds."""
        return int(self._lengths[slot])

    def clear(self) -> None:
        """Forget every token; no slot may be in use."""
        assert not self._busy.any()
        self._tokens[:] = -1
        self._lengths[:] = 0
        self._used_at[:] = 0
        self._uses = 0

    def acquire(self, sequences: Sequence[Int[np.ndarray, " _"]]) -> list[tuple[int, int]]:
        """Give each sequence (at most `num_idle` of them) a slot: (slot, leading tokens reused).

        A sequence that continues everything a slot holds gets that slot before others choose; the
        rest take the idle slot that shares their longest prefix, the least recently used among
        equals. At least one token is left to run.
        """
        shared = np.stack([self._shared_prefixes(sequence) for sequence in sequences])
        assigned: dict[int, int] = {}
        for row in range(len(sequences)):
            continues = ~self._busy & (self._lengths > 0) & (shared[row] == self._lengths)
            if continues.any():
                assigned[row] = self._take(np.where(continues, shared[row], -1))
        for row in range(len(sequences)):
            if row not in assigned:
                assigned[row] = self._take(np.where(self._busy, -1, shared[row]))
        result = []
        for row, sequence in enumerate(sequences):
            slot = assigned[row]
            hit = min(int(shared[row, slot]), len(sequence) - 1)
            self._tokens[slot, hit:] = -1
            self._lengths[slot] = hit
            result.append((slot, hit))
        return result

    def append(self, slot: int, tokens: Int[np.ndarray, " seq"]) -> None:
        """Record that the cache of `slot` now also holds `tokens`."""
        start = self.length(slot)
        self._tokens[slot, start : start + len(tokens)] = tokens
        self._lengths[slot] = start + len(tokens)

    def release(self, slot: int) -> None:
        """Free the slot; what it holds stays until another sequence takes it."""
        self._busy[slot] = False
        self._touch(slot)

    def _take(self, preference: Int[np.ndarray, " slots"]) -> int:
        best = np.flatnonzero(preference == preference.max())
        slot = int(best[np.argmin(self._used_at[best])])
        self._busy[slot] = True
        self._touch(slot)
        return slot

    def _touch(self, slot: int) -> None:
        self._uses += 1
        self._used_at[slot] = self._uses

    def _shared_prefixes(self, sequence: Int[np.ndarray, " seq"]) -> Int[np.ndarray, " slots"]:
        equal = self._tokens[:, : len(sequence)] == sequence
        return np.where(equal.all(axis=1), len(sequence), np.argmin(equal, axis=1))
