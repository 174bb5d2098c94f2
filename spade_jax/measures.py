"""What a step measured, under the names of `telemetry.metrics`. A number that was not measured has
no entry.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

import numpy as np

from spade_jax.config import Config
from spade_jax.curriculum import Difficulties, banded
from spade_jax.envs.pool_stats import PoolStats
from spade_jax.roles.diversity import embedder
from spade_jax.rollout.stats import EngineStats
from spade_jax.scoring import Scored
from spade_jax.stage import Stage
from spade_jax.telemetry.metrics import STEP_PERCENTILES, mean, skill_metric
from spade_jax.types import Arm, Design, Episode, Gate, GateResult

Metrics = dict[str, int | float]


def all_of(
    stage: Stage, attempts: Sequence[Design], played: Sequence[Episode], scored: Scored
) -> Metrics:
    """Everything self-play measured in a step; update and services report for themselves."""
    return {
        **designs(attempts, written=stage.config.designer.writes),
        **endpoint(stage),
        **(variety(stage) if attempts else {}),
        **episodes(played),
        **scores(stage, scored),
        **difficulties(stage.curriculum.difficulties),
        **skills(stage, played, scored),
    }


def designs(attempts: Sequence[Design], *, written: bool = True) -> Metrics:
    """How many designs were written and admitted, the share that each gate refused, and what the
    first answers are worth before any repair, if they were `written`; counts of gates that refused
    none are left out.
    """
    if not attempts:
        return {}
    # what our own side broke off says nothing of the design
    judged = [d for d in attempts if written and d.verdict.gate != Gate.INFRASTRUCTURE]
    first = [design for design in judged if design.turn == 0]
    repairs = [design for design in judged if design.turn > 0]
    tokens = {"design": 0, "repair": 0, "hint": 0, "judge": 0}
    for design in attempts:
        tokens["repair" if design.turn else "design"] += design.trajectory.num_sampled
        tokens["hint"] += design.hint_tokens
        tokens["judge"] += design.judge_tokens
    admitted = sum(design.verdict.admitted for design in attempts)
    refused = Counter(design.verdict.gate for design in attempts if not design.verdict.admitted)
    return {
        "designer/attempted_count": len(attempts),
        "designer/admitted_count": admitted,
        "designer/admitted_frac": admitted / len(attempts),
        **{f"designer/refused_{gate}_count": count for gate, count in refused.items()},
        **{f"designer/refused_{gate}_frac": refused[gate] / len(attempts) for gate in Gate},
        **mean("designer/raw_valid_frac", [_passed(design, Gate.SCHEMA) for design in first]),
        **mean("designer/raw_solved_frac", [_passed(design, Gate.SOLUTION) for design in first]),
        **mean("designer/raw_admissible_frac", [_passed(design, Gate.RANDOM) for design in first]),
        **mean("designer/repair_admitted_frac", [float(d.verdict.admitted) for d in repairs]),
        "designer/braces_repaired_count": sum(
            design.source is not None and design.source.program not in design.completion
            for design in attempts
        ),
        **{f"sampler/{purpose}_tokens_count": count for purpose, count in tokens.items()},
        **mean("designer/novelty_program_mean", _novelty(attempts, "similarity")),
        **mean("designer/novelty_rules_mean", _novelty(attempts, "rules_similarity")),
    }


def _passed(design: Design, gate: Gate) -> float:
    return float(design.verdict.gates.get(gate) == GateResult.PASSED)


def _novelty(
    attempts: Sequence[Design], measure: Literal["similarity", "rules_similarity"]
) -> list[float]:
    found = (design.verdict.measures.get(measure) for design in attempts)
    return [1 - similarity for similarity in found if similarity is not None]


def endpoint(stage: Stage) -> Metrics:
    """What the endpoint that writes the designs was asked; nothing without one."""
    if stage.endpoint is None:
        return {}
    return {f"endpoint/{name}_count": n for name, n in asdict(stage.endpoint.stats()).items()}


def variety(stage: Stage) -> Metrics:
    """How varied the newest programs are, as of the last cycle of designs."""
    window = stage.curriculum.window
    last = max((each.cycle for each in window.written), default=None)
    repeats = [float(each.repeats) for each in window.written if each.cycle == last]
    metrics: Metrics = mean("diversity/near_duplicate_frac", repeats)
    if window.written:
        metrics["diversity/repeat_run_max"] = max(each.run for each in window.written)
    settings = stage.config.diversity
    if found := window.vendi(embedder(settings), settings.window):
        count = min(len(window.admitted), settings.window)
        metrics["diversity/window_count"] = count
        for name, score in zip(("rules", "program"), found, strict=True):
            metrics[f"diversity/vendi_{name}"] = score
            metrics[f"diversity/vendi_{name}_frac"] = score / count
    return metrics


def difficulties(steps: Sequence[Difficulties]) -> Metrics:
    """Shares of what the last steps had room for; what was not filled is in none but its own."""
    total = sum(step.capacity for step in steps)
    if not total:
        return {}
    counts = {
        name: sum(getattr(step, name) for step in steps) for name in ("learnable", "easy", "hard")
    }
    counts["unfilled"] = total - sum(counts.values())
    shares = {f"curriculum/{name}_frac": count / total for name, count in counts.items()}
    return {**shares, **{f"{name}_count": total for name in shares}}


def skills(stage: Stage, played: Sequence[Episode], scored: Scored) -> Metrics:
    """Each skill by itself: plays without the hint, what its designs showed and earned that came
    due, and its trackers.
    """
    curriculum, judged = stage.curriculum, scored.judged
    of = {each.environment_id: each.source.skill for each in curriculum.environments}
    unhinted = [each for each in played if each.arm is Arm.UNHINTED and not each.outcome.void]
    metrics: Metrics = {}
    for skill in sorted({*of.values(), *judged.rewards_by_skill, *curriculum.trackers}):
        mine = [each for each in unhinted if of.get(each.environment_id) == skill]
        regrets = [item.regret for item in judged.assessments if item.skill == skill]
        regret_means = [None if regret is None else regret.mean for regret in regrets]
        rewards = judged.rewards_by_skill.get(skill, [])
        metrics |= mean(skill_metric(skill, "win_frac"), [float(each.win) for each in mine])
        metrics |= mean(skill_metric(skill, "return_mean"), [each.episode_return for each in mine])
        metrics |= mean(skill_metric(skill, "regret_mean"), regret_means)
        metrics |= mean(skill_metric(skill, "reward_mean"), rewards)
        if tracker := curriculum.trackers.get(skill):
            metrics[skill_metric(skill, "tracker_fast")] = tracker.fast
            metrics[skill_metric(skill, "tracker_slow")] = tracker.slow
    return metrics


def episodes(played: Sequence[Episode]) -> Metrics:
    """Returns by arm, wins, lengths, and every outcome that occurred."""
    scored = [episode for episode in played if not episode.outcome.void]
    by_arm = {
        arm: [episode.episode_return for episode in scored if episode.arm is arm] for arm in Arm
    }
    completions = [
        episode.trajectory.num_sampled / len(episode.turns)
        for episode in played
        if episode.trajectory is not None and episode.turns
    ]
    outcomes = Counter(episode.outcome for episode in played)
    tokens = Counter[str]()
    for episode in played:
        if episode.trajectory is not None:
            tokens[episode.arm] += episode.trajectory.num_sampled
    return {
        **mean("agent/return_mean", [episode.episode_return for episode in scored]),
        **mean("agent/win_frac", [float(episode.win) for episode in scored]),
        **mean("agent/return_hinted_mean", by_arm[Arm.HINTED]),
        **mean("agent/return_unhinted_mean", by_arm[Arm.UNHINTED]),
        **mean("agent/turns_mean", [float(len(episode.turns)) for episode in scored]),
        **mean("agent/completion_tokens_mean", completions),
        **mean("sandbox/void_frac", [float(episode.outcome.void) for episode in played]),
        **{f"agent/outcome_{outcome}_count": count for outcome, count in outcomes.items()},
        **{f"sampler/{arm}_tokens_count": count for arm, count in tokens.items()},
    }


def scores(stage: Stage, scored: Scored) -> Metrics:
    """What the designer groups that came due showed and earned, and contrast among the agent's."""
    found = scored.judged.assessments
    bands = zip(("learnable", "easy", "hard"), banded(scored.win_rates), strict=True)
    flat = [1.0] * scored.zero_variance_groups + [0.0] * (
        scored.agent_groups - scored.zero_variance_groups
    )
    rewards, num_punished = scored.designer_rewards, scored.judged.num_punished
    punished = [1.0] * num_punished + [0.0] * (len(rewards) - num_punished)
    return {
        **mean("agent/zero_variance_group_frac", flat),
        **mean("designer/reward_mean", rewards),
        **mean("designer/punished_frac", punished),
        **mean("designer/regret_mean", [regret.mean for regret in scored.regrets]),
        **mean("designer/regret_stderr_mean", [regret.standard_error for regret in scored.regrets]),
        **mean("designer/regret_credited_mean", [item.credited_regret for item in found]),
        **mean("designer/win_variance_mean", [item.win_variance for item in found]),
        **mean("designer/within_seeds_frac", [item.within_share for item in found]),
        **mean("designer/anchor_mean", [item.anchor for item in found]),
        **mean("designer/frontier_mean", [item.frontier for item in found]),
        **mean("designer/micro_potential_mean", [item.micro for item in found]),
        **mean("designer/learning_potential_mean", [item.potential for item in found]),
        **mean("designer/tracker_gap_mean", scored.judged.tracker_gaps),
        **({} if scored.scale is None else {"designer/scale": scored.scale}),
        **{
            name: value
            for band, number in bands
            for name, value in mean(
                f"designer/{band}_frac",
                [1.0] * number + [0.0] * (len(scored.win_rates) - number),
            ).items()
        },
        "designer/pending_count": len(stage.curriculum.pending),
        "memory/size_count": len(stage.curriculum.memory.records),
    }


