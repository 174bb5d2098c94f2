"""Every prompt carries what it must, and the arms differ by the hint alone."""

import hashlib
import inspect
import re
from dataclasses import replace
from typing import get_args

import pytest

from spade_jax.envs.admit import UNHELPFUL
from spade_jax.envs.limits import ALLOWED_IMPORTS
from spade_jax.envs.tool_schema import schema_problem
from spade_jax.envs.tool_task import ToolTask
from spade_jax.roles import prompts, skills
from spade_jax.roles.prompts import agent, compact, tools
from spade_jax.roles.prompts.material import SIZES, TOOL_SIZES, game_size
from spade_jax.roles_config import (
    COMPACT_PROMPTS,
    SKILLS,
    TOOL_PROMPTS,
    UNGROUNDED_PROMPTS,
    DesignPrompt,
    Difficulty,
)
from spade_jax.types import Gate

LONG = sorted(prompts.WORKED)
GAMES = [kind for kind in LONG if kind not in TOOL_PROMPTS]


def material(kind="corpus", **changes):
    tool = kind in TOOL_PROMPTS
    fields = {
        "kind": kind,
        "skill": "Error Recovery" if tool else "Optimization",
        "difficulty": "medium",
        "max_turns": 25,
        "document": "numpy.kron\nKronecker {product}",
        "memory": ("AEnv of x was too easy",),
        "ideas": ("an idea of its own",),
        "domain": tools.DOMAINS[4] if tool else "",
    }
    return prompts.Material(**(fields | changes))


def text_of(kind, **changes):
    return prompts.designer(material(kind, **changes), 80).text


# ---------------------------------------------------------------- compact


def test_compact_texts_are_those_that_the_shipped_weights_were_taught():
    """Digests of the texts at the time of the training; a change asks for another training."""
    texts = (compact.DESIGNER, compact.HINT, agent.AGENT)
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    assert digests == ["605a6da8991fb82c", "630a92400ca06f4d", "de2430d7f8c409f3"]
    summaries = "\n".join(f"{name}: {skills.GAMES[name].summary}" for name in SKILLS)
    assert hashlib.sha256(summaries.encode()).hexdigest()[:16] == "34235e485efd9925"


def test_the_compact_prompt_carries_skill_difficulty_document_and_memory():
    text = text_of("compact", difficulty="hard", terms=("kron",))
    for part in (
        "Optimization",
        skills.GAMES["Optimization"].summary,
        "Difficulty: hard",
        "Kronecker {product}",
        "AEnv of x",
        'Terms: "kron"',
    ):
        assert part in text
    assert prompts.designer(material("compact"), 80).persona is None
    assert "Memory: none" in compact.designer("Optimization", "easy", "text", [], [])


def test_arms_differ_by_the_hint_line_alone():
    plain = prompts.first_observation("Room 1: {key}", None)
    hinted = prompts.first_observation("Room 1: {key}", "the key is near")
    assert hinted == plain + "\nHINT: the key is near"
    assert "\\boxed{}" in plain


# ---------------------------------------------------------------- the long prompts


def test_every_prompt_of_the_settings_has_a_wording():
    assert COMPACT_PROMPTS | set(prompts.WORKED) == set(get_args(DesignPrompt))


@pytest.mark.parametrize("kind", LONG)
def test_a_long_prompt_tells_what_was_drawn_and_how_to_answer(kind):
    prompt = prompts.designer(material(kind), 80)
    skill = skills.CATALOGUE[material(kind).skill]
    parts = [
        skill.category,
        skill.description,
        skill.complexity,
        "Difficulty: medium",
        "AEnv of x was too easy",
        prompts.WORKED[kind].strip(),
        "refused as a copy",
        "opens with ```python",
        "solution",
        "seed",
        "twenty-five seeds",
    ]
    parts += [] if kind in UNGROUNDED_PROMPTS else ["<<<<<\nnumpy.kron\nKronecker {product}\n>>>>>"]
    parts += [] if kind == "corpus" else ["an idea of its own"]
    for part in parts:
        assert part in prompt.text, part
    for module in ALLOWED_IMPORTS:
        assert module in prompt.text or module in ("__future__", "tool_task")
    assert prompt.persona and "\n" not in prompt.persona
    assert "{" not in re.sub(r"```python.*?```", "", prompt.text, flags=re.DOTALL).replace(
        'f"{{{x}}}"', ""
    ).replace("\\boxed{ACTION}", "").replace("{product}", "").replace(", {})", "").replace(
        ", {}", ""
    ).replace('{"type": "object", "properties": {...}', "")


