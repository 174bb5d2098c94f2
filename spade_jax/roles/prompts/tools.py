"""The long prompts for tool tasks: a row of messages that build on each other, and a single task.

The base class is the worker's own (`envs.tool_task`); what a program must define, and what the base
does for it, is told here in full.
"""

from spade_jax.envs.tool_task import MAX_REPLY_CHARS
from spade_jax.roles.prompts import contract
from spade_jax.roles.prompts.material import TOOL_SIZES, Material, Prompt, Variant
from spade_jax.roles.prompts.worked_tools import LOAN_DESK, SEED_BANK
from spade_jax.roles.skills import CATALOGUE

DOMAINS = (
    "orders, returns and stock of a retailer",
    "flights, hotels and cars of a travel office",
    "lines, plans and faults of a phone company",
    "accounts, cards and transfers of a bank",
    "a calendar with people, rooms and invitations",
    "files and folders with owners and rights",
    "a shopping cart with vouchers and deliveries",
    "support tickets with queues and priorities",
    "lamps, heaters and sensors of a house",
    "tasks, people and milestones of a project",
)

VARIANTS: tuple[tuple[Variant, int], ...] = (
    ("happy", 3),
    ("conditional", 2),
    ("discovery", 1),
    ("decline", 1),
)
"""The variants of a progressive task and their odds."""

VARIANT_TEXT: dict[Variant, str] = {
    "happy": "Every message can be met directly with the right tools in the right order.",
    "conditional": "One message asks for a change that holds for what the player must read first: "
    "which records fit a condition, and only these shall be changed.",
    "discovery": "One message leaves a value out that a tool needs. It stands in the data, where "
    "the player has to look it up with another tool.",
    "decline": "One message asks for what cannot be done: the data or a rule forbid it. There is a "
    "tool that declines a request with a reason out of an enum, and this message is met by "
    "declining with the right reason and by nothing else.",
}

PERSONA = """You build practice systems for assistants that work through tools: small worlds of \
records with tools that read and change them, and users who want something done. You write them as \
correct Python programs."""

PROGRESSIVE_TASK = """Write a tool task: a system with tools, and a user who sends one message \
after another. The player sees the tools and the first message. Each message asks for one thing, \
and the next one comes when it is done. Later messages build on what earlier ones changed or found.

WHAT THE TASK MUST BE
- Messages are natural language, as a customer or a colleague would write; they never name a tool \
or a parameter.
- Each message has one criterion, and the criterion tests exactly what the message asks for.
- Each tool does one thing, always the same way. Its parameters have types, and at least one \
parameter is required and has an enum.
- Some tools are not needed: they look fitting and are not.
- What a tool refuses, it refuses with a reason that helps."""

SINGLE_TASK = """Write a tool task: a system with tools, and a user with a single request. The \
player sees the tools and the request, has to find the records, change them in several steps that \
depend on each other, and answers with a value.

WHAT THE TASK MUST BE
- There are tools that read and tools that change; the data are too many to be guessed.
- At least three changes depend on each other: a later one needs what an earlier one made.
- The answer is computed from the data after the changes. It is text or a number, exact, and \
different on nearly every seed; a player who skips a change gets another one.
- The request is natural language and names no tool."""

BASE = f"""THE PROGRAM
It begins with `from tool_task import ToolError, ToolTask` and has one class whose name ends in \
Env and whose base is ToolTask. ToolTask has reset, step and everything that reads calls and shows \
replies; do not write these, and write no __init__. You write:
- TOOLS, a list with a dict for each tool: "name", an identifier; "description"; "parameters", \
{{"type": "object", "properties": {{...}}, "required": [...]}}. Keywords of a schema: type, enum, \
minimum, maximum, minLength, maxLength, items, minItems, maxItems, properties, required, \
description. No others.
- MAX_TURNS, the turns of a player. One turn may hold several calls.
- prepare(self, rng): draws the instance from rng, a random.Random of the seed; sets every field; \
and calls self.ask for each message in order. The same seed always gives the same instance, so \
use rng and nothing else: no global generator, no clock, no hash(), no order of a set.
- self.ask(message, until=FUNCTION): met when FUNCTION(), without arguments, is True; it must \
return True or False exactly, so write `== x`, `in`, `bool(...)`.
- self.ask(message, answer=VALUE): met when the player answers with exactly this text or number; a \
wrong answer loses the task. The message must say what is to be answered.
- tool_NAME(self, ...) for every tool, with parameters named as in its schema, a default for each \
that is not required. Arguments have been checked against the schema. It returns what JSON can \
hold (dict, list, str, number, bool, None), or raises ToolError("reason") to refuse. Any other \
exception is a mistake of your program and fails the task. Replies above {MAX_REPLY_CHARS} \
characters are cut.
- self.called("NAME", argument=value): whether a call of that tool with these arguments has \
succeeded; for messages that ask to look at something.
- solution(self): the list of str that wins after the reset. Make each with self.call("NAME", \
argument=value) or, for a message with an answer, self.answer(value). Calls joined by + make one \
turn. It works them out from the fields that prepare drew and changes nothing.
Allowed imports: tool_task, {contract.PLAYER_IMPORTS}. No file, network, clock, thread, input() or \
print()."""

