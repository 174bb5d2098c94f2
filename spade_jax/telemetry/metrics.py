"""The names of every number a run logs, and the one way to average.

A name is `namespace/quantity_stat_unit`; undeclared names and numbers that are not finite raise.
A mean over a set measured on the host carries a sibling, its name plus `_count`, and an empty set
logs nothing: a number that was not measured is absent, never 0.0. `sinks.py` writes the numbers.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from spade_jax.errors import SpadeError
from spade_jax.types import Gate, Outcome

PHASES = ("design", "play", "update", "checkpoint", "step")
"""The timed phases of the loop; `step` is the whole step."""

STEP_PERCENTILES = (50, 95, 99)

AVERAGED: dict[str, str] = {
    "agent/return_mean": "return of the episodes of both arms",
    "agent/win_frac": "episodes that were won, both arms",
    "agent/return_hinted_mean": "return of the episodes that saw the hint",
    "agent/return_unhinted_mean": "return of the episodes without the hint",
    "agent/turns_mean": "turns of an episode",
    "agent/completion_tokens_mean": "tokens of one completion of the agent",
    "agent/zero_variance_group_frac": "agent groups of equal returns, which teach nothing",
    "sandbox/void_frac": "episodes that carry no return",
    "designer/raw_valid_frac": "first answers whose program runs as the contract says",
    "designer/raw_solved_frac": "first answers whose program its own solution wins on every seed",
    "designer/raw_admissible_frac": "first answers whose program passes every test of programs",
    "designer/repair_admitted_frac": "answers to a refusal that were admitted",
    "designer/regret_mean": "hinted minus unhinted return of an environment",
    "designer/regret_stderr_mean": "standard error of an environment's regret",
    "designer/regret_credited_mean": "regret of an environment that its designer is paid for",
    "designer/win_variance_mean": "p (1 - p) of an environment's win rate p",
    "designer/within_seeds_frac": "share of the wins' variance that lies within instances",
    "designer/frontier_mean": "frontier term of an environment",
    "designer/micro_potential_mean": "gain in return on an environment over the steps it was in",
    "designer/learning_potential_mean": "distance of a mean return from its skill's slow tracker",
    "designer/tracker_gap_mean": "distance of a skill's two trackers, over twice their rates'",
    "designer/reward_mean": "reward of a design, refused ones included",
    "designer/punished_frac": "scored designs that were refused or broke in play",
    "designer/learnable_frac": "environments whose win rate lies in the learnable band",
    "designer/easy_frac": "environments whose win rate lies above the learnable band",
    "designer/hard_frac": "environments whose win rate lies below the learnable band",
    "designer/anchor_mean": "win-rate anchor of an environment",
    "designer/novelty_program_mean": "1 - likeness of a program's code to the nearest known one's",
    "designer/novelty_rules_mean": "1 - cosine of a program's texts to the nearest known one's",
    "curriculum/learnable_frac": "environments asked for in the last 16 steps that were learnable",
    "curriculum/easy_frac": "environments asked for in the last 16 steps that were won too often",
    "curriculum/hard_frac": "environments asked for in the last 16 steps that were won too seldom",
    "curriculum/unfilled_frac": "environments asked for in the last 16 steps that were not played",
    "diversity/near_duplicate_frac": "programs of the cycle like an earlier one of the window",
}
"""Means and shares over sets measured on the host; `mean` writes them together with their count."""

PURPOSES = {
    "design": "tokens sampled for first answers of the designer",
    "repair": "tokens sampled for its answers to refusals",
    "hint": "tokens sampled for hints in calls of their own, refused ones included",
    "judge": "tokens sampled for judging programs",
    "unhinted": "tokens sampled in plays without the hint",
    "hinted": "tokens sampled in plays with the hint",
}
"""What a cycle's tokens are sampled for; together they are all of them."""

PER_SKILL: dict[str, str] = {
    "win_frac": "episodes without the hint that were won",
    "return_mean": "return of an episode without the hint",
    "regret_mean": "hinted minus unhinted return of an environment",
    "reward_mean": "reward of a design, refused ones included",
    "tracker_fast": "fast tracker of the mean return",
    "tracker_slow": "slow tracker of the mean return",
}
"""What is logged for each skill, as `skill/<skill>_<name>` (`skill_metric`)."""

