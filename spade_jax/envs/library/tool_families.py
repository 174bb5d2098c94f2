"""Six families of tool tasks, one for each skill of tool use, with an expert that plays them.

In each, numbers are found by asking a tool, and one rule is the same in every instance of a
program: what frees a lock, which book is kept, who pays. The hint tells the rule. Unhinted it is
found by trying, for which the turns do not always last.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from string import Template

from spade_jax.envs.library.base import Draw, Family, by_difficulty, pick_terms
from spade_jax.envs.tool_task import ToolTask

TASK = Template("""from tool_task import ToolError, ToolTask, tool

class $name(ToolTask):
    ITEMS = $items
    MAX_TURNS = $turns
    TOOLS = [
$tools    ]

    def prepare(self, rng):
        self.code = {item: rng.randint(100, 999) for item in self.ITEMS}
$prepare
$methods    def solution(self):
        actions = []
        for item in self.goals:
$solve        return actions
""")

GOALS = """        self.goals = rng.sample(self.ITEMS, {count})
        for item in self.goals:
            self.ask({ask})
"""
ONE_GOAL = """        item = rng.choice(self.ITEMS)
        self.goals = [item]
        self.ask({ask})
"""
UNKNOWN = (
    '            raise ToolError("unknown")\n',
    '            raise ToolError("nothing found")\n',
)


@dataclass(frozen=True)
class Stage:
    """One call of an expert: the tool, and where each argument comes from.

    "goal" is the item that is asked for, "last" the last number a tool gave, "rule" the value that
    is the same in every instance, which may also be the name of the tool.
    """

    tool: str
    arguments: tuple[tuple[str, str], ...]

    @property
    def guesses(self) -> bool:
        """Whether the call needs the rule."""
        return self.tool == "rule" or "rule" in dict(self.arguments).values()


@dataclass(frozen=True)
class Plan:
    """What an expert knows of a program: the calls for each message, in turn, and the rule."""

    messages: tuple[tuple[Stage, ...], ...]
    rule: str
    choices: tuple[str, ...]


class ToolPlayer:
    """Makes the calls of each message; unhinted it tries the choices until one is right."""

    def __init__(self, plan: Plan, hinted: bool, rng: random.Random) -> None:
        self.plan = plan
        self.guesses = [plan.rule] if hinted else rng.sample(plan.choices, len(plan.choices))
        self.goal, self.message, self.stage, self.number = "", -1, 0, 0

    def act(self, observation: str) -> tuple[str, str]:
        replies = re.findall(r"<tool_response>(.*?)</tool_response>", observation)
        reply = json.loads(replies[-1]) if replies else {}
        if "error" in reply and self._stages()[self.stage].guesses and len(self.guesses) > 1:
            self.guesses.pop(0)
        elif "result" in reply:
            self.stage += 1
            if isinstance(reply["result"], int):
                self.number = reply["result"]
        if asked := re.search(r"User: .*?(\w+)[.?]\s*$", observation):
            self.goal, self.stage = asked[1], 0
            self.message += 1
        if self.stage == len(self._stages()):
            return f"It is {self.number}.", ToolTask.answer(self.number)
        stage = self._stages()[self.stage]
        values = {"goal": self.goal, "last": self.number, "rule": self.guesses[0]}
        chosen = {name: values[source] for name, source in stage.arguments}
        tool = self.guesses[0] if stage.tool == "rule" else stage.tool
        thought = f"{self.guesses[0]} it is." if stage.guesses else f"First {tool} {self.goal}."
        return thought, ToolTask.call(tool, **chosen)

    def _stages(self) -> tuple[Stage, ...]:
        return self.plan.messages[self.message % len(self.plan.messages)]


def _stage(tool: str, **sources: str) -> Stage:
    return Stage(tool, tuple(sources.items()))


LOOK = _stage("look", item="goal")
CHOICES = {
    "locks": ("oil", "heat", "ice", "soap"),
    "books": ("red", "blue", "green", "grey"),
    "orders": ("cash", "card", "loan", "gift"),
    "shelves": ("north", "south", "east", "west"),
    "picks": ("wash", "press", "brush", "dry"),
    "moves": ("attic", "cellar", "barn", "porch"),
}


def _tool(name: str, text: str, **types: str) -> str:
    given = "".join(f', {key}="{kind}"' for key, kind in types.items())
    return f'        tool("{name}", "{text}"{given}),\n'


def _method(name: str, arguments: str, *checks: tuple[str, str], body: str) -> str:
    guards = "".join(f"        if {test}:\n{error}" for test, error in checks)
    return f"    def tool_{name}(self, {arguments}):\n{guards}{body}\n"


def _error(text: str) -> str:
    return f'            raise ToolError("{text}")\n'


@dataclass(frozen=True)
class Sketch:
    """What the families fill in: texts of the tools, methods and messages, and the expert's way."""

    class_name: str
    skill: str
    tools: tuple[str, ...]
    state: str  # lines of prepare
    ask: str  # the arguments of ask for `item`
    methods: tuple[str, ...]
    solve: tuple[str, ...]  # the actions that win one goal
    messages: tuple[tuple[Stage, ...], ...]
    turns: int  # that one goal needs of a player who knows the rule
    hint: str
    more: str = ""  # a second message about the item


