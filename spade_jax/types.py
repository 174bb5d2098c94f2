"""The glossary: every value that passes between the modules of the loop. NumPy only.

Dimension words used in shape annotations of this project:
`batch seq turns group layers heads kv_heads head_dim embed mlp experts vocab slots context`.

A **step** is one optimiser update; a **cycle** is the steps between two designer generations; an
**episode** is one play from reset to end; a **group** is the trajectories compared with one
another.
"""

import dataclasses
import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Int, Integer


class Role(enum.StrEnum):
    """Who is speaking. Both roles are the same weights."""

    DESIGNER = "designer"
    AGENT = "agent"


class Arm(enum.StrEnum):
    """Whether the agent saw the designer's privileged hint."""

    HINTED = "hinted"
    UNHINTED = "unhinted"


class Outcome(enum.StrEnum):
    """Why an episode ended (design decision 6)."""

    FINISHED = "finished"  # the environment said terminated
    ENV_TRUNCATED = "env_truncated"  # the environment said truncated
    TURN_LIMIT = "turn_limit"  # our cap on turns
    TOKEN_LIMIT = "token_limit"  # a completion or the context ran out of tokens
    ENV_ERROR = "env_error"  # the program raised
    TIMEOUT = "timeout"  # the program missed its deadline and was killed
    PROTOCOL = "protocol"  # the worker's bytes were not a valid frame
    SCHEMA = "schema"  # a valid frame whose content breaks the contract
    WORKER_DIED = "worker_died"  # the process ended by itself
    INFRASTRUCTURE = "infrastructure"  # our side failed: never a reward
    SAMPLER_ERROR = "sampler_error"  # generation failed: never a reward

    @property
    def void(self) -> bool:
        """Whether an episode that ended so carries no return, for the regret or for the loss."""
        return self not in _SCORED

    @property
    def cut(self) -> bool:
        """Whether a limit ended the episode: of turns, of tokens, or the environment's own."""
        return not self.void and self is not Outcome.FINISHED

    @property
    def program_fault(self) -> bool:
        """Whether the program itself broke the episode, which its author answers for."""
        return self.void and self not in (Outcome.INFRASTRUCTURE, Outcome.SAMPLER_ERROR)


_SCORED = frozenset(
    {Outcome.FINISHED, Outcome.ENV_TRUNCATED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT}
)


@dataclass(frozen=True)
class Document:
    """One grounding text. `document_id` is stable across runs on the same corpus."""

    document_id: str
    title: str
    text: str
    skills: tuple[str, ...] = ()  # that it is meant for; all, if it names none


