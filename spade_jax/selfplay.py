"""One cycle of self-play: design environments, admit them, play both arms, score both roles.

Everything is drawn from the run's seed and the names of the things drawn, so the same state gives
the same cycle. The regret is measured at the step that wrote the environments, with equal arms on
the same seeds (paper equation 3); the win rate comes from all unhinted plays until the designer's
group is trained on. What they are worth is in `scoring`.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice

from spade_jax import designing, scoring
from spade_jax.config import Config
from spade_jax.curriculum import Pending, PlayTally
from spade_jax.roles import agent, memory
from spade_jax.roles.diversity import Likeness
from spade_jax.rollout.keys import episode_key
from spade_jax.scoring import Scored
from spade_jax.stage import Stage, instance_seeds
from spade_jax.types import (
    Arm,
    Design,
    Environment,
    Episode,
)


def design(stage: Stage, step: int) -> list[Design]:
    """Write, admit and hint one cycle's environments; every answer is returned and waits to be
    trained on.

    When nothing was admitted, the environments of the cycle before stay in play.
    """
    cycle = step // stage.config.run.cycle_steps
    designs = designing.cycle_designs(stage, cycle)
    stage.curriculum.window.add(designs, Likeness.of(stage.config), stage.config.diversity)
    found = [
        Environment(
            design.source, design.hint, cycle, design.design_id, design.verdict, design.seed_hints
        )
        for design in designs
        if design.verdict.admitted and design.source is not None and design.hint is not None
    ]
    # the same program twice, where that is allowed, is one environment
    admitted = list({environment.environment_id: environment for environment in found}.values())
    if admitted:
        stage.curriculum.environments = admitted
    tallies = {environment.environment_id: PlayTally() for environment in admitted}
    stage.curriculum.pending.append(Pending(cycle, step, designs, tallies))
    return designs


def play(stage: Stage, step: int) -> list[Episode]:
    """Play every environment: unhinted always, both arms on the same seeds in the step that wrote
    them, if the reward is one that looks at the regret.
    """
    config = stage.config
    compared = config.reward.needs_regret and _fresh(stage, step)
    arms = (Arm.UNHINTED, Arm.HINTED) if compared else (Arm.UNHINTED,)
    plans = [
        agent.Play(
            episode_id=f"s{step:05d}_{environment.environment_id}_{index}_{arm}_{play_index}",
            environment=environment,
            arm=arm,
            seed=seed,
            play_index=play_index,
            step=step,
        )
        for environment in stage.curriculum.environments
        for index, seed in enumerate(instance_seeds(config, environment.environment_id, step))
        for arm in arms
        for play_index in range(config.agent.plays)
    ]
    # the plays of an instance share their prompt, and with it pages of the sampler's cache
    by_instance = groupby(plans, lambda plan: (plan.environment.environment_id, plan.seed))
    instances = [list(same) for _, same in by_instance]
    played = stage.share(instances, functools.partial(_play_all, stage))
    return [episode for episodes in played for episode in episodes]


def _play_all(stage: Stage, instances: Sequence[Sequence[agent.Play]]) -> list[list[Episode]]:
    """Play these, as many at once as the pool holds."""
    config = stage.config
    episodes: list[Episode] = []
    for wave in _waves(config, [plan for plans in instances for plan in plans]):
        episodes += stage.gather(
            [
                agent.play(
                    stage.engine,
                    stage.chat,
                    stage.pool,
                    config.agent,
                    config.engine.context_tokens,
                    plan,
                    episode_key(config.run.seed, plan.episode_id),
                )
                for plan in wave
            ]
        )
    left = iter(episodes)
    return [list(islice(left, len(plans))) for plans in instances]


def _waves(config: Config, plans: Sequence[agent.Play]) -> list[list[agent.Play]]:
    """Cut plays into runs that the pool holds at once, in order.

    A play keeps its place in a worker while it waits for the sampler, and the sampler waits for all
    plays: one that found no place would stop both for ever.
    """
    places = config.envs.instances_per_worker
    waves: list[list[agent.Play]] = [[]]
    counts: Counter[str] = Counter()
    for plan in plans:
        counts[plan.environment.environment_id] += 1
        if sum(-(-count // places) for count in counts.values()) > config.envs.max_workers:
            waves.append([])
            counts = Counter([plan.environment.environment_id])
        waves[-1].append(plan)
    return waves


def _fresh(stage: Stage, step: int) -> bool:
    """Whether this step wrote the environments in play."""
    return any(pending.step == step and pending.tallies for pending in stage.curriculum.pending)


def score(stage: Stage, episodes: Sequence[Episode], step: int, *, flush: bool) -> Scored:
    """Tally the plays, update memory, and form the groups to train on.

    Designer groups come due `designer.delay_steps` after they were written, or at the last step
    (`flush`).
    """
    config, curriculum = stage.config, stage.curriculum
    for pending in curriculum.pending:
        for episode in episodes:
            if episode.environment_id in pending.tallies:
                pending.tallies[episode.environment_id].add(episode, paired=pending.step == step)
    curriculum.observe(episodes, config.designer.designs)
    if stage.supply is not None:
        stage.supply.observe(curriculum.environments, episodes)
    _remember(stage, step)
    due = [
        pending
        for pending in curriculum.pending
        if flush or pending.step + config.designer.delay_steps <= step
    ]
    curriculum.pending = [pending for pending in curriculum.pending if pending not in due]
    keep_flat = config.learner.zero_variance == "keep"
    agents, zero_variance = scoring.agent_groups(config.reward, episodes, keep_flat=keep_flat)
    judged = scoring.judge(config, due, curriculum.trackers)
    groups, role_weights, scale = scoring.balance(config, agents, judged, episodes)
    num_groups = len(agents) if keep_flat else len(agents) + zero_variance
    return Scored(groups, role_weights, scale, num_groups, zero_variance, judged)


def _remember(stage: Stage, step: int) -> None:
    """Write or refresh the memory record of every environment that has been played."""
    allowed = stage.config.diversity.duplicates == "allow"
    likeness = None if allowed else Likeness.of(stage.config)
    waiting = stage.curriculum.pending
    if not stage.config.memory.refresh:
        waiting = [pending for pending in waiting if pending.step == step]
    for pending in waiting:
        for item in pending.designs:
            tally = None if item.source is None else pending.tallies.get(item.source.environment_id)
            if (
                item.source is None
                or tally is None
                or tally.win_rate is None
                or not item.verdict.admitted
            ):
                continue
            # what is credited, as it is ranked by it: a few lucky plays are no lesson
            reward = stage.config.reward
            regret = scoring.credited_regret(reward, scoring.measure_regret(reward, tally))
            stage.curriculum.memory.add(
                memory.Record(
                    item.source.environment_id,
                    item.skill,
                    memory.summary(item.source.program),
                    tally.win_rate,
                    regret,
                    pending.cycle,
                    item.source.program,
                ),
                likeness,
            )
