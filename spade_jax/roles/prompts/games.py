"""The long prompts for games: grounded in a document, of many turns without one, and of a single
answer.

What is the same in every prompt of a kind comes first, so that the sampler computes it once; the
document, the memory and the skill come last.
"""

from spade_jax.roles.prompts import contract
from spade_jax.roles.prompts.material import Material, Prompt, Size, game_size
from spade_jax.roles.prompts.worked_games import CAULDRON, ROUNDS, WORKSHOP
from spade_jax.roles.skills import CATALOGUE

CORPUS_PERSONA = """You write games for the training of language models. You turn an idea of a \
text into a small world that has to be worked in, as a correct Python program. You think about how \
a lazy player would cheat, and close that way."""

CORPUS_TASK = """Write a game of many turns out of a document. Take one concept, method or \
mechanism of the document, and make a world in which the player cannot win without carrying it \
out: run the procedure step by step, operate the system, find the cause. The player never sees the \
document, so the game stands on its own, explains its words, and does not speak of a document.

WHAT THE GAME MUST BE
- Each turn the player gives one command, which acts on the world: it is not an answer that gets a \
mark.
- A command changes the state, and the observation tells what changed and what can be seen now.
- Part of the state is hidden and shows only by acting. What has been seen is needed later.
- No single command reaches the goal. Steps build on each other, and a wrong one costs.
- The reward of a step tells how much of the goal is reached, from 0.0 to below 1.0; 1.0 comes at \
the goal alone, and only the goal or a loss terminates.
- Each observation ends with a reminder of the commands and their form.

WHAT IS REFUSED
- A question that is marked right or wrong, however it is dressed up.
- A first observation that states the whole problem, so that nothing is left to be found.
- The same task shown again and again while nothing changes."""

MULTI_TURN_PERSONA = """You design games of many turns for the training of language models. Your \
games have a state that evolves, choices that matter and an end that was earned, and they are \
correct Python programs."""

MULTI_TURN_TASK = """Write a game of many turns. Good ones let the player explore an unknown \
place, trade for what is missing, survive on short supplies, investigate what happened, defend \
what is threatened, or craft something out of parts.

WHAT THE GAME MUST BE
- The state evolves: what was done before decides what can be done now and what it brings.
- In most turns at least two actions are sensible and lead to different places.
- Wrong choices cost: time, supplies, a chance that does not come back. Who plays at random loses \
nearly always.
- There is an explicit way to win and, where it fits, one to lose.
- Something is hidden at first and is found out by acting.
- The best play takes between a half and three quarters of the turns.
- The reward is 1.0 at the win and 0.0 everywhere else.
- Each observation shows the state that the player may know and how actions are written.

GAMES THAT FAIL
- Guess and try again: the player names values until one is right.
- A counter that goes up with every action, or a goal that any row of actions reaches.
- One sensible action in each turn, so that nothing is decided.
- A game that is over after three turns.
- A sum or a riddle inside a story: take the story away and a single question is left.
- A program that waits for input() instead of taking the action as an argument."""

SINGLE_PERSONA = """You set puzzles for the training of language models: each has one answer that \
follows from what is shown, and can be checked by a program."""

SINGLE_TASK = """Write a puzzle with a single answer. An episode is one puzzle, at which the \
player may try a few times.

WHAT THE PUZZLE MUST BE
- All that is needed to answer stands in the observation; the answer does not.
- The answer is computed from the puzzle by the program, never typed into it, and there is one.
- It takes at least {least} steps of thought, each of which needs the one before.
- A guess at random is right in less than 1% of the cases: the answer is a large number, a long \
word, an order of several things.
- What a wrong answer gets back is specific, such as an intermediate value to check against, but \
does not reveal the answer or let it be closed in on by trying.
- The task is repeated in every turn, with the number of attempts left.
- The answer may be told only when the attempts are used up, in the last observation."""


def corpus(material: Material, hint_words: int) -> Prompt:
    """A game that is grounded in a document."""
    size = game_size(material.difficulty, material.max_turns)
    grounding = contract.document(
        material.document, "Use one concept, method or mechanism of it; leave its wording alone."
    )
    return Prompt(
        contract.join(
            CORPUS_TASK,
            contract.GAME_CONTRACT,
            contract.GAME_TRIAL,
            contract.ROBUST,
            contract.example(WORKSHOP),
            contract.memory(material.memory),
            grounding,
            _order(material, size),
            contract.closing(material.asks_hint, hint_words),
        ),
        CORPUS_PERSONA,
    )


def multi_turn(material: Material, hint_words: int) -> Prompt:
    """A game of many turns without a document."""
    size = game_size(material.difficulty, material.max_turns)
    return Prompt(
        contract.join(
            MULTI_TURN_TASK,
            contract.GAME_CONTRACT,
            contract.GAME_TRIAL,
            contract.ROBUST,
            contract.example(CAULDRON),
            contract.memory(material.memory),
            _order(material, size),
            contract.closing(material.asks_hint, hint_words),
        ),
        MULTI_TURN_PERSONA,
    )


def single_answer(material: Material, hint_words: int) -> Prompt:
    """A puzzle with one answer and a few attempts."""
    size = game_size(material.difficulty, material.max_turns)
    skill = CATALOGUE[material.skill]
    attempts = min(4, material.max_turns)
    order = (
        f"YOUR ORDER\nSkill: {material.skill} ({skill.category}). {skill.description}\n"
        f"Harder means: {skill.complexity}.\n{_ideas(material)}"
        f"Difficulty: {material.difficulty}. The answer takes at least {size.least_steps + 1} and "
        f"at most {size.most_steps + 1} steps of thought, from at least {size.hidden} values that "
        f"the seed draws. The player has {attempts} attempts (MAX_TURNS = {attempts}), and "
        "solution() is a list of one action, the answer."
    )
    return Prompt(
        contract.join(
            SINGLE_TASK.format(least=size.least_steps + 1),
            contract.GAME_CONTRACT,
            contract.GAME_TRIAL,
            contract.ROBUST,
            contract.example(ROUNDS),
            contract.memory(material.memory),
            order,
            contract.closing(material.asks_hint, hint_words),
        ),
        SINGLE_PERSONA,
    )


def _order(material: Material, size: Size) -> str:
    """What this one game shall be."""
    skill = CATALOGUE[material.skill]
    return (
        f"YOUR ORDER\nSkill: {material.skill} ({skill.category}). {skill.description}\n"
        f"Harder means: {skill.complexity}.\n{_ideas(material)}"
        f"Difficulty: {material.difficulty}. The program's own limit is {size.turns} turns "
        f"(MAX_TURNS = {size.turns}). The shortest way to win takes at least {size.least_steps} "
        f"actions, and solution() has at most {size.most_steps}. An instance has at least "
        f"{size.hidden} hidden values that the seed draws."
    )


def _ideas(material: Material) -> str:
    if not material.ideas:
        return ""
    return f"Ideas, to be inspired by and not to be taken over: {'; '.join(material.ideas)}.\n"
