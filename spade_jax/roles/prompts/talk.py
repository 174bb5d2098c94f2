"""What is said after a design: that it was refused, and the requests for a hint and a verdict."""

from spade_jax.roles.prompts import compact
from spade_jax.roles.prompts.contract import fence
from spade_jax.roles.prompts.material import Prompt
from spade_jax.roles_config import COMPACT_PROMPTS, TOOL_PROMPTS, DesignPrompt
from spade_jax.types import Gate

MAX_REASON_CHARS = 500  # of a refusal: it may quote the program

REFUSED = """The program was refused at the test "{gate}", which asks that {meaning}.
What was found: {reason}
Mend this and whatever else you notice, and answer with the whole program again in a single block \
that opens with ```python and ends with ```."""

MEANINGS: dict[str, str] = {
    Gate.FENCE: "the answer holds a complete block ```python ... ```",
    Gate.PARSE: "the block is correct Python with a class whose name ends in Env and its methods",
    Gate.IMPORTS: "only allowed modules are used",
    Gate.DUPLICATE: "the program is not an earlier one again",
    Gate.LOAD: "the file runs when it is loaded",
    Gate.CRITERIA: "no message of the task is met, or fails to be tested, before anything was done",
    Gate.CONTRACT: "reset and step neither raise nor hang, whatever the action is",
    Gate.SCHEMA: "reset, step and solution return what the contract says",
    Gate.DETERMINISM: "the same seed and actions give the same replies in any process",
    Gate.VARIETY: "seeds give instances that are won in different ways",
    Gate.SOLUTION: "the actions of solution() win on every seed",
    Gate.OUTCOMES: "plays can be lost",
    Gate.FEEDBACK: "observations depend on what was done and on the instance",
    Gate.LEAK: "no observation gives the winning actions away",
    Gate.NO_OP: "doing nothing does not win",
    Gate.CONSTANT: "saying one thing again and again, or the program's own words, does not win",
    Gate.RANDOM: "saying words of the observations at random does not win",
    Gate.JUDGE: "a careful reader finds that every goal can be reached",
    Gate.HINT: "there is a hint of a bearable length without code",
    Gate.HINT_LEAK: "the hint holds neither the winning actions nor a word of them that the player "
    "cannot come to see",
    Gate.HINT_COPY: "saying the words of the hint does not win",
}
"""What each test asks for; a refusal by our own side is not told."""

HINT_ALSO = " After it comes the block that opens with ```hint, as before."


def refusal(gate: str, reason: str, asks_hint: bool) -> str:
    """The message after a design that `gate` refused."""
    shown = " ".join(reason.split())
    if len(shown) > MAX_REASON_CHARS:
        shown = f"{shown[: MAX_REASON_CHARS - 3]}..."
    text = REFUSED.format(gate=gate, meaning=MEANINGS[gate], reason=shown)
    return text + HINT_ALSO * asks_hint


HINT_PERSONA = """You help players of text games who are stuck, with short hints that make them \
think in the right direction."""

GAME_HINT = """Below is the program of a game. The player sees the observations and never the \
program. Write a hint for the player in one to three sentences, with at most {max_words} words.
- Say how the game works where the observations do not, how what is hidden can be found out, and \
what an action looks like, in words that the observations show as well.
- {scope}
- Do not give the winning actions or the values that are to be found: whoever only repeats words \
of the hint must lose.
- Plain text: no code, no box, no list.
{program}{observation}
Answer with the hint alone."""

TOOL_HINT = """Below is the program of a task that is worked on by calling tools. The player sees \
the tools, the messages and the replies, and never the program. Write a plan for the player in one \
to three sentences, with at most {max_words} words.
- Say what kinds of tools to use in which order: what to look up first, what to check before a \
change, what to change, when to decline or to answer.
- Tell the player to discover arguments with tools that read, and to answer only at the end.
- {scope}
- No values: where one would stand, write a placeholder such as "the order's number". No key, \
name, amount or answer of an instance.
- Plain text: no code, no calls, no list.
{program}{observation}
Answer with the plan alone."""

ANY_INSTANCE = "It must be true for every instance: the seed draws what is hidden anew."
THIS_INSTANCE = "It is for the instance that begins as shown below, and may speak of what it shows."
BEGINS = "\nThe instance begins like this:\n<<<<<\n{observation}\n>>>>>"

HINT_REFUSED = """This hint was refused at the test "{gate}", which asks that {meaning}. What was \
found: {reason}
Write another one that helps as much and passes. Answer with the hint alone."""


def hint(kind: DesignPrompt, program: str, observation: str | None, max_words: int) -> Prompt:
    """The request for a hint to `program`; with a first observation, for that instance alone."""
    if kind in COMPACT_PROMPTS:
        text = compact.hint(program)
        return Prompt(text + (BEGINS.format(observation=observation) if observation else ""))
    wording = TOOL_HINT if kind in TOOL_PROMPTS else GAME_HINT
    text = wording.format(
        max_words=max_words,
        scope=THIS_INSTANCE if observation else ANY_INSTANCE,
        program=fence(program),
        observation=BEGINS.format(observation=observation) if observation else "",
    )
    return Prompt(text, HINT_PERSONA)


def hint_refusal(gate: str, reason: str) -> str:
    """The message after a hint that was refused."""
    shown = " ".join(reason.split())[:MAX_REASON_CHARS]
    return HINT_REFUSED.format(gate=gate, meaning=MEANINGS[gate], reason=shown)


JUDGE_PERSONA = """You review practice environments for language models. You look for goals that \
cannot be reached, and for nothing else."""

JUDGE = """Below is the program of {what}. Find out whether a player who sees the observations \
alone, and works perfectly, can reach every goal.
- Go through the goals one by one. For each, name the action that reaches it and say how the \
player learns what this action needs.
- Say no only if a goal cannot be reached, if goals contradict each other, if a type can never \
match, if what is needed always fails, or if it can be derived from nothing that the player sees; \
and also if most goals are reached before anything was done.
- Difficulty is no reason to say no, nor is chance that the player can find out about.
{program}
Reason briefly, then give your verdict as \\boxed{{yes}} if every goal can be reached and \
\\boxed{{no}} if not."""


def judge(kind: DesignPrompt, program: str) -> Prompt:
    """The request for a verdict on whether `program` can be won."""
    what = "a task that is worked on by calling tools" if kind in TOOL_PROMPTS else "a game"
    return Prompt(JUDGE.format(what=what, program=fence(program)), JUDGE_PERSONA)
