"""Warm-start examples are grounded in their document, varied, and taught on completions alone."""

import asyncio
import itertools
import json
import random
import re

import pytest

from models.tokenizer import train
from spade_jax.config import SKILLS, MemoryConfig
from spade_jax.envs import tool_calls
from spade_jax.envs.library import FAMILIES, TOOL_FAMILIES
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import CorpusError
from spade_jax.roles import examples, parsing
from spade_jax.roles.corpus import Corpus
from spade_jax.rollout.chat import Chat
from spade_jax.types import Document, Role

WORDS = ("amber basalt cobalt dolmen ember flint garnet hazel indigo jasper kelpie lumen").split()  # noqa: SIM905


def document(index):
    """Ten documents of words that only they hold, among words that all hold."""
    own = [f"{word}{chr(97 + index)}" for word in WORDS]
    return Document(f"d{index}", f"book.{own[0]}", "this text tells about " + " ".join(own))


@pytest.fixture(scope="module")
def corpus():
    return Corpus([document(index) for index in range(21)], 0)


@pytest.fixture(scope="module")
def wide_chat(corpus, tmp_path_factory):
    rng = random.Random(0)
    drawn = [examples.ground(rng, corpus, 20) for _ in range(60)]
    texts = [text for item in drawn for text in (item.excerpt, item.draw.program, item.draw.hint)]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return Chat(train(texts, path, vocab_size=500))


def test_families_cover_the_skills_with_distinct_names():
    assert len(FAMILIES) >= 12
    assert {family.skill for family in FAMILIES} == set(SKILLS)
    assert len({family.class_name for family in FAMILIES}) == len(FAMILIES)


def test_a_program_is_built_on_rare_words_of_its_excerpt(corpus):
    rng = random.Random(1)
    for _ in range(40):
        item = examples.ground(rng, corpus, 20)
        found = [
            term for term in corpus.rare_terms(item.excerpt) if f'"{term}"' in item.draw.program
        ]
        assert len(found) >= 2


def test_ground_avoids_families_in_memory(corpus):
    rng = random.Random(2)
    names = {family.class_name for family in FAMILIES if family.skill == "Optimization"}
    avoided = sorted(names)[0]
    for _ in range(20):
        item = examples.ground(rng, corpus, 20, [avoided], "Optimization")
        assert f"class {avoided}" not in item.draw.program


def test_a_corpus_without_rare_words_is_refused():
    poor = Corpus([Document(f"d{i}", "same", "the same few words") for i in range(3)], 0)
    with pytest.raises(CorpusError, match="document_words"):
        examples.ground(random.Random(0), poor, 20)


def test_text_examples_teach_the_completion_alone(corpus, wide_chat):
    made = list(
        itertools.islice(examples.text_examples(3, corpus, wide_chat, 20, MemoryConfig()), 30)
    )
    again = list(
        itertools.islice(examples.text_examples(3, corpus, wide_chat, 20, MemoryConfig()), 30)
    )
    assert [e.tokens.tolist() for e in made] == [e.tokens.tolist() for e in again]
    assert {example.kind for example in made} == {"design", "hint"}
    for example in made:
        assert example.role is Role.DESIGNER
        taught = wide_chat.decode(example.tokens[example.loss_mask])
        prompt = wide_chat.decode(example.tokens[~example.loss_mask])
        if example.kind == "design":
            assert parsing.program(taught) is not None and "Document: book." in prompt
        else:
            assert parsing.hint(taught) == taught and "class " in prompt
        assert example.tokens[-1] in wide_chat.stop_ids and example.loss_mask[-1]


def test_plays_are_won_and_half_are_hinted(corpus, wide_chat):
    async def collect():
        async with Pool(Limits()) as pool:
            made = examples.play_examples(4, corpus, wide_chat, pool, 20, 12, 12)
            return [example async for example in made]

    made = asyncio.run(collect())
    assert len(made) == 12 and {example.role for example in made} == {Role.AGENT}
    prompts = [wide_chat.decode(example.tokens) for example in made]
    assert 3 <= sum("HINT: " in prompt for prompt in prompts) <= 11
    for example in made:
        taught = wide_chat.decode(example.tokens[example.loss_mask])
        assert parsing.action(taught) is not None


def test_tool_tasks_are_taught_in_their_own_protocol(corpus, wide_chat):
    skills = [family.skill for family in TOOL_FAMILIES]

    async def collect():
        async with Pool(Limits()) as pool:
            made = examples.play_examples(4, corpus, wide_chat, pool, 20, 12, 6, skills)
            return [example async for example in made]

    for example in asyncio.run(collect()):
        text = wide_chat.decode(example.tokens)
        assert "<tools>" in text and "Play the game" not in text
        move = tool_calls.parse(wide_chat.decode(example.tokens[example.loss_mask]))
        assert move.calls and all(isinstance(call, tool_calls.Call) for call in move.calls)
        assert "<tool_response>" in wide_chat.decode(example.tokens[~example.loss_mask])


def test_a_copy_exercise_lists_terms_of_its_prompt_in_their_order(wide_chat):
    words = [f"{word}{letter}" for word in WORDS for letter in "abc"]
    made = list(itertools.islice(examples.copy_examples(3, words, wide_chat), 20))
    tokenizer = wide_chat.tokenizer
    for example in made:
        split = int(example.loss_mask.argmax())
        assert example.loss_mask[split:].all()
        offered = re.findall(r'"(\w+)"', tokenizer.decode(example.tokens[:split].tolist()))
        listed = json.loads(tokenizer.decode(example.tokens[split:].tolist()))
        assert 3 <= len(listed) <= len(offered) <= 8
        assert listed == [word for word in offered if word in listed]
        assert set(offered) <= set(words)
    assert len({example.tokens.tobytes() for example in made}) == 20
