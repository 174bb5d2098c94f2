"""Model text is obeyed only outside thinking, and the last complete candidate counts."""

import pytest

from spade_jax.roles import parsing


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("go \\boxed{north}", "north"),
        ("\\boxed{a} then \\boxed{b}", "b"),
        ("\\boxed{ padded }", "padded"),
        ("\\boxed{f(x) = {1, {2}}}", "f(x) = {1, {2}}"),
        ("\\boxed{kept} \\boxed{never closed", "kept"),
        ("\\boxed{outer \\boxed{inner}}", "inner"),
        ("<think>\\boxed{draft}</think>\\boxed{final}", "final"),
        ("\\boxed{before}<think>\\boxed{draft}</think>", "before"),
        ("<think>\\boxed{draft}", None),
        ("thought \\boxed{draft}</think> \\boxed{x}", "x"),
        ("\\boxed{}", ""),
        ("no box", None),
        ("\\boxed{open", None),
        ("", None),
    ],
)
def test_action_is_the_last_complete_box_outside_thinking(completion, expected):
    assert parsing.action(completion) == expected


FENCE = "```python\n{}\n```"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (FENCE.format("x = 1"), "x = 1\n"),
        (
            "draft\n" + FENCE.format("x = 1") + "\nbetter\n" + FENCE.format("x = 2") + "\n",
            "x = 2\n",
        ),
        ("<think>" + FENCE.format("x = 1") + "</think>\n" + FENCE.format("x = 2"), "x = 2\n"),
        ("<think>\n" + FENCE.format("x = 1"), None),
        (FENCE.format("x = 1") + "\n```python\nx = 2", "x = 1\n"),
        ("```\nx = 1\n```", None),
        ("x = 1", None),
        ("```python\n\n```", None),
    ],
)
def test_program_is_the_last_complete_python_fence(completion, expected):
    assert parsing.program(completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("Try the middle.", "Try the middle."),
        ("<think>secret</think> Try the middle.", "Try the middle."),
        ('```json\n{"hint": "Try the middle."}\n```', "Try the middle."),
        ('{"hint": "Try the middle."}', "Try the middle."),
        ('{"hint": 3}', '{"hint": 3}'),
        ("{not json", "{not json"),
        ("  ", None),
        ("<think>only thought", None),
    ],
)
def test_hint_is_unwrapped(completion, expected):
    assert parsing.hint(completion) == expected