def services(config: Config, engine: EngineStats, pool: PoolStats) -> Metrics:
    """What sampler and environment pool did; tokens per second over the time the device worked.

    Workers started and requests sent are left out: they hang on which workers a resume finds alive.
    """
    steps = engine.decode_steps * config.engine.slots
    return {
        "sampler/tokens_count": engine.sampled_tokens,
        "sampler/prefilled_tokens_count": engine.prefilled_tokens,
        "sampler/prefix_hit_tokens_count": engine.prefix_hit_tokens,
        "sampler/rounds_count": engine.rounds,
        "sampler/preempted_count": engine.preempted_count,
        "sampler/failed_count": engine.failed_count,
        "sampler/late_compiles_count": engine.late_compiles,
        "sampler/kv_pages_max": engine.held_pages_max,
        "time/load_s": engine.load_s,
        **_ratio("sampler/slots_occupied_frac", engine.occupied_slot_steps, steps),
        **_ratio(
            "sampler/kv_wasted_frac",
            engine.held_places - engine.filled_places,
            engine.held_places,
        ),
        **_ratio("time/round_host_s", engine.host_s, engine.rounds),
        **_ratio("sampler/tokens_per_s", engine.sampled_tokens, engine.device_s),
        **_ratio("sampler/prefill_tokens_per_s", engine.prefilled_tokens, engine.prefill_s),
        **_ratio("sampler/decode_tokens_per_s", engine.occupied_slot_steps, engine.decode_s),
        **sandbox(pool),
    }


