"""One cycle's designs: what each is asked for, and each attempt from its prompt to its verdict.

Where the settings take programs from elsewhere (`designer.source`), a design is one of those, or
the answer of an endpoint to the same prompt, and there is nothing to train on.

Attempts are made in rounds: all environments that are wanted are asked for at once, and in the next
round those of which no design was admitted. So what is drawn depends on the run's seed and the
results, never on which reply came first. Judging programs is admission's work (`envs`), hints are
`hinting`'s, and what a design is worth is `scoring`'s.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from spade_jax import hinting
from spade_jax.config import Config
from spade_jax.envs.admit import HINT_GATES, admit, admit_public
from spade_jax.errors import ConfigError, SilentEndpointError
from spade_jax.hinting import at_gate, joined, tried
from spade_jax.roles import designer, endpoint, judge, prompts, skills
from spade_jax.roles.corpus import cut_tokens, excerpt
from spade_jax.roles.diversity import Likeness
from spade_jax.roles.endpoint import Unanswered
from spade_jax.roles.prompts.tools import DOMAINS, VARIANT_TEXT, VARIANTS
from spade_jax.roles.supply import Supplied
from spade_jax.roles_config import TOOL_PROMPTS, UNGROUNDED_PROMPTS, DesignPrompt
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.keys import episode_key, named_rng, named_seed
from spade_jax.stage import Stage
from spade_jax.types import (
    Design,
    EnvironmentSource,
    Gate,
    Measures,
    Trajectory,
    Verdict,
    environment_id,
)

logger = logging.getLogger(__name__)

NUM_IDEAS: dict[DesignPrompt, int] = {
    "multi_turn": 3,
    "single_answer": 3,
    "tools": 2,
    "tools_single": 2,
}
"""Examples of the skill that a prompt shows; those that are not here show none."""


def cycle_designs(stage: Stage, cycle: int) -> list[Design]:
    """Every answer of every attempt of a cycle, in the order of the attempts."""
    designs: list[Design] = []
    slots: Sequence[int] = range(stage.config.designer.designs)
    known = _known(stage)
    for attempt_index in range(stage.config.designer.attempts):
        if stage.config.designer.writes:
            asked = requests(stage, cycle, slots, attempt_index)
            made = stage.share(
                asked, lambda mine: stage.gather([attempt(stage, request) for request in mine])
            )
            judged = [refuse_duplicates(stage, answers, known) for answers in made]
        else:
            judged = taken(stage, cycle, slots, attempt_index)
        designs += [design for answers in judged for design in answers]
        slots = [
            slot
            for slot, answers in zip(slots, judged, strict=True)
            if not answers[-1].verdict.admitted
        ]
        if not slots:
            break
    if stage.endpoint is not None:
        _require_answers(stage.config, designs)
    return designs


def requests(
    stage: Stage, cycle: int, slots: Sequence[int], attempt_index: int
) -> list[designer.Request]:
    """What one round of attempts is asked for, an entry for each of the slots: skills in equal
    shares; a document, a memory draw and ideas of its own for every attempt.
    """
    config = stage.config
    active = skills.active(config.designer.skills, config.designer.skills_per_cycle, cycle)
    asked, num_cut = [], 0
    for slot in slots:
        design_id = _design_id(cycle, slot, attempt_index)
        material = _drawn(config, active[slot % len(active)], design_id)
        records = stage.curriculum.memory.draw(
            material.skill, named_rng(config.run.seed, "memory", design_id)
        )
        material = replace(material, memory=tuple(records))
        document_id, material = _grounded(stage, material)
        if stage.endpoint is None:  # which has a context of its own
            whole, material = material, fitted(config, stage.chat, material)
            num_cut += material != whole
        asked.append(designer.Request(design_id, cycle, document_id, material))
    if num_cut:
        logger.warning(
            "cycle %d: %d of %d prompts have less of their document or memory than the settings "
            "say, to fit engine.context_tokens=%d beside designer.max_tokens=%d",
            *(cycle, num_cut, len(asked), config.engine.context_tokens, config.designer.max_tokens),
        )
    return asked


def _design_id(cycle: int, slot: int, attempt_index: int) -> str:
    return f"c{cycle:04d}_d{slot:03d}" + (f"_a{attempt_index}" if attempt_index else "")


def taken(stage: Stage, cycle: int, slots: Sequence[int], attempt_index: int) -> list[list[Design]]:
    """The next programs of the supply, one for each slot. A program that comes again in a later
    cycle is no duplicate: what may come twice was decided by whoever made the folder.
    """
    assert stage.supply is not None
    drawn = stage.supply.draw(cycle, len(slots))
    named = [
        (_design_id(cycle, slot, attempt_index), supplied)
        for slot, supplied in zip(slots, drawn, strict=True)
    ]
    made = stage.share(
        named, lambda mine: stage.gather([_taken(stage, cycle, *each) for each in mine])
    )
    return [[design] for design in made]


async def _taken(stage: Stage, cycle: int, design_id: str, supplied: Supplied) -> Design:
    """One program of the supply, admitted like a written one if the settings say so, and hinted."""
    config, source = stage.config, supplied.source
    verdict = Verdict(True)
    if config.designer.source == "folder" and config.designer.gates != "none":
        how = tried(config, design_id)
        verdict = await (
            admit(stage.pool, source.program, **how, known={}, duplicate_similarity=math.inf)
            if config.designer.gates == "all"
            else admit_public(stage.pool, source.program, seeds=how["solution_seeds"])
        )
    draft = Design(
        design_id=design_id,
        cycle=cycle,
        skill=source.skill,
        difficulty=source.difficulty,
        document_id=source.document_id,
        completion=source.program,
        trajectory=Trajectory.empty(),
        verdict=verdict,
        source=source,
    )
    if not verdict.admitted:
        return draft
    return await hinting.hinted(stage, draft, source, supplied.hint)


def _grounded(stage: Stage, material: prompts.Material) -> tuple[str, prompts.Material]:
    """Draw the document of a design, where the settings give it one, and its rare words."""
    config = stage.config
    if config.designer.prompt in UNGROUNDED_PROMPTS:
        return "", material
    document = stage.corpus.next(material.skill)
    if document is None:  # the corpus is off
        return "", material
    shown = excerpt(document, config.designer.document_words)
    if config.corpus.max_tokens:
        shown = cut_tokens(shown, config.corpus.max_tokens, stage.chat.tokenizer)
    terms = stage.corpus.rare_terms(shown)[: designer.MAX_TERMS]
    return document.document_id, replace(material, document=shown, terms=terms)


def _drawn(config: Config, skill: str, design_id: str) -> prompts.Material:
    """What the run's settings and the design's name decide."""
    settings = config.designer
    rng = named_rng(config.run.seed, "order", design_id)
    material = prompts.Material(
        kind=settings.prompt,
        skill=skill,
        difficulty=settings.difficulty,
        max_turns=config.agent.max_turns,
        ideas=skills.ideas(skill, NUM_IDEAS.get(settings.prompt, 0), rng),
        asks_hint=config.reward.needs_regret and config.hint.source == "designer",
    )
    if settings.prompt not in TOOL_PROMPTS:
        return material
    variants, odds = zip(*VARIANTS, strict=True)
    return replace(material, domain=rng.choice(DOMAINS), variant=rng.choices(variants, odds)[0])


def fitted(config: Config, chat: Chat, material: prompts.Material) -> prompts.Material:
    """Shorten document, then memory, until prompt and completion fit the context: a user's corpus
    may hold very long words.

    Raises:
        ConfigError: the prompt has no room even without both.
    """
    chat = chat.with_thinking(config.designer.thinking)
    room = config.engine.context_tokens - config.designer.max_tokens - 1
    while True:
        prompt = prompts.designer(material, config.hint.max_words)
        size = len(designer.opening(chat, prompt))
        if size <= room:
            return material
        if material.document:
            shorter = material.document[: len(material.document) // 2]
            material = replace(material, document=shorter)
        elif material.memory:
            material = replace(material, memory=material.memory[1:])
        else:
            raise ConfigError(
                f"the designer's prompt takes {size} tokens without document and memory, but "
                f"engine.context_tokens={config.engine.context_tokens} leaves {room} beside "
                f"designer.max_tokens={config.designer.max_tokens}; "
                "raise engine.context_tokens or lower designer.max_tokens"
            )


def check(config: Config, chat: Chat) -> None:
    """Refuse a context that is smaller than a designer's prompt before anything is computed.

    Raises:
        ConfigError: the prompt of some skill has no room.
    """
    for skill in config.designer.skills if config.designer.source == "policy" else ():
        material = _drawn(config, skill, "check")
        longest = max(VARIANT_TEXT, key=lambda variant: len(VARIANT_TEXT[variant]))
        ideas = sorted(skills.CATALOGUE[skill].examples, key=len)[-len(material.ideas) :]
        material = replace(
            material,
            ideas=tuple(ideas) if material.ideas else (),
            domain=max(DOMAINS, key=len) if material.domain else "",
            variant=longest,
        )
        fitted(config, chat, material)


async def attempt(stage: Stage, request: designer.Request) -> list[Design]:
    """One attempt: the first answer, and one for each refusal that the designer may mend."""
    config = stage.config
    talk = _conversation(stage, request)
    designs: list[Design] = []
    for turn in range(config.designer.repair_turns + 1):
        try:
            answer = await talk.answer()
        except Unanswered as error:
            logger.warning("design %s: the endpoint gave no answer: %s", request.design_id, error)
            verdict = at_gate(Gate.INFRASTRUCTURE, f"the endpoint gave no answer: {error}")
            designs.append(replace(_draft(request, turn, "", Trajectory.empty()), verdict=verdict))
            break
        design = await _judged(stage, request, turn, answer)
        designs.append(design)
        verdict = design.verdict
        others_fault = verdict.gate == Gate.INFRASTRUCTURE or (
            verdict.gate in HINT_GATES and config.hint.source == "policy"
        )
        if verdict.admitted or others_fault or turn == config.designer.repair_turns:
            break
        message = prompts.refusal(verdict.gate, verdict.reason, request.material.asks_hint)
        if not talk.refuse(message):
            break
    return designs


def _conversation(
    stage: Stage, request: designer.Request
) -> designer.Conversation | endpoint.Conversation:
    """The conversation with whoever writes the designs, before its first answer."""
    config = stage.config
    prompt = prompts.designer(request.material, config.hint.max_words)
    name = f"design/{request.design_id}"
    if stage.endpoint is not None:
        seed = named_seed(config.run.seed, name)
        return endpoint.Conversation(stage.endpoint, config.designer, prompt, seed)
    return designer.Conversation(
        stage.engine,
        stage.chat,
        config.designer,
        config.engine.context_tokens,
        prompt,
        episode_key(config.run.seed, name),
    )


def _require_answers(config: Config, designs: Sequence[Design]) -> None:
    """Refuse to go on with an endpoint that answered nobody in a whole cycle. A single prompt that
    it never answers, such as one that a filter stops, costs its own design alone.

    Raises:
        SilentEndpointError: says why it did not.
    """
    unanswered = [
        each for each in designs if each.verdict.gate == Gate.INFRASTRUCTURE and not each.source
    ]
    if len(unanswered) == len(designs):
        raise SilentEndpointError(
            f"endpoint.url={config.endpoint.url!r} answered none of {len(designs)} requests for "
            f"designs; of the last: {unanswered[-1].verdict.reason}; when it is back, go on with "
            "--resume"
        )


def _draft(request: designer.Request, turn: int, text: str, trajectory: Trajectory) -> Design:
    """An answer before anything is known of it but that it holds no program."""
    return Design(
        design_id=f"{request.design_id}_r{turn}" if turn else request.design_id,
        cycle=request.cycle,
        skill=request.material.skill,
        difficulty=request.material.difficulty,
        document_id=request.document_id,
        completion=text,
        trajectory=trajectory,
        verdict=at_gate(Gate.FENCE, "no complete ```python block in the completion"),
        source=None,
        turn=turn,
    )


async def _judged(
    stage: Stage, request: designer.Request, turn: int, answer: designer.Answer
) -> Design:
    """One answer from its program to its hint. The order is: admit the program, let the judge read
    it, write the hint, admit it, rewrite, refuse.
    """
    config, material = stage.config, request.material
    draft = _draft(request, turn, answer.text, answer.trajectory)
    design_id = draft.design_id
    if answer.program is None:
        return draft
    source = EnvironmentSource(
        answer.program, material.skill, material.difficulty, request.document_id
    )
    verdict = await admit(
        stage.pool,
        source.program,
        **tried(config, design_id),
        known=_known(stage),
        duplicate_similarity=config.envs.duplicate_similarity
        if config.diversity.duplicates == "refuse"
        else math.inf,
    )
    draft = replace(draft, source=source, verdict=verdict)
    if verdict.admitted and config.designer.judge:
        key = episode_key(config.run.seed, f"judge/{design_id}")
        opinion, tokens = await judge.judge(
            stage.engine, stage.chat, config.designer, source.program, key
        )
        draft = replace(joined(draft, opinion), judge_tokens=tokens)
    if not draft.verdict.admitted:
        return draft
    return await hinting.hinted(stage, draft, source, answer.hint)


def _known(stage: Stage) -> dict[str, str]:
    """Programs by id that a new one must not repeat: the newest that were admitted, whether or not
    the memory still holds or ever held them, and the example that the prompt shows.
    """
    newest = stage.curriculum.window.admitted[-stage.config.diversity.compared :]
    known = {environment_id(program): program for program in newest}
    kind = stage.config.designer.prompt
    return known | ({"of the prompt": prompts.WORKED[kind]} if kind in prompts.WORKED else {})


def refuse_duplicates(
    stage: Stage, designs: Sequence[Design], known: dict[str, str]
) -> list[Design]:
    """Measure how near each admitted design is to the nearest of `known`, which holds all programs
    to compare with and takes the new ones in; refuse near-duplicates if the settings say so.
    """
    likeness = Likeness.of(stage.config)
    judged = []
    for design in designs:
        if design.verdict.admitted and design.source is not None:
            near = likeness.nearest(design.source.program, known)
            measures: Measures = {"similarity": near.program, "rules_similarity": near.rules}
            if near.reason and stage.config.diversity.duplicates == "refuse":
                verdict = at_gate(Gate.DUPLICATE, near.reason)
            else:
                verdict = replace(design.verdict, gates={})
                known[design.source.environment_id] = design.source.program
            design = joined(design, replace(verdict, measures=measures))
        judged.append(design)
    return judged
