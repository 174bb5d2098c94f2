"""The catalogue of skills, what a prompt says of each, and which of them a cycle works on
(reference sections 1.1, 4.2 and 4.3).

The names are `roles_config`'s, which refuses others. All wording is ours.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Skill:
    """What an environment of this skill trains."""

    category: str
    summary: str  # one line, for the compact prompt
    description: str
    complexity: str  # what makes an environment of this skill harder
    examples: tuple[str, str, str, str]  # ideas, of which a prompt shows some


GAMES: Mapping[str, Skill] = {
    "Mathematical Reasoning": Skill(
        "quantities",
        "reach a quantity by arithmetic the player must work out",
        "The player has to set up a calculation and carry it through: rates, remainders, ratios, "
        "counting, equations. Estimating or trying numbers must not be enough.",
        "longer chains of dependent results, several unknowns, operations that interact",
        (
            "vats that are filled, emptied and mixed until one holds an exact share",
            "a lock whose wheels turn one another by given ratios",
            "a ledger with one wrong entry that only the sums give away",
            "a route whose tolls follow a recurrence that must be worked out ahead",
        ),
    ),
    "Logical Deduction": Skill(
        "inference",
        "narrow hidden facts down from consistent answers",
        "A hidden arrangement obeys constraints. The player gathers facts, rules cases out and "
        "acts once only one case is left.",
        "more facts to combine, indirect facts, actions that are safe only after a deduction",
        (
            "guests to be seated by what each will not bear beside them",
            "switches and lamps whose wiring follows from a few tests",
            "witnesses of whom a known number lies",
            "a safe whose digits obey rules that are told one at a time",
        ),
    ),
    "Spatial Reasoning": Skill(
        "space",
        "move through positions whose layout matters",
        "Positions, directions, shapes and what blocks what. The player has to keep a map in mind "
        "and foresee where a move leads.",
        "larger layouts, parts that are seen only from near by, moves that change the layout",
        (
            "crates to be pushed through a store in which nothing can be pulled",
            "a beam to be led by mirrors that turn by a quarter",
            "tiles to be rotated until pipes join",
            "a cave whose rooms are mapped from what is heard behind each wall",
        ),
    ),
    "Pattern Recognition": Skill(
        "induction",
        "find the rule behind what is shown and continue it",
        "A rule drawn from many stands behind what is seen. The player finds it from cases and "
        "then uses it on new ones.",
        "rules made of two parts, cases that several simpler rules explain, a rule that shifts",
        (
            "a gate that opens to words of a hidden kind, shown by words it took",
            "signals whose next one follows from two before it",
            "a machine that rewrites strings, to be fed for a wanted result",
            "a grid whose rows and columns each change by a rule of their own",
        ),
    ),
    "Optimization": Skill(
        "resources",
        "spend a limited budget where it gains most",
        "A budget of turns, goods or money does not allow everything. The player weighs gains "
        "against costs and finds a plan that is good enough to reach the mark.",
        "gains that depend on one another, prices that move, a mark close to the best plan",
        (
            "ovens and orders, where an early small order may block a late large one",
            "a knapsack whose things are worth more in pairs",
            "a fleet to be sent out so that each crossing pays for the next",
            "fields that must rest, planted over a known row of seasons",
        ),
    ),
    "Causal Inference": Skill(
        "experiments",
        "learn by trying which cause brings which effect",
        "Hidden causes bring visible effects. The player changes one thing at a time, tells cause "
        "from coincidence, and then brings a wanted effect about.",
        "effects with delay, common causes, interventions that cost or spoil the next test",
        (
            "a greenhouse with valves that act on each other's beds",
            "a stalled engine with several faults that show the same sign",
            "a pond in which one kind feeds on another",
            "a panel whose levers work only in the right state of others",
        ),
    ),
    "Strategic Planning": Skill(
        "plans",
        "choose early moves by what they allow later",
        "Moves open and close later ones. The player plans several turns ahead, keeps reserves "
        "and adapts when something unforeseen comes.",
        "longer plans, an opponent with a rule that can be learnt, moves that cannot be undone",
        (
            "a caravan that lays down supplies for its way back",
            "a siege in which walls are raised where the next attack is due",
            "a chain of trades in which nobody takes money",
            "a signal tower that can light one of three beacons a night",
        ),
    ),
    "Memory Recall": Skill(
        "memory",
        "keep what was shown once and use it later",
        "Facts are shown once, at different times, and are needed later in another order or "
        "combined. What is needed is not shown again.",
        "more facts, longer gaps, facts that are replaced on the way",
        (
            "a courier who hears each address once",
            "cards turned up one at a time, then asked for by where they lie",
            "a house whose keys change hands while the player looks on",
            "a choir in which each singer repeats what another sang some turns ago",
        ),
    ),
    "Language Understanding": Skill(
        "language",
        "act on what words mean in their context",
        "Instructions, riddles or records have to be read with care: references, negations, "
        "exceptions, words with two senses. The right action follows from the meaning.",
        "longer texts, nested conditions, statements that correct earlier ones",
        (
            "orders to a kitchen that refer back to what others ordered",
            "a will whose clauses overrule one another",
            "a glossary of an invented tongue, needed to answer at a gate",
            "letters out of order, in which 'he' and 'she' change who is meant",
        ),
    ),
}
"""Skills of games: the paper's six and three more."""

