"""Supervised examples from the environment library: designs, hints and plays, in the very prompts
the roles use.

A design is grounded: its program is built on rare words of the excerpt that stands in its prompt,
so that what is learnt is to read the document, not to recite a program. Programs run in the pool's
workers only.
"""

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from spade_jax.config import SKILLS, Difficulty, MemoryConfig
from spade_jax.envs.library import FAMILIES, TOOL_FAMILIES, Draw, Family
from spade_jax.envs.library.base import pick_terms
from spade_jax.envs.pool import Pool
from spade_jax.errors import CorpusError
from spade_jax.roles import memory, protocol
from spade_jax.roles.corpus import Corpus, excerpt
from spade_jax.roles.designer import MAX_TERMS
from spade_jax.roles.prompts import compact
from spade_jax.rollout.chat import Chat
from spade_jax.types import Fault, Reply, Role

MIN_TERMS = 3  # rare words an excerpt must hold to ground a program
DIFFICULTIES: tuple[tuple[Difficulty, int], ...] = (("easy", 3), ("medium", 1), ("hard", 1))


@dataclass(frozen=True)
class Example:
    """One conversation to imitate: loss on the completions alone."""

    role: Role
    kind: str  # "design", "hint", "copy" or "play"
    tokens: Int[np.ndarray, " seq"]
    loss_mask: Bool[np.ndarray, " seq"]


def _example(
    role: Role, kind: str, pieces: Sequence[tuple[Int[np.ndarray, " _"], bool]]
) -> Example:
    tokens = np.concatenate([ids for ids, _ in pieces])
    mask = np.concatenate([np.full(len(ids), taught) for ids, taught in pieces])
    return Example(role, kind, tokens, mask)


@dataclass(frozen=True)
class Grounded:
    """A library program drawn on a document."""

    draw: Draw
    skill: str
    difficulty: Difficulty
    excerpt: str
    terms: tuple[str, ...]


def ground(
    rng: random.Random,
    corpus: Corpus,
    document_words: int,
    avoid: Sequence[str] = (),
    skill: str | None = None,
    skills: Sequence[str] = SKILLS,
) -> Grounded:
    """Draw a document, a skill out of `skills` unless one is given, a family that is not in `avoid`
    where there is another, and its program.

    Raises:
        CorpusError: no document with enough rare words turned up.
    """
    for _ in range(1000):
        document = corpus[rng.randrange(len(corpus))]
        shown = excerpt(document, document_words)
        terms = corpus.rare_terms(shown)[:MAX_TERMS]
        if len(terms) >= MIN_TERMS:
            break
    else:
        raise CorpusError(
            f"of 1000 documents drawn none has {MIN_TERMS} words rarer than 5% in its first "
            f"{document_words} words; "
            "use a larger corpus or raise designer.document_words"
        )
    skill = skill or rng.choice(skills)
    names, odds = zip(*DIFFICULTIES, strict=True)
    difficulty = rng.choices(names, odds)[0]
    choices = [f for f in (*FAMILIES, *TOOL_FAMILIES) if f.skill == skill]
    family: Family = rng.choice([f for f in choices if f.class_name not in avoid] or choices)
    return Grounded(family.draw(rng, terms, difficulty), skill, difficulty, shown, terms)


def text_examples(
    seed: int,
    corpus: Corpus,
    chat: Chat,
    document_words: int,
    band: MemoryConfig,
    skills: Sequence[str] = SKILLS,
) -> Iterator[Example]:
    """Endless designs and hints, three designs to one hint; `band` says which records teach, and
    what is shown of them.
    """
    rng = random.Random(f"text/{seed}")
    while True:
        records, avoid = _memory_lines(rng, corpus, document_words, band, skills)
        skill = records[0].skill if records else None
        item = ground(rng, corpus, document_words, avoid, skill, skills)
        lines = [
            memory.render(record, band.win_low <= record.win_rate <= band.win_high, band.shows)
            for record in records
        ]
        prompt = compact.designer(item.skill, item.difficulty, item.excerpt, item.terms, lines)
        completion = f"```python\n{item.draw.program.rstrip()}\n```"
        yield _example(
            Role.DESIGNER, "design", [(chat.open(prompt), False), (chat.finish(completion), True)]
        )
        if rng.random() < 1 / 3:
            prompt = compact.hint(item.draw.program.rstrip())
            pieces = [(chat.open(prompt), False), (chat.finish(item.draw.hint), True)]
            yield _example(Role.DESIGNER, "hint", pieces)