def test_personas_are_each_of_their_own_kind():
    personas = {kind: prompts.designer(material(kind), 80).persona for kind in LONG}
    assert len({personas[kind] for kind in GAMES}) == 3
    assert personas["tools"] == personas["tools_single"] not in [personas[k] for k in GAMES]


@pytest.mark.parametrize("kind", LONG)
def test_what_is_not_there_has_no_heading(kind):
    bare = text_of(kind, document="", memory=(), ideas=())
    assert "EARLIER ENVIRONMENTS" in text_of(kind) and "EARLIER ENVIRONMENTS" not in bare
    assert "<<<<<" not in bare and "inspired" not in bare
    assert "\n\n\n" not in bare.replace(prompts.WORKED[kind].strip(), "")


@pytest.mark.parametrize("kind", LONG)
def test_designs_of_one_kind_share_the_beginning_of_their_prompt(kind):
    """The sampler computes a shared beginning once."""
    one = text_of(kind)
    other = text_of(
        kind, difficulty="hard", document="another", memory=(), ideas=("x",), max_turns=9
    )
    shared = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    if kind != "single_answer":  # the steps of thought stand among its rules
        assert shared > 0.7 * len(one)


@pytest.mark.parametrize("kind", ["compact", *LONG])
def test_the_difficulty_word_changes_every_prompt(kind):
    texts = [text_of(kind, difficulty=word) for word in get_args(Difficulty)]
    blanked = {re.sub(r"\b(easy|medium|hard)\b", "", text) for text in texts}
    assert len(set(texts)) == 3
    if kind != "compact":  # which says the word alone
        assert len(blanked) == 3


@pytest.mark.parametrize("kind", ["corpus", "multi_turn"])
def test_a_harder_game_has_more_steps_turns_and_hidden_values(kind):
    found = []
    for word in get_args(Difficulty):
        text = text_of(kind, difficulty=word)
        turns, least, most, hidden = (
            int(re.search(pattern, text)[1])
            for pattern in (
                r"MAX_TURNS = (\d+)\)",
                r"win takes at least (\d+)",
                r"solution\(\) has at most (\d+)\.",
                r"at least (\d+) hidden values",
            )
        )
        assert least <= most < turns
        found.append((turns, least, most, hidden))
    assert found == [tuple(sorted(column)) for column in found] or found == sorted(found)
    for column in zip(*found, strict=True):
        assert list(column) == sorted(set(column))


@pytest.mark.parametrize("kind", ["tools", "tools_single"])
def test_a_harder_tool_task_has_more_tools_records_and_turns(kind):
    texts = [text_of(kind, difficulty=word) for word in get_args(Difficulty)]
    for pattern in (r"(\d+) to \d+ tools", r"(\d+) to \d+ records", r"MAX_TURNS = (\d+), and"):
        numbers = [int(re.search(pattern, text)[1]) for text in texts]
        assert numbers == sorted(set(numbers)), pattern
    assert ["in pages or parts" in text for text in texts] == [False, False, True]


def test_sizes_fit_the_turns_of_a_player():
    for word in get_args(Difficulty):
        for max_turns in (1, 2, 5, 12, 25):
            size = game_size(word, max_turns)
            assert 1 <= size.least_steps <= size.most_steps <= size.turns <= max_turns
    assert game_size("hard", 25) == replace(SIZES["hard"])
    assert "MAX_TURNS = 12)" in text_of("corpus", difficulty="hard", max_turns=12)
    assert "MAX_TURNS = 10, and solution() has at most 8 turns" in text_of("tools", max_turns=10)
    assert max(size.calls[1] for size in TOOL_SIZES.values()) <= ToolTask.MAX_CALLS


@pytest.mark.parametrize("kind", GAMES)
def test_a_game_prompt_tells_the_contract_and_how_it_is_tried(kind):
    text = text_of(kind)
    for part in (
        "random.Random(seed)",
        "(observation, reward, terminated, truncated, {})",
        "ends in Env",
        "made without arguments",
        "0.0 to 1.0",
        "truncated True and terminated False",
        "without the box",
        "2 seconds",
        "5000 letters",
        "Braces that shall be seen in an f-string are doubled",
    ):
        assert part in text, part
    for action in UNHELPFUL[:7]:
        assert repr(action) in text


