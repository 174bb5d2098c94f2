"""Programs that may not be run again: the table of their offences, which outlives the pool.

An offence is what a worker had to be ended for: a missed limit, bytes that are no answers, a
process that ended. An error that a program raises and a value against its contract void an episode
too, but harm nobody and may hang on a single odd action, so they do not count here; neither does a
fault of our own. After two offences the program is refused.

It is refused from the moment on at which none of its instances is open or being opened. Plays that
started together thus all end as the program makes them end, and not as the clock would have it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from spade_jax.types import Fault, Outcome

OFFENCES = frozenset({Outcome.TIMEOUT, Outcome.PROTOCOL, Outcome.WORKER_DIED})
MAX_OFFENCES = 2  # the second one is the last


class Quarantine:
    """Offences by the digest of a program; `enter` and `leave` frame each use of one."""

    def __init__(self) -> None:
        self._offences: dict[str, list[Fault]] = {}  # the first `MAX_OFFENCES` of each
        self._uses: Counter[str] = Counter()

    def __len__(self) -> int:
        """Programs with too many offences."""
        return sum(len(faults) >= MAX_OFFENCES for faults in self._offences.values())

    def refusal(self, digest: str) -> Fault | None:
        """What opening the program is answered with, if it is in quarantine.

        The outcome is that of its first offence: its author answers for it again.
        """
        faults = self._offences.get(digest, [])
        if len(faults) < MAX_OFFENCES or self._uses[digest]:
            return None
        first = faults[0]
        return Fault(first.outcome, f"in quarantine; the first offence: {first.detail}")

    def enter(self, digest: str) -> None:
        """An instance is being opened."""
        self._uses[digest] += 1

    def leave(self, digest: str) -> None:
        """An instance has ended, or did not come to be."""
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest]

    def offend(self, digest: str, fault: Fault) -> None:
        """Note a fault, if it is an offence."""
        if fault.outcome in OFFENCES:
            faults = self._offences.setdefault(digest, [])
            if len(faults) < MAX_OFFENCES:
                faults.append(fault)

    def state(self) -> dict[str, Any]:
        """The table in plain values."""
        return {
            digest: [[str(fault.outcome), fault.detail] for fault in faults]
            for digest, faults in sorted(self._offences.items())
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a saved table."""
        self._offences = {
            digest: [Fault(Outcome(outcome), detail) for outcome, detail in faults]
            for digest, faults in state.items()
        }


def joined(before: dict[str, Any], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One saved table of those of several pools, all of which went on from the one before."""
    table = {digest: list(faults) for digest, faults in before.items()}
    for state in states:
        for digest, faults in state.items():
            known = table.setdefault(digest, [])
            known += faults[len(before.get(digest, [])) :]
    return {digest: faults[:MAX_OFFENCES] for digest, faults in sorted(table.items())}
