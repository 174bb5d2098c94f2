"""Complete tool tasks that the long prompts show, one for each. See `worked_games`."""

LOAN_DESK = """import random

from tool_task import ToolError, ToolTask

KINDS = ["sextant", "astrolabe", "chronometer", "theodolite"]
VISITORS = ["Imre", "Jun", "Kofi", "Lena", "Milo", "Nadia", "Odd", "Pia"]


def tool(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters}


KIND = {"type": "string", "enum": KINDS}
ITEM = {"type": "string", "description": "number of an item, such as T120"}
VISITOR = {"type": "string", "description": "name of a visitor"}


class LoanDeskEnv(ToolTask):
    MAX_TURNS = 16
    TOOLS = [
        tool("list_items", "Numbers of all items of a kind.", kind=KIND),
        tool("show_item", "Weight, state and holder of an item.", item=ITEM),
        tool("list_loans", "Numbers of the items a visitor holds.", visitor=VISITOR),
        tool("lend", "Lend a free item to a visitor.", item=ITEM, visitor=VISITOR),
        tool("take_back", "Take an item back from whoever holds it.", item=ITEM),
        tool("order_repair", "Send a free item to the workshop.", item=ITEM),
    ]

    def prepare(self, rng):
        numbers = rng.sample(range(100, 1000), 12)
        weights = rng.sample(range(400, 3000), 12)  # all different: the lightest is one item
        self.items = {}
        for index, number in enumerate(numbers):
            self.items[f"T{number}"] = {
                "kind": KINDS[index % 4], "grams": weights[index], "holder": None, "broken": False,
            }
        self.visitor, self.other = rng.sample(VISITORS, 2)
        self.kind, kind = rng.sample(KINDS, 2)
        self.wanted = min(self.of(self.kind), key=self.grams)
        self.late = rng.sample(self.of(kind), 2)  # the other visitor holds these
        for number in self.late:
            self.items[number]["holder"] = self.other
        self.worn = rng.choice(self.late)
        self.items[self.worn]["broken"] = True
        self.ask(
            f"{self.visitor} is travelling far and asks for the lightest {self.kind} we have.",
            until=lambda: self.items[self.wanted]["holder"] == self.visitor,
        )
        self.ask(
            f"{self.other} has come in to return everything.",
            until=lambda: all(item["holder"] != self.other for item in self.items.values()),
        )
        self.ask(
            f"One of the things from {self.other} came back broken. Have it mended.",
            until=lambda: self.items[self.worn]["holder"] == "workshop",
        )
        self.ask(
            "For the books: how many grams do the items weigh together that are lent out now? "
            "What is at the workshop does not count.",
            answer=self.grams(self.wanted),
        )

    def of(self, kind):
        return [number for number, item in self.items.items() if item["kind"] == kind]

    def grams(self, number):
        return self.items[number]["grams"]

    def find(self, item):
        if item not in self.items:
            raise ToolError(f"there is no item {item}")
        return self.items[item]

    def tool_list_items(self, kind):
        return self.of(kind)

    def tool_show_item(self, item):
        return dict(self.find(item))

    def tool_list_loans(self, visitor):
        return [number for number, item in self.items.items() if item["holder"] == visitor]

    def tool_lend(self, item, visitor):
        if visitor not in VISITORS:
            raise ToolError(f"no visitor is called {visitor}")
        if self.find(item)["holder"]:
            raise ToolError(f"{item} is not free")
        self.items[item]["holder"] = visitor
        return {"lent": item, "to": visitor}

    def tool_take_back(self, item):
        self.find(item)["holder"] = None
        return {"free": item}

    def tool_order_repair(self, item):
        if self.find(item)["holder"]:
            raise ToolError(f"{item} is not free")
        if not self.items[item]["broken"]:
            raise ToolError(f"{item} needs no repair")
        self.items[item]["holder"] = "workshop"
        return {"at_workshop": item}

    def solution(self):
        return [
            self.call("lend", item=self.wanted, visitor=self.visitor),
            "".join(self.call("take_back", item=number) for number in self.late),
            self.call("order_repair", item=self.worn),
            self.answer(self.grams(self.wanted)),
        ]
"""

