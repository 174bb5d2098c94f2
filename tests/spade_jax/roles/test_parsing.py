"""Model text is obeyed only outside thinking, and the last complete candidate counts."""

import subprocess
import sys

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


@pytest.mark.parametrize(
    ("line", "repaired"),
    [
        ("x = f'say {go north} now'", "x = f'say {{go north}} now'"),
        ("x = f'say {} now'", "x = f'say {{}} now'"),
        ("x = f'{y} of {your move} in {y:>{4}}'", "x = f'{y} of {{your move}} in {y:>{4}}'"),
        ("x = f'{y!r} {1 2} {y:.2f}'", "x = f'{y!r} {{1 2}} {y:.2f}'"),
        ("x = {'a': f'the {old man} says'}", "x = {'a': f'the {{old man}} says'}"),
        ("x = f'{{kept}} {go north}'", "x = f'{{kept}} {{go north}}'"),
        ('x = f"""one\n{two three}\n{y}"""', 'x = f"""one\n{{two three}}\n{y}"""'),
        (
            "x = (f'{a b}'\n     f'{y}'\n     f'{c d}')",
            "x = (f'{{a b}}'\n     f'{y}'\n     f'{{c d}}')",
        ),
    ],
)
def test_braces_that_are_no_code_are_doubled(line, repaired):
    source = f"y = 1\n{line}\n"
    assert parsing.repair_braces(source) == f"y = 1\n{repaired}\n"
    compile(parsing.repair_braces(source), "program", "exec")
    assert parsing.program(f"```python\n{source}```") == f"y = 1\n{repaired}\n"


@pytest.mark.parametrize(
    "source",
    [
        "x = f'fine {y} {{z}}'\n",
        "def f(:\n    return f'say {go north}'\n",  # wrong in another way as well
        "x = f'lone { brace'\n",
        "x = 1 +\n",
        "x = f'{a b}'\n" * 21,  # more lines than are repaired
        "x = '" + "{a b}" * 20_000 + "\n",  # longer than a program may be
        "",
        "\0",
        "(" * 10_000,
    ],
)
def test_what_braces_do_not_mend_stays_as_it_was(source):
    assert parsing.repair_braces(source) == source


def test_twenty_lines_are_repaired():
    source = "x = f'{a b}'\n" * 20
    assert parsing.repair_braces(source) == "x = f'{{a b}}'\n" * 20


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("```python\nx = 1\n```\n```hint\nTry the middle.\n```", "Try the middle."),
        ("```hint\nold\n```\n```hint\nnew\n```", "new"),
        ("<think>```hint\ndraft\n```</think>none", None),
        ("```hint\n\n```", None),
        ("```hint\nnever closed", None),
        ("HINT: in the open", None),
    ],
)
def test_a_written_hint_is_the_last_complete_hint_fence(completion, expected):
    assert parsing.written_hint(completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("All fine. \\boxed{yes}", True),
        ("\\boxed{No.}", False),
        ("\\boxed{yes} but then again \\boxed{no}", False),
        ("<think>\\boxed{yes}</think>", None),
        ("yes", None),
        ("\\boxed{maybe}", None),
        ("", None),
    ],
)
def test_a_verdict_is_yes_no_or_none(completion, expected):
    assert parsing.verdict(completion) is expected


READ = """
import sys
from spade_jax.roles import parsing

name, text = sys.argv[1:]
print(getattr(parsing, name)(text.encode().decode("unicode_escape") * 2**20))
"""


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("program", "```python\\n"),
        ("written_hint", "```hint\\n"),
        ("action", "\\\\boxed{"),
        ("action", "}{ "),
        ("verdict", "\\\\boxed{yes {"),
    ],
)
def test_a_million_openings_are_read_in_one_go(name: str, opening: str):
    """In a process of its own: what looks to the end from each of them takes hours."""
    run = subprocess.run(
        [sys.executable, "-c", READ, name, opening], capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "None\n", run.stderr


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("```python\n```python\nx = 1\n```\n", "```python\nx = 1\n"),  # opens once
        ("```python\nx = 1\n```text\ny\n```", "x = 1\n```text\ny\n"),  # so no other one closes it
        ("```python \t\nx = 1\n``` ", "x = 1\n"),
        ("```python x\nx = 1\n```", None),
        ("a ```python\nx = 1\n```", None),
        ("```python\nx = 1\n````", None),
        ("```python\nx = 1\n```\n```", "x = 1\n"),
    ],
)
def test_a_fence_is_a_line_of_its_own(completion, expected):
    assert parsing.program(completion) == expected
