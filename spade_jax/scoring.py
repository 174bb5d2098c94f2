"""From plays to what is trained on: what each environment showed, what its design earns, and the
groups of both roles with their advantages.

The formulas are in `rewards`; here they are chosen by the settings and given their inputs. When a
design comes due, and what is remembered of it, is `selfplay`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spade_jax.config import Config
from spade_jax.curriculum import Pending, PlayTally
from spade_jax.reward_config import RewardConfig
from spade_jax.rewards import learning_potential as trackers
from spade_jax.rewards import penalty
from spade_jax.rewards.advantages import group_advantages, has_contrast
from spade_jax.rewards.anchor import plateau
from spade_jax.rewards.blend import blend
from spade_jax.rewards.caution import credited
from spade_jax.rewards.frontier import frontier
from spade_jax.rewards.learning_potential import Tracker
from spade_jax.rewards.micro_learning_potential import micro_learning_potential
from spade_jax.rewards.regret import Regret, reference_regret, regret
from spade_jax.rewards.scale import reference_scale
from spade_jax.rewards.seed_variance import within_share
from spade_jax.types import Arm, Design, Episode, Group, Role, Trajectory


@dataclass(frozen=True)
class Assessment:
    """What the plays of one environment show; None is not measured."""

    win_rate: float | None  # binary wins over scored unhinted plays
    mean_return: float | None  # of the same plays
    within_share: float | None  # share of the wins' variance that lies within instances
    regret: Regret | None
    credited_regret: float | None  # what is paid of it
    anchor: float | None
    frontier: float | None
    micro: float | None  # micro learning potential
    potential: float | None  # learning potential of its skill, before the bonus
    reward: float | None  # what its design earns unless it is punished
    skill: str = ""

    @property
    def win_variance(self) -> float | None:
        """p (1 - p): half-won environments have most of it."""
        return None if self.win_rate is None else self.win_rate * (1 - self.win_rate)


@dataclass(frozen=True)
class Judged:
    """The designs that came due: their groups, and what was measured on the way."""

    # those with contrast; all with learner.zero_variance="keep", none with designer.train=False
    groups: list[Group]
    rewards_by_skill: dict[str, list[float]]
    num_punished: int
    assessments: list[Assessment]  # of every environment that came due
    tracker_gaps: list[float]  # of the skills whose trackers moved

    @property
    def rewards(self) -> list[float]:
        """What the designs earned that came due."""
        return [earned for rewards in self.rewards_by_skill.values() for earned in rewards]


@dataclass(frozen=True)
class Scored:
    """What a step trains on and what it measured; designer lists are empty unless a designer group
    came due.
    """

    groups: list[Group]
    role_weights: dict[Role, float]  # of the mean token loss of each role
    scale: float | None  # what the designer's advantages were multiplied by; None if not scaled
    agent_groups: int
    zero_variance_groups: int
    judged: Judged

    @property
    def designer_rewards(self) -> list[float]:
        return self.judged.rewards

    @property
    def regrets(self) -> list[Regret]:
        return [found.regret for found in self.judged.assessments if found.regret is not None]

    @property
    def win_rates(self) -> list[float]:
        return [found.win_rate for found in self.judged.assessments if found.win_rate is not None]


def assess(reward: RewardConfig, tally: PlayTally, tracker: Tracker | None) -> Assessment:
    """Read one environment's plays; `tracker` is that of its skill."""
    returns = [play.episode_return for play in tally.scored]
    mean_return = float(np.mean(returns)) if returns else None
    share = within_share((play.seed, play.win) for play in tally.scored)
    found = measure_regret(reward, tally)
    paid = credited_regret(reward, found)
    rate = mean_return if reward.anchor_on == "mean_return" else tally.win_rate
    anchor = (
        None if rate is None else plateau(rate, reward.band_low, reward.band_high, reward.band_ramp)
    )
    if anchor is not None and reward.anchor_on == "wins_within_seeds":
        anchor = None if share is None else share * anchor
    edge = None if rate is None else frontier(rate, reward.frontier_scale)
    micro = micro_learning_potential(tally.by_step(), reward.micro_method)
    potential = None if mean_return is None else trackers.learning_potential(mean_return, tracker)
    unrewarded = Assessment(
        tally.win_rate, mean_return, share, found, paid, anchor, edge, micro, potential, None
    )
    variance = float(np.var(returns)) if returns else None
    return replace(unrewarded, reward=_reward(reward, unrewarded, variance))


