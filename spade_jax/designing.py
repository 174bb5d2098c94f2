"""One cycle's designs: what each is asked for, and each from its prompt to its hint.

Everything is drawn from the run's seed and the design's id. Judging programs and hints is
admission's work (`envs`), and what a design is worth is `scoring`'s.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spade_jax.config import Config
from spade_jax.envs.admit import admit
from spade_jax.envs.hint_gates import admit_hint
from spade_jax.errors import ConfigError, SamplerError
from spade_jax.roles import designer, hints, prompts, skills
from spade_jax.roles.corpus import cut_tokens, excerpt
from spade_jax.roles.diversity import Likeness
from spade_jax.rollout.keys import episode_key, named_rng, named_seed
from spade_jax.stage import Stage
from spade_jax.types import Design, Gate, GateResult, Measures, Verdict


def requests(stage: Stage, cycle: int) -> list[designer.Request]:
    """What each design of the cycle is asked for: skills in equal shares, a fresh document and
    memory draw each.
    """
    config = stage.config
    active = skills.active(config.designer.skills, config.designer.skills_per_cycle, cycle)
    requests = []
    for index in range(config.designer.designs):
        design_id = f"c{cycle:04d}_d{index:03d}"
        skill = active[index % len(active)]
        document = stage.corpus.next(skill)
        records = stage.curriculum.memory.draw(
            skill, named_rng(config.run.seed, "memory", design_id)
        )
        shown = "" if document is None else excerpt(document, config.designer.document_words)
        if config.corpus.max_tokens:
            shown = cut_tokens(shown, config.corpus.max_tokens, stage.chat.tokenizer)
        request = designer.Request(
            design_id,
            cycle,
            skill,
            config.designer.difficulty,
            "" if document is None else document.document_id,
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
        duplicate_similarity=config.envs.duplicate_similarity
        if config.diversity.duplicates == "refuse"
        else math.inf,
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


def refuse_duplicates(stage: Stage, designs: Sequence[Design]) -> list[Design]:
    """Measure how near each admitted design is to the memory and to earlier ones of its cycle, and
    refuse near-duplicates if the settings say so.
    """
    likeness = Likeness.of(stage.config)
    known = {record.environment_id: record.program for record in stage.curriculum.memory.records}
    judged = []
    for design in designs:
        if design.verdict.admitted and design.source is not None:
            near = likeness.nearest(design.source.program, known)
            measures: Measures = {"similarity": near.program, "rules_similarity": near.rules}
            if near.reason and stage.config.diversity.duplicates == "refuse":
                verdict = _at_gate(Gate.DUPLICATE, near.reason)
            else:
                verdict = replace(design.verdict, gates={})
                known[design.source.environment_id] = design.source.program
            design = _join(design, replace(verdict, measures=measures))
        judged.append(design)
    return judged