def waiting(played: EngineStats) -> Metrics:
    """How much of the plays' time the device had nothing to do."""
    waited = played.gather_s - played.device_s
    return _ratio("time/device_waited_frac", waited, played.gather_s)


def _ratio(name: str, part: float, whole: float) -> Metrics:
    """A share or a rate; nothing where there is nothing to divide by."""
    return {name: part / whole} if whole else {}


def sandbox(pool: PoolStats) -> Metrics:
    """What the environment pool did, and how fast."""
    return {
        **{f"sandbox/fault_{outcome}_count": count for outcome, count in pool.faults.items()},
        "sandbox/programs_count": len(pool.programs),
        "sandbox/instances_count": pool.instances,
        "sandbox/steps_count": pool.steps,
        "sandbox/refused_count": pool.refused,
        "sandbox/quarantined_count": pool.quarantined,
        "sandbox/retries_count": pool.retries,
        "sandbox/rebuilt_count": pool.rebuilt,
        "sandbox/workers_count": pool.workers,
        "sandbox/memory_peak_bytes": pool.peak_bytes,
        **({"sandbox/steps_per_s": pool.steps / pool.busy_s} if pool.steps else {}),
        **{
            f"time/sandbox_step_p{q}_s": float(np.percentile(pool.step_s, q))
            for q in STEP_PERCENTILES
            if pool.steps
        },
        **(
            {"time/sandbox_spawn_p95_s": float(np.percentile(pool.spawn_s, 95))}
            if pool.spawn_s
            else {}
        ),
    }