DECLARED: dict[str, str] = {
    "progress/step": "index of the step, from 0",
    "progress/cycle": "index of the designer generation, from 0",
    "progress/policy_version": "version of the weights that sampled this step's episodes",
    **AVERAGED,
    **{f"{name}_count": f"size of the set behind {name}" for name in AVERAGED},
    **{f"agent/outcome_{o}_count": f"episodes that ended as {o.name}" for o in Outcome},
    "designer/attempted_count": "designs written, answers to refusals included",
    "designer/admitted_count": "designs admitted",
    "designer/admitted_frac": "share of the designs that were admitted",
    **{f"designer/refused_{g}_count": f"designs refused by the gate {g.name}" for g in Gate},
    **{f"designer/refused_{g}_frac": f"share of the designs refused by {g.name}" for g in Gate},
    "designer/braces_repaired_count": "programs whose braces were doubled where they were no code",
    **{f"sampler/{purpose}_tokens_count": text for purpose, text in PURPOSES.items()},
    "endpoint/requests_count": "requests to the endpoint that writes the designs",
    "endpoint/repeated_count": "of these, requests made again",
    "endpoint/unanswered_count": "designs that it was asked for in vain",
    "endpoint/prompt_tokens_count": "tokens of the prompts, as the endpoint counts them",
    "endpoint/completion_tokens_count": "tokens of its answers, as it counts them",
    "designer/scale": "what the designer's advantages were multiplied by",
    "designer/pending_count": "designer groups that wait for more plays",
    "memory/size_count": "records in the memory of earlier environments",
    "diversity/window_count": "newest admitted programs that the Vendi scores are of",
    "diversity/vendi_rules": "effective number of different programs among these, by their texts",
    "diversity/vendi_rules_frac": "the same over their number",
    "diversity/vendi_program": "effective number of different programs among these, by their code",
    "diversity/vendi_program_frac": "the same over their number",
    "diversity/repeat_run_max": "longest run of near-duplicates of one skill in the window",
    "loss/agent": "loss of the agent's tokens",
    "loss/designer": "loss of the designer's tokens, before its weight",
    "loss/clip_frac": "trained tokens whose ratio was clipped",
    "loss/tis_clip_frac": "trained tokens whose importance weight was capped",
    "optim/grad_norm": "global gradient norm before clipping",
    "optim/agent_grad_norm": "norm of the agent's loss gradient at the final hidden states",
    "optim/designer_grad_norm": "norm of the designer's loss gradient at the final hidden states",
    "optim/lr": "learning rate",
    "optim/skipped_count": "updates skipped for gradients not finite; absent when there were none",
    "policy/kl_agent_mean": "KL to the starting weights at the agent's tokens, as estimated",
    "policy/kl_designer_mean": "KL to the starting weights at the designer's tokens, as estimated",
    "policy/entropy_agent_mean": "entropy in nats of the policy at the agent's tokens",
    "policy/entropy_designer_mean": "entropy in nats of the policy at the designer's tokens",
    "sampler/learner_logprob_gap_max": "largest gap between sampler and learner log-probability",
    "sampler/learner_logprob_gap_mean": "mean gap between sampler and learner log-probability",
    "sampler/tokens_count": "tokens sampled",
    "sampler/prefix_hit_tokens_count": "prompt tokens found in the cache",
    "sampler/prefilled_tokens_count": "prompt tokens computed",
    "sampler/rounds_count": "rounds of the sampler",
    "sampler/preempted_count": "times that a sequence gave its pages back before its end",
    "sampler/failed_count": "requests that failed because the scores were not numbers",
    "sampler/kv_pages_max": "most pages of the cache in use at once",
    "sampler/kv_wasted_frac": "places in the pages in use that hold no token",
    "sampler/slots_occupied_frac": "slots that held a sequence, over all decode steps",
    "sampler/late_compiles_count": "programs compiled after the warm-up: a bug if not 0",
    "sampler/tokens_per_s": "tokens sampled per second of sampling",
    "sampler/prefill_tokens_per_s": "prompt tokens computed per second of prefilling",
    "sampler/decode_tokens_per_s": "tokens sampled per second of decoding",
    **{f"sandbox/fault_{o}_count": f"instances that ended as {o.name}" for o in Outcome if o.void},
    "sandbox/unsafe": "1 if programs ran on a host that did not contain them, absent otherwise",
    "sandbox/programs_count": "different programs of which an instance was opened",
    "sandbox/instances_count": "instances opened: episodes, and the trials of admission",
    "sandbox/steps_count": "steps of these instances, replays left out",
    "sandbox/steps_per_s": "steps per second in which a request was waiting",
    "sandbox/refused_count": "instances not opened, their program being in quarantine",
    "sandbox/quarantined_count": "programs in quarantine",
    "sandbox/retries_count": "requests made again, their worker having gone down blamelessly",
    "sandbox/rebuilt_count": "instances rebuilt in another worker",
    "sandbox/workers_count": "workers alive, spare ones left out",
    "sandbox/memory_peak_bytes": "most memory that all workers together had added to their birth's",
    "batch/tokens_count": "tokens of the update, padding left out",
    "batch/rows_count": "rows of the update, empty ones left out",
    "batch/packed_frac": "tokens of the update over the tokens computed, padding included",
    "moe/expert_load_max_frac": "share of the routed tokens that the busiest expert took",
    "moe/load_imbalance_max": "load of the busiest expert over the mean load, in the worst layer",
    "moe/load_imbalance_mean": "load of the busiest expert over the mean load, mean over layers",
    "moe/load_evenness_min": "entropy of the load over log(experts), in the worst layer; 1 is even",
    "moe/dropped_count": "expert choices that no expert computed: a bug if not 0",
    "moe/balance_loss": "balance loss before its weight, mean over layers; 1 is even",
    "moe/router_z_loss": "router z-loss before its weight, mean over layers",
    "time/load_s": "seconds of moving weights to the sampler",
    "time/device_waited_frac": "share of the plays in which the sampler's device had nothing to do",
    "time/round_host_s": "seconds of a round that are the host's: plan, arrays and results",
    **{f"time/{phase}_s": f"seconds of the {phase} phase" for phase in PHASES},
    **{
        f"time/sandbox_step_p{q}_s": f"processor time of one step, {q}th percentile"
        for q in STEP_PERCENTILES
    },
    "time/sandbox_spawn_p95_s": "from wanting a worker to its loaded program, 95th percentile",
}
"""Every metric name with its meaning."""