def copy_examples(seed: int, words: Sequence[str], chat: Chat) -> Iterator[Example]:
    """Endless short exercises in what grounds a design: list some of the prompt's terms, in their
    order.

    A design names few words among hundreds of tokens, too few for a small policy to find out that
    they stand in its prompt; here they are most of what is taught. `words` are at least as many as
    a prompt offers.
    """
    rng = random.Random(f"copy/{seed}")
    while True:
        terms = rng.sample(words, rng.randint(MIN_TERMS, MAX_TERMS))
        chosen = pick_terms(rng, terms, rng.randint(MIN_TERMS, len(terms)))
        pieces = [
            (chat.open(compact.terms_line(terms)), False),
            (chat.finish(f"[{compact.quoted(chosen)}]"), True),
        ]
        yield _example(Role.DESIGNER, "copy", pieces)


def _memory_lines(
    rng: random.Random,
    corpus: Corpus,
    document_words: int,
    band: MemoryConfig,
    skills: Sequence[str],
) -> tuple[list[memory.Record], list[str]]:
    """Invented memory records of one skill, as a run would show them, and names to avoid."""
    count = rng.choice((0, 0, 1, 2, 3))
    records, names = [], []
    skill = rng.choice(skills)
    for _ in range(count):
        item = ground(rng, corpus, document_words, names, skill)
        summary = memory.summary(item.draw.program)
        names.append(summary.split(" ")[0])
        win_rate = rng.choice((0.0, 1.0, round(rng.uniform(band.win_low, band.win_high), 2)))
        records.append(
            memory.Record(
                "", skill, summary, win_rate, round(rng.uniform(-0.2, 0.5), 2), 0, item.draw.program
            )
        )
    return records, names


async def play_examples(
    seed: int,
    corpus: Corpus,
    chat: Chat,
    pool: Pool,
    document_words: int,
    max_turns: int,
    count: int,
    skills: Sequence[str] = SKILLS,
) -> AsyncIterator[Example]:
    """Yield `count` won expert plays, hinted and unhinted in equal shares; lost plays are not
    taught.
    """
    rng = random.Random(f"play/{seed}")
    made = 0
    while made < count:
        item = ground(rng, corpus, document_words, skills=skills)
        for instance_index in range(4):
            hinted = instance_index % 2 == 0
            example = await _play(rng, chat, pool, item.draw, hinted, max_turns)
            if example is not None and made < count:
                made += 1
                yield example


async def _play(
    rng: random.Random, chat: Chat, pool: Pool, draw: Draw, hinted: bool, max_turns: int
) -> Example | None:
    """One expert play as a conversation, or None when it did not win.

    Raises:
        RuntimeError: a library program misbehaved, which is a bug of the library.
    """
    instance = await pool.open(draw.program, rng.randrange(2**31))
    if isinstance(instance, Fault):
        raise RuntimeError(f"library family {draw.family} failed to start: {instance}")
    player, say = draw.player(hinted, rng), protocol.speech(draw.program)
    observation = instance.observation
    piece = say.open(chat, observation, draw.hint if hinted else None)
    pieces: list[tuple[Int[np.ndarray, " _"], bool]] = []
    won = False
    for _ in range(max_turns):
        thought, action = player.act(observation)
        completion = chat.finish(say.write(thought, action))
        pieces += [(piece, False), (completion, True)]
        reply = await instance.step(action)
        if not isinstance(reply, Reply):
            raise RuntimeError(f"library family {draw.family} failed in a step: {reply}")
        if reply.terminated or reply.truncated:
            won = reply.terminated and reply.reward >= 1 - 1e-6
            break
        observation = reply.observation
        piece = say.reply(chat, completion, observation)
    await instance.close()
    return _example(Role.AGENT, "play", pieces) if won else None