@dataclass(frozen=True)
class Trajectory:
    """The token record of one designer completion or of one episode; never re-tokenised (design
    decision 1).

    tokens:       [prompt ......][completion 0][observation 1 ..][completion 1] ...
    loss_mask:     0 0 0 0 0 0 0  1 1 1 1 1 1 1 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1
    turn_index:    0 ...................... 0   1 ........................... 1
    """

    tokens: Int[np.ndarray, " seq"]  # int32
    loss_mask: Bool[np.ndarray, " seq"]  # sampled by the policy, forced and untrained ids left out
    # float32, under the distribution sampled from, meaningful where loss_mask
    sampler_logprobs: Float[np.ndarray, " seq"]
    # likewise, under the tempered distribution before truncation: equal when nothing is truncated
    untruncated_logprobs: Float[np.ndarray, " seq"]
    turn_index: Int[np.ndarray, " seq"]  # int16
    policy_version: int  # optimiser steps behind the weights that sampled it
    temperature: float  # the sampling temperature the log-probabilities belong to
    # the experts of every token, for replay; the last token has no choice yet, and any will do
    routing: Integer[np.ndarray, "seq layers chosen"] | None = None
    truncated: bool = False  # its last completion ran out of tokens
    num_untrained: int = 0  # tokens that were sampled, and are not trained on

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled, trained on or not."""
        return int(self.loss_mask.sum()) + self.num_untrained

    @classmethod
    def empty(cls) -> "Trajectory":
        """The record of a program that the policy did not write: nothing was sampled."""
        floats = np.zeros(0, np.float32)
        return cls(
            np.zeros(0, np.int32), np.zeros(0, bool), floats, floats, np.zeros(0, np.int16), 0, 1.0
        )


@dataclass(frozen=True)
class Turn:
    """One exchange: what the environment showed, what the model wrote, what was done."""

    observation: str
    completion: str
    action: str | None  # None when no action could be parsed
    reward: float | None  # None when the action was not stepped


@dataclass(frozen=True)
class Episode:
    """One play. `episode_return` in [-1, 1], None exactly when the outcome is void."""

    episode_id: str
    environment_id: str
    arm: Arm
    seed: int
    play_index: int
    outcome: Outcome
    episode_return: float | None
    turns: tuple[Turn, ...]
    trajectory: Trajectory | None  # None when nothing was sampled
    step: int
    detail: str = ""

    @property
    def win(self) -> bool:
        """Terminated with return >= 1 - 1e-6 (design decision 8)."""
        return self.outcome is Outcome.FINISHED and (self.episode_return or 0.0) >= 1 - 1e-6


def environment_id(program: str) -> str:
    """Content hash of a program: the same program is the same environment, in any run."""
    return hashlib.sha256(program.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class EnvironmentSource:
    """A program the designer wrote, and what it was asked for."""

    program: str
    skill: str
    difficulty: str
    document_id: str

    @property
    def environment_id(self) -> str:
        return environment_id(self.program)


class Gate(enum.StrEnum):
    """What a design is refused by, in the order in which it is tried (`envs.admit`)."""

    FENCE = "fence"  # the completion holds no program
    PARSE = "parse"
    IMPORTS = "imports"
    DUPLICATE = "duplicate"
    LOAD = "load"
    CRITERIA = "criteria"
    CONTRACT = "contract"
    SCHEMA = "schema"
    DETERMINISM = "determinism"
    VARIETY = "variety"
    SOLUTION = "solution"
    OUTCOMES = "outcomes"
    FEEDBACK = "feedback"
    LEAK = "leak"
    NO_OP = "no_op"
    CONSTANT = "constant"
    RANDOM = "random"
    JUDGE = "judge"  # the policy does not find it solvable (`roles.judge`)
    HINT = "hint"
    HINT_LEAK = "hint_leak"
    HINT_COPY = "hint_copy"
    INFRASTRUCTURE = "infrastructure"  # our side failed: nobody earns or pays for it


class GateResult(enum.StrEnum):
    """What became of a design at one gate; a gate that was not reached has no result."""

    PASSED = "passed"
    REFUSED = "refused"
    NOT_APPLICABLE = "not_applicable"  # the gate is not for environments of this origin


class Measures(TypedDict, total=False):
    """What admission measured; a key is absent when its gate was not reached."""

    similarity: float  # to the nearest program that was known
    rules_similarity: float  # of the texts it shows, to the nearest known program's
    num_instances: int  # different solutions among the seeds
    num_solution_seeds: int  # seeds that the solution won
    leak_frac: float  # instances whose first observation tells the answer
    no_op_win_frac: float
    constant_win_frac: float
    random_win_frac: float
    hint_copy_win_frac: float


@dataclass(frozen=True)
class Verdict:
    """The result of admission. `gate` names the gate that refused; empty when admitted."""

    admitted: bool
    gate: str = ""
    reason: str = ""
    measures: Measures = field(default_factory=Measures)
    gates: dict[str, str] = field(default_factory=dict)  # a GateResult for each gate reached


@dataclass(frozen=True)
class Environment:
    """An admitted program with its hint."""

    source: EnvironmentSource
    hint: str
    cycle: int
    design_id: str
    verdict: Verdict
    seed_hints: dict[str, str] = field(default_factory=dict)  # by instance seed

    @property
    def environment_id(self) -> str:
        return self.source.environment_id

    def hint_for(self, seed: int) -> str:
        """The hint of an instance: its own if there is one, else that of the program."""
        return self.seed_hints.get(str(seed), self.hint)


@dataclass(frozen=True)
class Design:
    """One answer of the designer, admitted or not: every one is a training sample.

    An answer to a refusal is a design of its own. Its trajectory holds the conversation before it,
    and its loss mask marks this answer alone: the earlier ones are designs with rewards of their
    own.
    """

    design_id: str
    cycle: int
    skill: str
    difficulty: str
    document_id: str
    completion: str
    trajectory: Trajectory
    verdict: Verdict
    source: EnvironmentSource | None  # None when no program could be parsed
    hint: str | None = None
    hint_completion: str | None = None  # the last one
    seed_hints: dict[str, str] = field(default_factory=dict)  # by instance seed
    turn: int = 0  # 0 for the first answer of an attempt, then counts its repairs
    hint_tokens: int = 0  # sampled for its hints, refused ones included
    judge_tokens: int = 0  # sampled for judging it


@dataclass(frozen=True)
class Group:
    """Trajectories of one role that are compared with one another, with what each is worth."""

    role: Role
    key: str
    trajectories: tuple[Trajectory, ...]
    rewards: Float[np.ndarray, " group"]
    advantages: Float[np.ndarray, " group"]


@dataclass(frozen=True)
class Reply:
    """What a well-behaved environment answers to `reset` (reward 0, both flags false) or `step`."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool


@dataclass(frozen=True)
class Fault:
    """What a request to an environment ended in instead of a reply: data, not an exception."""

    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Thinking:
    """The ids around a thinking block."""

    open_id: int
    close_id: int
    closing: tuple[int, ...]  # all that is written to close one, `close_id` among them


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion. Temperature 0 is greedy, with log-probabilities at temperature
    1. Truncation goes by temperature, then top-k, top-p, min-p.
    """

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    stop_strings: tuple[str, ...] = ()  # the token that completes one is the last
    thinking_tokens: int = 0  # tokens after which a thinking block is closed; 0: none does
    thinking: Thinking | None = None  # what a thinking block looks like; a budget needs it
    deadline_s: float = 0.0  # 0: none; the clock decides then what is sampled
    routing: bool = False  # return the routers' choices; needs engine.routing


class Stop(enum.StrEnum):
    """Why a completion ended."""

    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    DEADLINE = "deadline"  # out of time: what there is, perhaps nothing
    CANCELLED = "cancelled"  # the engine was stopped: likewise

    @property
    def cut(self) -> bool:
        """Whether something outside the sequence ended it: it says nothing of the policy."""
        return self in (Stop.DEADLINE, Stop.CANCELLED)


@dataclass(frozen=True)
class Completion:
    """What the engine sampled, stop token included."""

    tokens: Int[np.ndarray, " seq"]
    logprobs: Float[np.ndarray, " seq"]  # under the distribution sampled from; 0 where forced
    untruncated_logprobs: Float[np.ndarray, " seq"]  # under the tempered one, nothing cut off
    stop: Stop
    policy_version: int
    forced: Bool[np.ndarray, " seq"] | None = None  # ids that closed the thinking block; None: none
    # the experts of the whole sequence, prompt included, up to the token before the last
    routing: Integer[np.ndarray, "known layers chosen"] | None = None


def to_json(value: Any) -> Any:
    """Turn dataclasses, arrays and enums into what `json` writes; floats keep every bit through
    `repr`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_json(item) for item in value]
    return value