def measure_regret(reward: RewardConfig, tally: PlayTally) -> Regret | None:
    """The regret by the estimator of the settings; None when it was not measured.

    The reference compares with the unhinted plays of the first step in its blend, and with those of
    all steps where the regret is the whole reward.
    """
    hinted, unhinted = tally.pairs(Arm.HINTED), tally.pairs(Arm.UNHINTED)
    everything = [play.episode_return for play in tally.scored]
    if reward.regret_estimator == "reference" and reward.kind == "regret":
        return reference_regret(hinted.values(), everything)
    return regret(reward.regret_estimator, hinted, unhinted, everything)


def credited_regret(reward: RewardConfig, found: Regret | None) -> float | None:
    """What is paid of a measured regret."""
    if found is None:
        return None
    return credited(
        found, reward.regret_caution, prior=reward.regret_prior, errors=reward.regret_errors
    )


def _reward(reward: RewardConfig, found: Assessment, variance: float | None) -> float | None:
    """What an environment that did not break earns; None when a part was not measured."""
    match reward.kind:
        case "blend":
            return blend(
                found.anchor,
                found.credited_regret,
                found.micro,
                found.frontier,
                anchor_weight=reward.anchor_weight,
                regret_weight=reward.regret_weight,
                micro_weight=reward.micro_weight,
                frontier_weight=reward.frontier_weight,
                regret_scale=reward.regret_scale,
                micro_scale=reward.micro_scale,
                clip=reward.regret_clip,
            )
        case "regret":
            return _positive(found.credited_regret)
        case "micro_learning_potential":
            return _positive(found.micro)
        case "solve_rate":
            return found.anchor
        case "frontier":
            return found.frontier
        case "learning_potential":
            if found.potential is None or variance is None or not reward.variance_bonus:
                return found.potential
            return found.potential + trackers.variance_bonus(variance)


def _positive(value: float | None) -> float | None:
    return None if value is None else max(0.0, value)


def agent_groups(
    reward: RewardConfig, episodes: Sequence[Episode], *, keep_flat: bool = False
) -> tuple[list[Group], int]:
    """Unhinted, scored episodes by instance or by environment, and how many groups have no contrast
    or nothing left to train on. Those without contrast have no advantage to teach, and are left out
    unless `keep_flat`.

    An episode that may not be trained on keeps its influence on the others' advantages.
    """
    members: dict[str, list[Episode]] = {}
    for episode in episodes:
        if _counts(episode):
            key = episode.environment_id
            if reward.agent_group == "environment_seed":
                key = f"{key}/{episode.seed}"
            members.setdefault(key, []).append(episode)
    groups, zero_variance = [], 0
    for key, group in members.items():
        rewards = np.asarray([episode.episode_return for episode in group], np.float32)
        advantages = group_advantages(rewards, reward.agent_norm)
        kept = [index for index, episode in enumerate(group) if trains(reward, episode)]
        if not has_contrast(rewards) or not kept:
            zero_variance += 1
            if not keep_flat or not kept:
                continue
        found = (group[index].trajectory for index in kept)
        trajectories = tuple(trajectory for trajectory in found if trajectory is not None)
        groups.append(Group(Role.AGENT, key, trajectories, rewards[kept], advantages[kept]))
    return groups, zero_variance


def _counts(episode: Episode) -> bool:
    return (
        episode.arm is Arm.UNHINTED and not episode.outcome.void and episode.trajectory is not None
    )


def trains(reward: RewardConfig, episode: Episode) -> bool:
    """Whether an episode's own tokens are trained on, if its group has contrast."""
    if episode.trajectory is None or not _counts(episode):
        return False
    filtered = reward.compact_filter and episode.outcome.cut
    return not filtered and bool(episode.trajectory.loss_mask.any())


