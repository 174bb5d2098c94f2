"""How well this host contains workers, as a probe child found by trying. Standard library only.

    S   as A, in namespaces of its zygote's own, and under the kernel's limits on the whole pool
    A   seccomp and Landlock
    B   seccomp, which then allows no file to be opened: no import after the fork
    C   something that must be refused was not: programs run only if the user accepts it

The tier says what was refused, never what was configured. A container or a virtual machine around
the whole run is not counted, as the trainer would be in it as well.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

ACCEPT = "I-accept"
TIERS = "SABC"  # best first
UNSAFE = "unsafe"
NAMESPACES, CGROUP = "namespaces", "cgroup"  # the layers that S has and A can do without


@dataclass(frozen=True)
class Layer:
    """One wall: whether it stands, its extent or why it does not, and what would change that."""

    name: str
    present: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Attempt:
    """One thing the probe tried, and what the kernel said: an errno's name, SIGSYS, or "done"."""

    name: str
    refused: bool
    answer: str


@dataclass(frozen=True)
class Sandbox:
    """What contains a worker on this host."""

    tier: str  # one of `TIERS`
    layers: tuple[Layer, ...]
    attempts: tuple[Attempt, ...]
    kernel: str
    probe_s: float  # processor time of the probe
    apart: tuple[Attempt, ...] = ()  # what a child with neither filter nor rules tried; decides S

    @property
    def allowed(self) -> tuple[str, ...]:
        """What the probe was not refused."""
        return tuple(attempt.name for attempt in self.attempts if not attempt.refused)

    @property
    def label(self) -> str:
        """The word for logs and results: the tier, or "unsafe"."""
        return UNSAFE if self.tier == "C" else self.tier

    def line(self) -> str:
        """One line for the start of a run."""
        walls = ", ".join(
            f"{layer.name} {layer.detail if layer.present else 'no'}" for layer in self.layers
        )
        return (
            f"sandbox={self.label}: {self.score} forbidden acts refused "
            f"({walls}; kernel {self.kernel})"
        )

    @property
    def score(self) -> str:
        """How many of the acts that were tried were refused."""
        tried = (*self.attempts, *self.apart)
        return f"{sum(attempt.refused for attempt in tried)} of {len(tried)}"

    def missing(self) -> list[str]:
        """A line for each layer that is not there: why, and what to do about it."""
        return [
            f"{layer.name}: {layer.detail}" + (f"; {layer.fix}" if layer.fix else "")
            for layer in self.layers
            if not layer.present
        ]

    def warnings(self) -> list[str]:
        """Those of the missing layers that A needs and something can be done about."""
        return [
            f"{layer.name}: {layer.detail}; {layer.fix}"
            for layer in self.layers
            if not layer.present and layer.fix and layer.name not in (NAMESPACES, CGROUP)
        ]

    def refusal(self) -> str:
        """Why programs must not run here, for a user who has not accepted it; "" if they may."""
        if self.tier != "C":
            return ""
        helpful = ("imports", NAMESPACES, CGROUP)
        walls = [text for text in self.missing() if not text.startswith(helpful)]
        missing = f" (missing: {' | '.join(walls)})" if walls else ""
        return (
            f"this host does not contain generated programs: they could {', '.join(self.allowed)}"
            f"{missing}; run where the sandbox works, or accept the "
            f"danger with --envs.unsafe-sandbox={ACCEPT}"
        )

    def shortfall(self, least: str) -> str:
        """Why this is less than a tier, if it is."""
        if TIERS.index(self.tier) <= TIERS.index(least):
            return ""
        why = self.missing()
        if self.tier == "A":
            why = [text for text in why if text.startswith((NAMESPACES, CGROUP))]
        return f"workers are at tier {self.tier}, less than the {least} of the pool: " + " | ".join(
            why
        )

    def dumps(self) -> str:
        """As text for `loads`."""
        return json.dumps(asdict(self))


def loads(text: str) -> Sandbox:
    """The reverse of `Sandbox.dumps`."""
    fields: dict[str, Any] = json.loads(text)
    fields["layers"] = tuple(Layer(**layer) for layer in fields["layers"])
    for name in ("attempts", "apart"):
        fields[name] = tuple(Attempt(**attempt) for attempt in fields[name])
    return Sandbox(**fields)


def worst(found: Sequence[Sandbox]) -> Sandbox:
    """The weakest of several: a program may live under any."""
    return max(found, key=lambda sandbox: TIERS.index(sandbox.tier))