def test_each_kind_of_game_has_the_rules_of_its_kind():
    grounded, free, single = (text_of(kind) for kind in ("corpus", "multi_turn", "single_answer"))
    assert "No single command reaches the goal" in grounded
    assert "does not speak of a document" in grounded
    assert "1.0 at the win and 0.0 everywhere else" in free and "input()" in free
    assert "a half and three quarters of the turns" in free
    assert "less than 1%" in single and "repeated in every turn" in single
    assert "one action, the answer" in single


@pytest.mark.parametrize("kind", ["tools", "tools_single"])
def test_a_tool_prompt_tells_all_of_the_base_class(kind):
    text = text_of(kind)
    public = [name for name in vars(ToolTask) if not name.startswith("_")]
    told = {"TOOLS", "MAX_TURNS", "prepare", "ask", "called", "call", "answer", "reset", "step"}
    assert {name for name in public if name != "MAX_CALLS"} == told
    for name in told - {"reset", "step"}:
        assert re.search(rf"\b{name}\b", text), name
    for name in inspect.signature(ToolTask.ask).parameters:
        assert name in text or name == "self"
    listed = re.search(r"Keywords of a schema: ([\w, ]+)\.", text)
    assert listed is not None
    examples = {"type": "array", "enum": ["a"], "items": {}, "properties": {}, "required": []}
    for keyword in listed[1].split(", "):
        assert schema_problem({keyword: examples.get(keyword, 1)}, "x") == "", keyword


def test_variants_and_domains_of_a_progressive_task():
    assert len(set(tools.DOMAINS)) == 10
    assert [odds for _, odds in tools.VARIANTS] == [3, 2, 1, 1]
    assert dict(tools.VARIANTS).keys() == tools.VARIANT_TEXT.keys()
    texts = {text_of("tools", variant=variant) for variant in tools.VARIANT_TEXT}
    assert len(texts) == 4
    assert tools.DOMAINS[4] in text_of("tools")
    assert "by declining" in text_of("tools", variant="decline")


@pytest.mark.parametrize("kind", ["compact", *LONG])
def test_a_hint_in_the_same_completion_is_asked_for_where_the_settings_say_so(kind):
    plain, asked = text_of(kind), text_of(kind, asks_hint=True)
    assert "```hint" not in plain
    assert "opens with ```hint" in asked and "at most 80 words" in asked


# ---------------------------------------------------------------- what is said later


def test_a_refusal_names_the_test_what_it_asks_and_what_was_found():
    text = prompts.refusal("solution", "seed 3: \n the actions  do not win", False)
    assert '"solution"' in text and "win on every seed" in text
    assert "seed 3: the actions do not win" in text and "```python" in text
    assert "```hint" in prompts.refusal("hint_leak", "told", True)
    long = prompts.refusal("load", "x" * 5000, False)
    assert len(long) < 1200 and "x..." in long
    for gate in set(Gate) - {Gate.INFRASTRUCTURE}:
        assert prompts.refusal(gate, "why", False)


def test_hint_requests_by_setting_and_scope():
    program = "class AEnv:\n    '''{braces}'''\n"
    assert prompts.hint("compact", program, None, 80) == prompts.Prompt(compact.hint(program))
    game = prompts.hint("corpus", program, None, 80)
    tool = prompts.hint("tools", program, None, 80)
    assert game.persona == tool.persona and game.text != tool.text
    for prompt in (game, tool):
        assert program.strip() in prompt.text and "80 words" in prompt.text
        assert "true for every instance" in prompt.text
    assert "No values" in tool.text and "placeholder" in tool.text
    for kind in ("compact", "corpus", "tools"):
        seed = prompts.hint(kind, program, "You see {a} door.", 80).text
        assert seed.count("<<<<<\nYou see {a} door.\n>>>>>") == 1
        assert "true for every instance" not in seed
    assert '"hint_leak"' in prompts.hint_refusal("hint_leak", "it told")


def test_the_judge_is_asked_for_a_verdict_in_a_box():
    game, tool = prompts.judge("corpus", "class AEnv: x = {}"), prompts.judge("tools", "p")
    assert "class AEnv: x = {}" in game.text and "\\boxed{yes}" in game.text
    assert "Difficulty is no reason" in game.text
    assert "of a game" in game.text and "calling tools" in tool.text
