"""One cycle of self-play: design environments, admit them, play both arms, score both roles.

Everything is drawn from the run's seed and the names of the things drawn, so the same state gives
the same cycle. The regret is measured at the step that wrote the environments, with equal arms on
the same seeds (paper equation 3); the win rate comes from all unhinted plays until the designer's
group is trained on. What they are worth is in `scoring`.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spade_jax import scoring
from spade_jax.config import Config
from spade_jax.curriculum import Curriculum, Pending, PlayTally
from spade_jax.envs.admit import admit
from spade_jax.envs.hint_gates import admit_hint
from spade_jax.envs.pool import Pool
from spade_jax.envs.similarity import near_duplicate
from spade_jax.errors import ConfigError, SamplerError
from spade_jax.roles import agent, designer, hints, memory, prompts, skills
from spade_jax.roles.corpus import Corpus, excerpt
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.keys import episode_key, named_rng, named_seed
from spade_jax.scoring import Scored
from spade_jax.types import (
    Arm,
    Design,
    Environment,
    Episode,
    Gate,
    GateResult,
    Measures,
    Verdict,
)


@dataclass
class Stage:
    """The handles self-play works with; `runner` owns the event loop that the pool lives on."""

    config: Config
    engine: Engine
    pool: Pool
    chat: Chat
    corpus: Corpus
    curriculum: Curriculum
    runner: asyncio.Runner


def design(stage: Stage, step: int) -> list[Design]:
    """Write, admit and hint one cycle's environments; every attempt is returned and waits to be
    trained on.

    When nothing was admitted, the environments of the cycle before stay in play.
    """
    cycle = step // stage.config.run.cycle_steps
    requests = _requests(stage, cycle)
    attempts = [attempt(stage, request) for request in requests]
    designs = _refuse_duplicates(stage, stage.runner.run(stage.engine.gather(attempts)))
    admitted = [
        Environment(design.source, design.hint, cycle, design.design_id, design.verdict)
        for design in designs
        if design.verdict.admitted and design.source is not None and design.hint is not None
    ]
    if admitted:
        stage.curriculum.environments = admitted
    tallies = {environment.environment_id: PlayTally() for environment in admitted}
    stage.curriculum.pending.append(Pending(cycle, step, designs, tallies))
    return designs


def _requests(stage: Stage, cycle: int) -> list[designer.Request]:
    """What each design of the cycle is asked for: skills in equal shares, a fresh document and
    memory draw each.
    """
    config = stage.config
    active = skills.active(config.designer.skills, config.designer.skills_per_cycle, cycle)
    requests = []
    for index in range(config.designer.designs):
        design_id = f"c{cycle:04d}_d{index:03d}"
        skill = active[index % len(active)]
        document = stage.corpus.next()
        records = stage.curriculum.memory.draw(
            skill, named_rng(config.run.seed, "memory", design_id)
        )
        shown = excerpt(document, config.designer.document_words)
        request = designer.Request(
            design_id,
            cycle,
            skill,
            config.designer.difficulty,
            document.document_id,
            shown,
            stage.corpus.rare_terms(shown)[: designer.MAX_TERMS],
            tuple(records),
        )
        requests.append(_fit(stage, request))
    return requests


def _fit(stage: Stage, request: designer.Request) -> designer.Request:
    """Shorten the excerpt until prompt and completion fit the context: a user's corpus may hold
    very long words.
    """
    config = stage.config
    chat = stage.chat.with_thinking(config.designer.thinking)
    room = config.engine.context_tokens - config.designer.max_tokens - 1
    while True:
        prompt = prompts.designer(
            request.skill, request.difficulty, request.excerpt, request.terms, request.memory
        )
        size = len(chat.open(prompt))
        if size <= room:
            return request
        if request.excerpt:
            request = replace(request, excerpt=request.excerpt[: len(request.excerpt) // 2])
        elif request.memory:
            request = replace(request, memory=request.memory[1:])
        else:
            raise ConfigError(
                f"the designer's prompt takes {size} tokens without document and memory, but "
                f"engine.context_tokens={config.engine.context_tokens} leaves {room} beside "
                f"designer.max_tokens={config.designer.max_tokens}; "
                "raise engine.context_tokens or lower designer.max_tokens"
            )


async def attempt(stage: Stage, request: designer.Request) -> Design:
    """One design from prompt to hint. The order is: admit the program, write the hint, admit it,
    rewrite, refuse.
    """
    config, seed = stage.config, stage.config.run.seed
    key = episode_key(seed, f"design/{request.design_id}")
    text, trajectory, source = await designer.write(
        stage.engine, stage.chat, config.designer, request, key
    )
    draft = Design(
        design_id=request.design_id,
        cycle=request.cycle,
        skill=request.skill,
        difficulty=request.difficulty,
        document_id=request.document_id,
        completion=text,
        trajectory=trajectory,
        verdict=_at_gate(Gate.FENCE, "no complete ```python block in the completion"),
        source=source,
    )
    if source is None:
        return draft
    verdict = await admit(
        stage.pool,
        source.program,
        **_how(config, request.design_id),
        known={record.environment_id: record.program for record in stage.curriculum.memory.records},
        duplicate_similarity=config.envs.duplicate_similarity,
    )
    if not verdict.admitted:
        return replace(draft, verdict=verdict)
    return await _hint(stage, replace(draft, verdict=verdict), source.program)


def _how(config: Config, design_id: str) -> dict[str, Any]:
    """How a design and its hint are tried."""
    seed, envs = config.run.seed, config.envs
    return {
        "solution_seeds": [
            named_seed(seed, "solve", design_id, i) for i in range(envs.admit_seeds)
        ],
        "probe_seeds": [named_seed(seed, "probe", design_id, i) for i in range(envs.probe_seeds)],
        "max_probe_win_frac": envs.max_probe_win_frac,
        "max_turns": config.agent.max_turns,
        "rng_seed": named_seed(seed, "player", design_id),
    }


async def _hint(stage: Stage, draft: Design, program: str) -> Design:
    """Write the hint of an admitted program, rewrite it once if refused, then refuse the design."""
    config, how = stage.config, _how(stage.config, draft.design_id)
    completion, refusal = None, _at_gate(Gate.HINT, "no hint was asked for")
    for attempt in range(config.hint.attempts):
        key = episode_key(config.run.seed, f"hint/{draft.design_id}/{attempt}")
        try:
            completion, hint = await hints.write(
                stage.engine, stage.chat, config.hint, program, key
            )
        except SamplerError as error:  # a program that fills the context leaves a hint no room
            return _join(draft, _at_gate(Gate.HINT, str(error)))
        refusal = await admit_hint(
            stage.pool, program, hint, **how, max_words=config.hint.max_words
        )
        if refusal.admitted:
            return replace(_join(draft, refusal), hint=hint, hint_completion=completion)
    return replace(_join(draft, refusal), hint_completion=completion)


def _at_gate(gate: Gate, reason: str) -> Verdict:
    """The verdict of a design that one gate refused."""
    return Verdict(False, gate, reason, gates={gate: GateResult.REFUSED})


def _join(draft: Design, later: Verdict) -> Design:
    """The design with the verdict of later gates; what the earlier ones found stays."""
    earlier = draft.verdict
    measures: Measures = {**earlier.measures, **later.measures}
    verdict = replace(later, measures=measures, gates=earlier.gates | later.gates)
    return replace(draft, verdict=verdict)


def _refuse_duplicates(stage: Stage, designs: Sequence[Design]) -> list[Design]:
    """Refuse a near-duplicate of an earlier design of this cycle; admission has seen to memory."""
    threshold = stage.config.envs.duplicate_similarity
    known: dict[str, str] = {}
    judged = []
    for design in designs:
        if design.verdict.admitted and design.source is not None:
            _, reason = near_duplicate(design.source.program, known, threshold)
            if reason:
                design = _join(design, _at_gate(Gate.DUPLICATE, reason))
            else:
                known[design.source.environment_id] = design.source.program
        judged.append(design)
    return judged


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
            seed=named_seed(config.run.seed, "instance", environment.environment_id, step, index),
            play_index=play_index,
            step=step,
        )
        for environment in stage.curriculum.environments
        for index in range(config.agent.seeds)
        for arm in arms
        for play_index in range(config.agent.plays)
    ]
    episodes: list[Episode] = []
    for wave in _waves(config, plans):
        coroutines = [
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
        episodes += stage.runner.run(stage.engine.gather(coroutines))
    return episodes


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
    _remember(stage)
    due = [
        pending
        for pending in curriculum.pending
        if flush or pending.step + config.designer.delay_steps <= step
    ]
    curriculum.pending = [pending for pending in curriculum.pending if pending not in due]
    agents, zero_variance = scoring.agent_groups(config.reward, episodes)
    judged = scoring.judge(config, due, curriculum.trackers)
    groups, role_weights, scale = scoring.balance(config, agents, judged, episodes)
    num_groups = len(agents) + zero_variance
    return Scored(groups, role_weights, scale, num_groups, zero_variance, judged)


def _remember(stage: Stage) -> None:
    """Write or refresh the memory record of every environment that has been played."""
    for pending in stage.curriculum.pending:
        for item in pending.designs:
            tally = None if item.source is None else pending.tallies.get(item.source.environment_id)
            if (
                item.source is None
                or tally is None
                or tally.win_rate is None
                or not item.verdict.admitted
            ):
                continue
            regret = scoring.measure_regret(stage.config.reward, tally)
            stage.curriculum.memory.add(
                memory.Record(
                    item.source.environment_id,
                    item.skill,
                    memory.summary(item.source.program),
                    tally.win_rate,
                    None if regret is None else regret.mean,
                    pending.cycle,
                    item.source.program,
                )
            )