TOOLS: Mapping[str, Skill] = {
    "API Orchestration": Skill(
        "composition",
        "join several tools so that one's result is another's argument",
        "What one tool returns is needed to call the next: numbers, keys and states are carried "
        "from call to call.",
        "longer chains, results that must be combined, more than one order of calls",
        (
            "look up a customer, their plan and its price before changing the plan",
            "find a free slot for two people and book a room for it",
            "translate a part number through two catalogues before ordering",
            "collect three quotes and accept the cheapest that delivers in time",
        ),
    ),
    "Data Retrieval": Skill(
        "reading",
        "find the records that matter and report on them",
        "The data are too many to show at once. The player searches, filters, pages and reads "
        "details to answer exactly.",
        "more records, pages, filters that must be combined, near misses in the data",
        (
            "the oldest unpaid invoice of the largest customer",
            "which flights with one stop arrive before a meeting",
            "the total of a category over two accounts",
            "the only device whose firmware is behind its group",
        ),
    ),
    "State Modification": Skill(
        "writing",
        "bring records into a wanted state and change nothing else",
        "The player changes records so that a stated condition holds, which takes several changes "
        "that depend on one another.",
        "changes that enable others, changes that must be avoided, conditions over many records",
        (
            "move a booking and release what it held",
            "set all lamps of the upper floor to the level of the hall",
            "close every ticket that repeats another, after linking it",
            "take what is out of stock from a cart and put substitutes in",
        ),
    ),
    "Error Recovery": Skill(
        "recovery",
        "read why a call was refused and find another way",
        "Some calls are refused for reasons that the reply tells: a lock, a limit, a missing "
        "step. The player reads the reason and clears it.",
        "refusals with two causes, fixes that cause others, retries that are limited",
        (
            "a transfer above the daily limit that must be split",
            "a file that is locked by a job which can be stopped",
            "a coupon that is refused until another is taken off",
            "a sensor that answers only after it was calibrated",
        ),
    ),
    "Tool Selection": Skill(
        "choice",
        "choose the right tool among ones that look alike",
        "Several tools seem to fit. Their descriptions and parameters tell which one does what "
        "was asked and which does harm.",
        "more look-alike tools, tools that do only half, tools whose side effects spoil the task",
        (
            "cancel, pause or let a subscription run out",
            "archive, delete or move a folder",
            "estimate, reserve or charge a payment",
            "reply to one, to all, or forward",
        ),
    ),
    "Multi-Step Workflows": Skill(
        "procedure",
        "carry out a procedure whose steps depend on what was found",
        "A procedure with branches: which step comes next depends on what earlier steps found.",
        "more branches, steps that wait for others, results needed again much later",
        (
            "take a return in: check it, refund or replace, restock",
            "open a project: people, tasks, their order, the first due date",
            "admit a patient: room, records, allergies, diet",
            "prepare a trip: visa, flight, a hotel near the venue",
        ),
    ),
}
"""Skills of tool tasks."""

CATALOGUE: Mapping[str, Skill] = {**GAMES, **TOOLS}


def ideas(skill: str, count: int, rng: random.Random) -> tuple[str, ...]:
    """`count` of the skill's examples, drawn without repetition."""
    examples = CATALOGUE[skill].examples
    return tuple(rng.sample(examples, min(count, len(examples))))


def active(skills: Sequence[str], skills_per_cycle: int, cycle: int) -> tuple[str, ...]:
    """Window of `skills_per_cycle` consecutive skills starting at (cycle * skills_per_cycle) mod K,
    wrapping.
    """
    count = min(skills_per_cycle, len(skills))
    start = cycle * count % len(skills)
    return tuple(skills[(start + offset) % len(skills)] for offset in range(count))
