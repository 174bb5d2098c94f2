"""A shop's desk: find an order by its customer, pay it back, and report a sum."""

from tool_task import ToolError, ToolTask

NAMES = ["Ada", "Bo", "Cleo", "Dev", "Elin", "Femi", "Gus", "Hana"]


def tool(name, description, required=(), **properties):
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": description, "parameters": schema}


class RefundEnv(ToolTask):
    MAX_TURNS = 12
    TOOLS = [  # noqa: RUF012
        tool(
            "find_orders",
            "Orders of a customer, a page at a time.",
            ["customer"],
            customer={"type": "string", "minLength": 1},
            page={"type": "integer", "minimum": 1, "maximum": 9},
        ),
        tool(
            "refund",
            "Pay an order back.",
            ["order_id", "reason"],
            order_id={"type": "string"},
            reason={"type": "string", "enum": ["late", "broken", "other"]},
        ),
        tool(
            "restock",
            "Put goods back on the shelf.",
            ["items"],
            items={"type": "array", "minItems": 1, "items": {"type": "string"}},
            count={"type": "number", "exclusiveMinimum": 0},
        ),
    ]

    def prepare(self, rng):
        self.names = rng.sample(NAMES, 4)
        numbers = rng.sample(range(1000, 9999), 12)
        self.orders = {
            f"K{number}": {"customer": self.names[i % 4], "euro": rng.randint(5, 80), "paid": True}
            for i, number in enumerate(numbers)
        }
        self.customer = rng.choice(self.names)
        self.wanted = max(self.of(self.customer), key=lambda key: (self.orders[key]["euro"], key))
        self.ask(
            f"{self.customer} got the dearest of their orders broken. Please pay it back.",
            until=lambda: not self.orders[self.wanted]["paid"],
        )
        self.ask(
            f"And how many euros has {self.customer} still paid us, over all orders?",
            answer=sum(self.orders[key]["euro"] for key in self.of(self.customer))
            - self.orders[self.wanted]["euro"],
        )

    def of(self, customer):
        return [key for key, order in self.orders.items() if order["customer"] == customer]

    def tool_find_orders(self, customer, page=1):
        keys = self.of(customer)[page - 1 :: 3][:1]
        return {"orders": [{"order_id": key} | self.orders[key] for key in keys], "page": page}

    def tool_refund(self, order_id, reason):
        order = self.orders.get(order_id)
        if order is None:
            raise ToolError(f"there is no order {order_id}")
        if reason != "broken":
            raise ToolError("only broken goods are paid back here")
        order["paid"] = False
        return f"{order['euro']} euros paid back"

    def tool_restock(self, items, count=1):
        return {"restocked": len(items) * count}

    def solution(self):
        left = sum(self.orders[key]["euro"] for key in self.of(self.customer))
        return [
            "\n".join(self.call("find_orders", customer=self.customer, page=n) for n in (1, 2, 3)),
            self.call("refund", order_id=self.wanted, reason="broken"),
            self.answer(left - self.orders[self.wanted]["euro"]),
        ]
