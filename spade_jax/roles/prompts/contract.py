"""What every long designer prompt says of the contract, of admission, and of how to answer.

It tells all that admission demands (`envs.admit`, `envs.api`), so that a program is refused for
what it does and not for what nobody told its author.
"""

from collections.abc import Sequence

from spade_jax.envs.admit import UNHELPFUL
from spade_jax.envs.api import MAX_SOLUTION_ACTIONS
from spade_jax.envs.limits import ALLOWED_IMPORTS

PLAYER_IMPORTS = ", ".join(
    name for name in ALLOWED_IMPORTS if name not in ("__future__", "tool_task")
)

GAME_CONTRACT = f"""THE PROGRAM
- It is one Python file with one class whose name ends in Env, made without arguments, with the \
methods reset, step and solution in its body.
- reset(self, seed) draws a whole new instance from rng = random.Random(seed), sets every field \
that step or solution reads, and returns (observation, {{}}), a non-empty str and a dict. The same \
seed always gives the same instance; another seed gives another one. Nothing may depend on the \
global generator (random.random, random.choice and so on), on the clock, on hash() or id(), or on \
the order of a set: sort a set before you loop over it.
- step(self, action) takes any str and returns on every path five values (observation, reward, \
terminated, truncated, {{}}): a non-empty str, a float from 0.0 to 1.0, two bools, a dict. The \
player writes \\boxed{{ACTION}}; step gets ACTION alone, without the box.
- Reward 1.0 together with terminated True means won, and is given at the goal only. A lost game \
returns 0.0 and terminated True.
- Count the turns. When they are used up without a win, return truncated True and terminated False.
- solution(self) returns the list of str that wins: the actions, without a box, that a perfect \
player who knows everything hidden would say one after another right after reset(seed). It works \
the list out from the fields that reset drew, changes nothing, and has at most \
{MAX_SOLUTION_ACTIONS} actions. It must win on every seed.
- Allowed imports: {PLAYER_IMPORTS}. Nothing else, and no file, network, clock, thread, input() or \
print()."""

GAME_TRIAL = f"""HOW IT IS TRIED before anybody plays it
- On some twenty-five seeds the actions of solution() are played on a fresh instance of the same \
seed. All must win. What wins on one seed must lose on most others, so the instances must differ \
in what is to be done, not in names only.
- Everything is repeated in another process and must go the same way.
- Senseless actions such as {", ".join(map(repr, UNHELPFUL[:7]))}, text of several lines and a \
word of 5000 letters are played on. None may raise, hang or win; each is answered with how an \
action looks and costs a turn.
- Players who do not think must lose on nine seeds of ten: one who does nothing, one who repeats a \
single action, one who says every word and number that stands in your program, one who repeats \
what won on another seed, one who draws words at random from what is on display. Let a wrong \
action cost something: turns that are short, supplies, or the game.
- Nothing is decided by chance: what wins follows from what is shown, and another choice in its \
place does not win in one game and lose in the next.
- The first observation must not hold the winning actions in a row, and no answer to a senseless \
action may tell them.
- What is shown after good actions must differ from what is shown after senseless ones, and must \
depend on the instance.
- Loading, reset and solution take less than 2 seconds, a step less than 1. Every loop ends."""

ROBUST = """COMMON MISTAKES
- Braces that shall be seen in an f-string are doubled: f"{{{x}}}". Better build such text with +.
- A field is used before reset has set it, or a name is misspelt in one branch.
- A branch of step returns four values or none, or a reward that is an int, a bool or above 1.
- The action is parsed without a check: int(action) on a word, words[1] of one word, a name that \
is in no dictionary, a division by zero, random.sample of more than there are.
- A field is called solution, step or reset and hides the method.
- solution returns a description and not actions, or actions in another spelling than step takes, \
or more of them than there are turns.
- A list that solution or step returns from is changed by step."""


def fence(program: str) -> str:
    """A program as a block of a prompt."""
    return f"```python\n{program.strip()}\n```"


def example(program: str) -> str:
    """The worked example, which is to be learnt from and not to be copied."""
    return (
        "A COMPLETE EXAMPLE of a program that passes. It shows the form only: a program with its "
        f"story or its mechanism is refused as a copy.\n{fence(program)}"
    )


def document(text: str, task: str) -> str:
    """The grounding text between marks, and what it is for; nothing without one."""
    if not text:
        return ""
    return f"THE DOCUMENT, between the marks. {task}\n<<<<<\n{text}\n>>>>>"


def memory(records: Sequence[str]) -> str:
    """What earlier environments were like; nothing without any."""
    if not records:
        return ""
    lines = "\n".join(f"- {record}" for record in records)
    return (
        "EARLIER ENVIRONMENTS of this skill. Write one that differs from all of them in story, in "
        "mechanism and in what has to be understood. Those with a high regret taught most; keep "
        f"away from what was too easy or too hard.\n{lines}"
    )


HINT_REQUEST = """After the program write a second block that opens with ```hint and ends with \
```: one to three sentences, at most {max_words} words, for a player who is stuck on any instance. \
Say how the game works and how to find what is hidden; do not give winning actions or values."""


def closing(asks_hint: bool, hint_words: int) -> str:
    """How to answer."""
    text = (
        "Before you write, go through two different rows of actions on the instance of seed 0 in "
        "your mind: what each shows, that a clumsy one loses, that solution() wins. Then answer "
        "with the whole program in a single block that opens with ```python and ends with ```."
    )
    return f"{text} {HINT_REQUEST.format(max_words=hint_words)}" if asks_hint else text


def join(*sections: str) -> str:
    """The sections that are there, with a blank line between them."""
    return "\n\n".join(section for section in sections if section)