def _draw(name: str, rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Draw a program of family `name`: items, rule, order of the tools and wording differ."""
    count = by_difficulty(difficulty, 1, 1, 2)
    items = pick_terms(rng, terms, 4 if len(set(terms)) > 3 and rng.random() < 0.5 else 3)
    choices = tuple(rng.sample(CHOICES[name], 3))
    rule = rng.choice(choices)
    unknown = ("item not in self.code", rng.choice(UNKNOWN))
    look = _method("look", "item", unknown, body="        return self.code[item]\n")
    sketch = SKETCHES[name](rng, rule, choices, look)
    loop = count > 1 or rng.random() < 0.5
    goals = GOALS if loop else ONE_GOAL
    prepare = sketch.state + goals.format(count=count, ask=sketch.ask)
    if sketch.more:
        prepare += f"{' ' * (12 if loop else 8)}self.ask({sketch.more})\n"
    solve = "".join(f"            actions.append({action})\n" for action in sketch.solve)
    if rng.random() < 0.5:
        solve = f"            actions += [{', '.join(sketch.solve)}]\n"
    slack = by_difficulty(difficulty, 1, 1, 0)
    program = TASK.substitute(
        name=sketch.class_name,
        items=json.dumps(items),
        turns=sketch.turns * count + slack,
        tools="".join(rng.sample(sketch.tools, len(sketch.tools))),
        prepare=prepare,
        methods="".join(rng.sample(sketch.methods, len(sketch.methods))),
        solve=solve,
    )
    plan = Plan(sketch.messages, rule, choices)
    return Draw(name, sketch.skill, program, sketch.hint, partial(ToolPlayer, plan))


def _locks(rng: random.Random, rule: str, choices: Sequence[str], look: str) -> Sketch:
    stuck = rng.choice(("item not in self.free", "not item in self.free"))
    return Sketch(
        "LockEnv",
        "Error Recovery",
        (
            _tool("look", "Read the code of an item.", item="string"),
            _tool("loosen", "Free an item that is stuck.", item="string", using="string"),
            _tool("open", "Open a free item by its code.", item="string", code="integer"),
        ),
        "        self.free, self.opened = set(), set()\n",
        'f"Please open {item}.", until=lambda item=item: item in self.opened',
        (
            look,
            _method(
                "loosen", "item, using", (f'using != "{rule}"', _error("it stays stuck")),
                body='        self.free.add(item)\n        return "it is free"\n',
            ),
            _method(
                "open", "item, code",
                (stuck, _error(f"stuck; loosen it using {', '.join(choices)}")),
                ("code != self.code.get(item)", _error("wrong code")),
                body='        self.opened.add(item)\n        return "it is open"\n',
            ),
        ),
        (
            f'self.call("loosen", item=item, using="{rule}")',
            'self.call("open", item=item, code=self.code[item])',
        ),
        ((LOOK, _stage("loosen", item="goal", using="rule"),
          _stage("open", item="goal", code="last")),),
        3,
        f"What is stuck comes free by {rule} alone; look up the code before you open it.",
    )  # fmt: skip


def _books(rng: random.Random, rule: str, choices: Sequence[str], look: str) -> Sketch:
    pages = rng.choice(("self.page[number]", "self.page.get(number, 0)"))
    return Sketch(
        "BookEnv",
        "Data Retrieval",
        (
            _tool("look", "Find the number of an item.", item="string"),
            _tool("read", f"Read a number in a book: {', '.join(choices)}.", book="string",
                  number="integer"),
        ),
        "        self.page = {code: rng.randint(1000, 9999) for code in self.code.values()}\n",
        'f"What is written of {item}?", answer=self.page[self.code[item]]',
        (
            look,
            _method(
                "read", "book, number",
                (f'book != "{rule}" or number not in self.page', _error("the page is empty")),
                body=f"        return {pages}\n",
            ),
        ),
        ("self.answer(self.page[self.code[item]])",),
        ((LOOK, _stage("read", book="rule", number="last")),),
        3,
        f"Only the {rule} book has anything in it; it is kept by the numbers of the items.",
    )  # fmt: skip


def _orders(rng: random.Random, rule: str, choices: Sequence[str], look: str) -> Sketch:
    paid = rng.choice(("self.paid.add(ticket)", "self.paid |= {ticket}"))
    return Sketch(
        "OrderEnv",
        "API Orchestration",
        (
            _tool("look", "Book an item and get its ticket.", item="string"),
            _tool("pay", f"Pay a ticket by {', '.join(choices)}.", ticket="integer", by="string"),
            _tool("send", "Send the item of a paid ticket.", ticket="integer"),
        ),
        "        self.paid, self.sent = set(), set()\n",
        'f"Please send {item}.", until=lambda item=item: self.code[item] in self.sent',
        (
            look,
            _method(
                "pay", "ticket, by",
                ("ticket not in self.code.values()", _error("there is no such ticket")),
                (f'by != "{rule}"', _error("not accepted")),
                body=f'        {paid}\n        return "it is paid"\n',
            ),
            _method(
                "send", "ticket", ("ticket not in self.paid", _error("it is not paid")),
                body='        self.sent.add(ticket)\n        return "it is sent"\n',
            ),
        ),
        (
            f'self.call("pay", ticket=self.code[item], by="{rule}")',
            'self.call("send", ticket=self.code[item])',
        ),
        ((LOOK, _stage("pay", ticket="last", by="rule"), _stage("send", ticket="last")),),
        3,
        f"Book it, pay the ticket by {rule}, which is all they accept, and send it then.",
    )  # fmt: skip


def _shelves(rng: random.Random, rule: str, choices: Sequence[str], look: str) -> Sketch:
    kept = rng.choice(("self.kept.get(item)", "self.kept[item]"))
    state = "        self.kept = {}\n"
    if kept == "self.kept[item]":
        state = "        self.kept = dict.fromkeys(self.ITEMS, 0)\n"
    return Sketch(
        "ShelfEnv",
        "State Modification",
        (
            _tool("look", "Count an item.", item="string"),
            _tool("store", f"Note a count on a shelf: {', '.join(choices)}.", item="string",
                  shelf="string", count="integer"),
        ),
        state,
        f'f"Please note the count of {{item}}.", until=lambda item=item: {kept} == self.code[item]',
        (
            look,
            _method(
                "store", "item, shelf, count",
                (f'shelf != "{rule}"', _error("that shelf is full")),
                body='        self.kept[item] = count\n        return "noted"\n',
            ),
        ),
        (f'self.call("store", item=item, shelf="{rule}", count=self.code[item])',),
        ((LOOK, _stage("store", item="goal", shelf="rule", count="last")),),
        2,
        f"Count it first; of the shelves only the one in the {rule} has room for a note.",
    )  # fmt: skip


def _picks(rng: random.Random, rule: str, choices: Sequence[str], look: str) -> Sketch:
    wrong = rng.choice(("it does nothing", "nothing changes"))
    right = _method(
        rule, "item, code", ("self.code.get(item) != code", _error("wrong code")),
        body='        self.clean.add(item)\n        return "it is clean"\n',
    )  # fmt: skip
    others = [
        f'    def tool_{each}(self, item, code):\n        raise ToolError("{wrong}")\n\n'
        for each in choices if each != rule
    ]  # fmt: skip
    return Sketch(
        "CleanEnv",
        "Tool Selection",
        (
            _tool("look", "Read the code of an item.", item="string"),
            *(_tool(each, "Clean an item by its code.", item="string", code="integer")
              for each in choices),
        ),
        "        self.clean = set()\n",
        'f"Please clean {item}.", until=lambda item=item: item in self.clean',
        (look, right, *others),
        (f'self.call("{rule}", item=item, code=self.code[item])',),
        ((LOOK, _stage("rule", item="goal", code="last")),),
        2,
        f"Look up the code, and clean by {rule}; the other tools do nothing to these.",
    )  # fmt: skip


def _moves(rng: random.Random, rule: str, choices: Sequence[str], look: str) -> Sketch:
    gone = rng.choice(("item not in self.there", "not item in self.there"))
    return Sketch(
        "MoveEnv",
        "Multi-Step Workflows",
        (
            _tool("look", "Read the code of an item.", item="string"),
            _tool("move", f"Move an item to {', '.join(choices)}.", item="string", code="integer",
                  place="string"),
            _tool("weigh", "Weigh an item that was moved.", item="string"),
        ),
        "        self.weight = {item: rng.randint(1000, 9999) for item in self.ITEMS}\n"
        "        self.there = set()\n",
        'f"Please move {item}.", until=lambda item=item: item in self.there',
        (
            look,
            _method(
                "move", "item, code, place",
                ("self.code.get(item) != code", _error("wrong code")),
                (f'place != "{rule}"', _error("that place is shut")),
                body='        self.there.add(item)\n        return "it is there"\n',
            ),
            _method(
                "weigh", "item", (gone, _error("it is not moved")),
                body="        return self.weight[item]\n",
            ),
        ),
        (
            f'self.call("move", item=item, code=self.code[item], place="{rule}")',
            "self.answer(self.weight[item])",
        ),
        (
            (LOOK, _stage("move", item="goal", code="last", place="rule")),
            (_stage("weigh", item="goal"),),
        ),
        4,
        f"Everything goes to the {rule}, the others are shut; weigh it when it is there.",
        'f"What is the weight of {item}?", answer=self.weight[item]',
    )  # fmt: skip


SKETCHES = {
    "locks": _locks,
    "books": _books,
    "orders": _orders,
    "shelves": _shelves,
    "picks": _picks,
    "moves": _moves,
}

TOOL_FAMILIES: tuple[Family, ...] = tuple(
    Family(name, skill, class_name, partial(_draw, name))
    for name, skill, class_name in (
        ("locks", "Error Recovery", "LockEnv"),
        ("books", "Data Retrieval", "BookEnv"),
        ("orders", "API Orchestration", "OrderEnv"),
        ("shelves", "State Modification", "ShelfEnv"),
        ("picks", "Tool Selection", "CleanEnv"),
        ("moves", "Multi-Step Workflows", "MoveEnv"),
    )
)
"""One family a skill; class names are distinct from those of the games."""