SEED_BANK = """import random

from tool_task import ToolError, ToolTask

PLANTS = ["barley", "flax", "lentil", "millet", "oat", "rye", "sorghum", "spelt"]


class SeedBankEnv(ToolTask):
    MAX_TURNS = 18
    TOOLS = [
        {
            "name": "list_jars",
            "description": "Numbers of the jars of a plant, five a page; pages begin at 1.",
            "parameters": {
                "type": "object",
                "properties": {
                    "plant": {"type": "string"},
                    "page": {"type": "integer", "minimum": 1},
                },
                "required": ["plant"],
            },
        },
        {
            "name": "show_jar",
            "description": "Plant, year and seeds of a jar.",
            "parameters": {
                "type": "object", "properties": {"jar": {"type": "string"}}, "required": ["jar"],
            },
        },
        {
            "name": "pour",
            "description": "Pour all seeds of one jar into another of the same plant.",
            "parameters": {
                "type": "object",
                "properties": {"source": {"type": "string"}, "target": {"type": "string"}},
                "required": ["source", "target"],
            },
        },
        {
            "name": "seal",
            "description": "Seal a jar for good; gives its seal number.",
            "parameters": {
                "type": "object", "properties": {"jar": {"type": "string"}}, "required": ["jar"],
            },
        },
    ]

    def prepare(self, rng):
        plants = rng.sample(PLANTS, 4)
        self.jars = {}
        for number in rng.sample(range(100, 1000), 24):
            plant = plants[len(self.jars) % 4]
            years = [jar["year"] for jar in self.jars.values() if jar["plant"] == plant]
            year = rng.choice([y for y in range(1950, 2020) if y not in years])
            self.jars[f"J{number}"] = {"plant": plant, "year": year, "seeds": rng.randint(20, 400)}
        self.plant = rng.choice(plants)
        self.salt = rng.randint(1000, 9000)
        self.sealed = []
        mine = [jar for jar in self.jars if self.jars[jar]["plant"] == self.plant]
        mine.sort(key=lambda jar: self.jars[jar]["year"])
        self.oldest, self.target = mine[:3], mine[-1]
        seeds = sum(self.jars[jar]["seeds"] for jar in [*self.oldest, self.target])
        self.ask(
            f"The three oldest jars of {self.plant} go into the youngest jar of {self.plant}; then "
            "that jar is sealed. What is its seal number?",
            answer=self.seal_number(self.target, seeds),
        )

    def seal_number(self, jar, seeds):
        return self.salt * int(jar[1:]) + 31 * seeds

    def find(self, jar):
        if jar not in self.jars:
            raise ToolError(f"there is no jar {jar}")
        if jar in self.sealed:
            raise ToolError(f"{jar} is sealed")
        return self.jars[jar]

    def tool_list_jars(self, plant, page=1):
        jars = [jar for jar in self.jars if self.jars[jar]["plant"] == plant]
        if not jars:
            raise ToolError(f"there is no {plant}; plants: {', '.join(PLANTS)}")
        return {"jars": jars[5 * page - 5 : 5 * page], "pages": -(-len(jars) // 5)}

    def tool_show_jar(self, jar):
        return dict(self.find(jar))

    def tool_pour(self, source, target):
        if source == target or self.find(source)["plant"] != self.find(target)["plant"]:
            raise ToolError("seeds are poured into another jar of the same plant")
        self.jars[target]["seeds"] += self.jars[source]["seeds"]
        self.jars[source]["seeds"] = 0
        return {"jar": target, "seeds": self.jars[target]["seeds"]}

    def tool_seal(self, jar):
        seeds = self.find(jar)["seeds"]
        self.sealed.append(jar)
        return {"jar": jar, "seal": self.seal_number(jar, seeds)}

    def solution(self):
        pours = [self.call("pour", source=jar, target=self.target) for jar in self.oldest]
        seeds = sum(self.jars[jar]["seeds"] for jar in [*self.oldest, self.target])
        seal = self.call("seal", jar=self.target)
        return [*pours, seal, self.answer(self.seal_number(self.target, seeds))]
"""
