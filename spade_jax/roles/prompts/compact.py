"""The compact wording, for policies of any size; the shipped weights were taught these very texts.

Documents, observations, programs and memory are untrusted text: they are placed as plain text and
can never become control tokens (`rollout.chat` encodes them without special pieces).
"""

from collections.abc import Sequence

from spade_jax.roles.prompts.material import Material, Prompt
from spade_jax.roles.skills import CATALOGUE, TOOLS

DESIGNER = """Write a game as one Python class whose name ends in Env.
reset(seed) returns (text, dict). \
step(action) returns (text, reward, terminated, truncated, dict).
solution() returns the list of actions that win after reset. \
Draw the instance from random.Random(seed).
Reward 1 and terminated only on a win. \
Many turns, hidden state, no winning by luck. Use terms of the document.
Skill: {skill}, {description}
Difficulty: {difficulty}
Memory: {memory}
Document: {document}
{terms}"""

TOOLS_DESIGNER = """Write a tool task as one Python class on ToolTask whose name ends in Env.
TOOLS lists the tools. tool_NAME makes a call, or refuses it by ToolError.
prepare(rng) draws the instance and asks messages, each met by until or by answer.
solution() returns the list of actions that win after reset.
Several calls, values that only tools tell, no winning by luck. Use terms of the document.
Skill: {skill}, {description}
Difficulty: {difficulty}
Memory: {memory}
Document: {document}
{terms}"""

TERMS = "Terms: "

HINT = """Write a hint for the player of this game: \
how to win, in at most two sentences, without the winning actions.
```python
{program}
```"""


def design(material: Material) -> Prompt:
    """Prompt for one design."""
    return Prompt(
        designer(
            material.skill,
            material.difficulty,
            material.document,
            material.terms,
            material.memory,
        )
    )


def designer(
    skill: str, difficulty: str, document: str, terms: Sequence[str], memory: Sequence[str]
) -> str:
    """Prompt for one design, of a game or a tool task as the skill says. `document` is the excerpt
    to ground it in, `memory` the rendered records (may be empty).
    """
    text = TOOLS_DESIGNER if skill in TOOLS else DESIGNER
    return text.format(
        skill=skill,
        description=CATALOGUE[skill].summary,
        difficulty=difficulty,
        memory="; ".join(memory) if memory else "none",
        document=document,
        terms=terms_line(terms),
    )


def terms_line(terms: Sequence[str]) -> str:
    """Last line of the designer prompt: the words a design should be built on."""
    return TERMS + (quoted(terms) if terms else "none")


def quoted(terms: Sequence[str]) -> str:
    """Words as a program lists them."""
    return ", ".join(f'"{term}"' for term in terms)


def hint(program: str) -> str:
    """Prompt for a hint to `program`."""
    return HINT.format(program=program)