def judge(config: Config, due: Sequence[Pending], moving: dict[str, Tracker]) -> Judged:
    """Score the designs that came due and group them by (cycle, skill); moves the trackers.

    A refused design, or one that broke in play, earns its penalty; what could not be measured is
    in no group.
    """
    assessments, moved = [], set()
    members: dict[str, list[tuple[Design, float]]] = {}
    num_punished = 0
    for pending in due:
        before = dict(moving)
        moved |= _move(config.reward, pending, moving)
        # a group that waited is compared with its own time, one that did not with the time before
        base = moving if config.designer.delay_steps else before
        for item in pending.designs:
            found = None
            if item.source is not None and item.verdict.admitted:
                tally = pending.tallies[item.source.environment_id]
                found = replace(
                    assess(config.reward, tally, base.get(item.skill)), skill=item.skill
                )
                assessments.append(found)
            punished = _penalty(config.reward, pending, item)
            earned = found.reward if punished is None and found is not None else punished
            if punished is None and earned is not None and _is_duplicate(config, item):
                earned = punished = penalty.of_duplicate(earned, _amounts(config.reward))
            num_punished += punished is not None
            if earned is not None:
                members.setdefault(f"{pending.cycle}/{item.skill}", []).append((item, earned))
    groups, rewards_by_skill = [], {}
    for key, scored in members.items():
        earned_here = [earned for _, earned in scored]
        rewards_by_skill.setdefault(scored[0][0].skill, []).extend(earned_here)
        rewards = np.asarray(earned_here, np.float32)
        trained = has_contrast(rewards) or config.learner.zero_variance == "keep"
        if trained and config.designer.train:
            advantages = group_advantages(rewards, config.reward.designer_norm)
            trajectories = tuple(design.trajectory for design, _ in scored)
            groups.append(Group(Role.DESIGNER, key, trajectories, rewards, advantages))
    rates = {"fast_rate": config.reward.tracker_fast, "slow_rate": config.reward.tracker_slow}
    return Judged(
        groups,
        rewards_by_skill,
        num_punished,
        assessments,
        [trackers.gap(moving[skill], **rates) for skill in sorted(moved)],
    )


def _move(reward: RewardConfig, pending: Pending, moving: dict[str, Tracker]) -> set[str]:
    """Give each skill's trackers the mean return of all its plays; the skills that had any."""
    returns: dict[str, list[float]] = {}
    for item in pending.designs:
        if item.source is not None and item.verdict.admitted:
            plays = pending.tallies[item.source.environment_id].scored
            returns.setdefault(item.skill, []).extend(play.episode_return for play in plays)
    played = {skill: values for skill, values in returns.items() if values}
    for skill, values in played.items():
        moving[skill] = trackers.update(
            moving.get(skill),
            float(np.mean(values)),
            fast_rate=reward.tracker_fast,
            slow_rate=reward.tracker_slow,
        )
    return set(played)


def _penalty(reward: RewardConfig, pending: Pending, item: Design) -> float | None:
    """What a design pays for being refused or for breaking in play; None when it pays nothing."""
    amounts = _amounts(reward)
    if reward.punish == "none":
        return None
    if not item.verdict.admitted or item.source is None:
        return penalty.of_refusal(item.verdict.gate, amounts) if reward.punish == "all" else None
    faults = pending.tallies[item.source.environment_id].faults
    if reward.punish == "hangs":
        faults = [outcome for outcome in faults if outcome == penalty.HANG]
    return penalty.of_faults(faults, amounts)


def _amounts(reward: RewardConfig) -> Mapping[penalty.Kind, float]:
    return {
        "invalid": reward.invalid_reward,
        "unsound": reward.unsound_reward,
        "duplicate": reward.duplicate_reward,
        "hint": reward.hint_reward,
        "hang": reward.hang_reward,
        "fault": reward.fault_reward,
    }


def _is_duplicate(config: Config, item: Design) -> bool:
    """Whether a design pays for being a near-duplicate that was played."""
    measures = item.verdict.measures
    return config.diversity.duplicates == "penalise" and (
        measures.get("similarity", 0.0) >= config.envs.duplicate_similarity
        or measures.get("rules_similarity", 0.0) >= config.diversity.rules_similarity
    )


def balance(
    config: Config, agents: list[Group], judged: Judged, episodes: Sequence[Episode]
) -> tuple[list[Group], dict[Role, float], float | None]:
    """The groups of both roles with the weight of each role, and the designer's scale if any.

    By `reference` every trajectory of the step weighs the same, with those of groups without
    contrast and masked ones in the divisor too, and the designer's advantages are multiplied by the
    scale.
    """
    if config.reward.designer_scale == "role_weight":
        weights = {Role.AGENT: 1.0, Role.DESIGNER: config.learner.designer_weight}
        return agents + judged.groups, weights, None
    num_agent = sum(map(_counts, episodes))
    num_designer = len(judged.rewards) if config.designer.train else 0
    scale = reference_scale(num_agent, num_designer, config.run.cycle_steps)
    designs = [replace(group, advantages=group.advantages * scale) for group in judged.groups]
    every = max(1, num_agent + num_designer)
    weights = {
        role: sum(_learns(config, each) for group in groups for each in group.trajectories) / every
        for role, groups in ((Role.AGENT, agents), (Role.DESIGNER, designs))
    }
    return agents + designs, weights, scale if num_designer else None


def _learns(config: Config, trajectory: Trajectory) -> bool:
    """Whether a trajectory has a loss, or is only in the divisor."""
    masked = config.learner.overlong == "mask" and trajectory.truncated
    return not masked and bool(trajectory.loss_mask.any())