UNREPEATABLE = frozenset(
    f"sandbox/{name}"
    for name in ("retries_count", "rebuilt_count", "workers_count", "memory_peak_bytes")
)
"""Numbers that hang on which workers are alive, which a resumed run finds otherwise."""

DIVIDED = frozenset(
    f"sampler/{name}"
    for name in (
        "prefilled_tokens_count",
        "prefix_hit_tokens_count",
        "rounds_count",
        "preempted_count",
        "kv_pages_max",
        "kv_wasted_frac",
        "slots_occupied_frac",
    )
)
"""Numbers that tell how the sampling went, which hangs on how many processes share it; of those
that can be repeated, all others are the same for any number of processes.
"""


def repeatable(name: str) -> bool:
    """Whether a second run with the same seed must log the same under this name."""
    timed = name.startswith("time/") or name.endswith("_per_s")
    return not timed and name not in UNREPEATABLE


def check(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the metrics as plain numbers, or raise on a name or a value that cannot be logged.

    Scalars of NumPy and JAX are read through their `item`. An undeclared name is a bug of ours
    (ValueError); a number that is not finite is a run that went wrong (SpadeError).
    """
    return {name: _number(name, value, metrics) for name, value in metrics.items()}


def skill_metric(skill: str, stat: str) -> str:
    """The name of one of `PER_SKILL`: "skill/optimization_win_frac"."""
    return f"skill/{re.sub('[^a-z0-9]+', '_', skill.lower()).strip('_')}_{stat}"


def declared(name: str) -> bool:
    """Whether a name may be logged."""
    return name in DECLARED or _stat(name.removesuffix("_count")) is not None


def _stat(name: str) -> str | None:
    """What of `PER_SKILL` a name stands for, or None."""
    found = re.fullmatch(r"skill/[a-z][a-z0-9_]*?_(" + "|".join(PER_SKILL) + ")", name)
    return found and found[1]


def _averaged(name: str) -> bool:
    return name in AVERAGED or (_stat(name) or "").endswith(("_frac", "_mean"))


def mean(name: str, values: Iterable[float | None]) -> dict[str, int | float]:
    """Return the mean of the values that are not None and their count; nothing if none is."""
    if not _averaged(name):
        raise ValueError(
            f"{name!r} is not in telemetry.metrics.AVERAGED; declare it there with its meaning"
        )
    measured = [float(value) for value in values if value is not None]
    if not measured:
        return {}
    return {name: math.fsum(measured) / len(measured), f"{name}_count": len(measured)}


def _number(name: str, value: Any, metrics: Mapping[str, Any]) -> int | float:
    if not declared(name):
        raise ValueError(
            f"metric {name!r} is not declared; declare it in telemetry.metrics with its meaning"
        )
    if _averaged(name) and f"{name}_count" not in metrics:
        raise ValueError(
            f"metric {name!r} lacks its sibling {name}_count; make both with telemetry.metrics.mean"
        )
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"metric {name!r} is {value!r}; expected one number")
    if not math.isfinite(number):
        raise SpadeError(
            f"metric {name} is {number}; expected a finite number: "
            "the run diverged or a value overflowed. "
            "Start again with a lower --learner.lr"
        )
    return number