SOLVABLE = """IT MUST BE SOLVABLE, AND ONLY BY WORK
- When prepare has run, no criterion is met yet: a field that a tool changes starts in another \
state, and a message that only asks to look tests self.called(...).
- For every criterion there is a tool that can make it true, with arguments that the player can \
derive from messages and replies: every number, key and name in solution() is shown by some tool \
or message first.
- Types agree: a number in the data is compared with a number, a key keeps its spelling.
- No criterion can be spoilt for good by a call that an earlier message asks for.
- An instruction and its criterion say the same: "the cheapest" is unique, "all" means all. Draw \
values that differ, so that there is one right choice.
- Records have keys that the seed draws, such as K4821, so that no call can be guessed. The first \
message does not hold the keys that win.
- On some twenty-five seeds solution() must win, with different actions; what wins on one seed \
must lose on most others. Calls without sense, in any number, must not win.
- Trace solution() on one instance before you answer: after each turn, which message is met?"""


def progressive(material: Material, hint_words: int) -> Prompt:
    """A row of messages in one domain, with one special message by the variant."""
    size = TOOL_SIZES[material.difficulty]
    skill = CATALOGUE[material.skill]
    turns = min(size.turns, material.max_turns)
    flavour = contract.document(
        material.document,
        "It may lend the system its names and details; the domain of the order stays.",
    )
    order = (
        f"YOUR ORDER\nDomain: {material.domain}.\n"
        f"Skill: {material.skill} ({skill.category}). {skill.description} Harder means: "
        f"{skill.complexity}.\n{_ideas(material)}"
        f"Special: {VARIANT_TEXT[material.variant]}\n"
        f"Difficulty: {material.difficulty}. {_range(size.messages)} messages, "
        f"{_range(size.tools)} tools of which {size.distractors} not needed, {_range(size.calls)} "
        f"calls for each message, {_range(size.records)} records. MAX_TURNS = {turns}, and "
        f"solution() has at most {turns - 2} turns.{_partial(size.partial)}"
    )
    return _prompt(PROGRESSIVE_TASK, LOAN_DESK, material, hint_words, flavour, order)


def single(material: Material, hint_words: int) -> Prompt:
    """One request, several changes, one answer."""
    size = TOOL_SIZES[material.difficulty]
    skill = CATALOGUE[material.skill]
    turns = min(size.turns, material.max_turns)
    order = (
        f"YOUR ORDER\nSkill: {material.skill} ({skill.category}). {skill.description} Harder "
        f"means: {skill.complexity}.\n{_ideas(material)}"
        f"Difficulty: {material.difficulty}. One message with answer=; at least {size.changes} "
        f"changes that depend on each other, {_range(size.tools)} tools, {_range(size.records)} "
        f"records. MAX_TURNS = {turns}, and solution() has at most {turns - 2} turns."
        f"{_partial(size.partial)}"
    )
    flavour = contract.document(material.document, "It may lend the system its names and details.")
    return _prompt(SINGLE_TASK, SEED_BANK, material, hint_words, flavour, order)


def _prompt(
    task: str, example: str, material: Material, hint_words: int, flavour: str, order: str
) -> Prompt:
    return Prompt(
        contract.join(
            task,
            BASE,
            SOLVABLE,
            contract.example(example),
            contract.memory(material.memory),
            flavour,
            order,
            contract.closing(material.asks_hint, hint_words),
        ),
        PERSONA,
    )


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]} to {bounds[1]}"


def _partial(partial: bool) -> str:
    return " No single reply shows all that is needed: data come in pages or parts." * partial


def _ideas(material: Material) -> str:
    if not material.ideas:
        return ""
    return f"Tasks of this skill, to be inspired by: {'; '.join(material.ideas)}.\n"
