"""A house of lamps whose schema depends on the instance; states alone decide."""

import tool_task


class LampsEnv(tool_task.ToolTask):
    MAX_TURNS = 6
    MAX_CALLS = 3

    def prepare(self, rng):
        self.rooms = rng.sample(["attic", "bath", "cellar", "den", "entry", "foyer", "garage"], 5)
        self.level = {room: rng.randint(1, 9) for room in self.rooms}
        self.first, self.second, self.other = self.rooms[:3]
        self.goal = rng.randint(10, 99)
        room = {"type": "string", "enum": self.rooms}
        self.TOOLS = [
            {
                "type": "function",
                "function": {
                    "name": "read",
                    "description": "How bright a room is.",
                    "parameters": {
                        "type": "object",
                        "properties": {"room": room},
                        "required": ["room"],
                    },
                },
            },
            {
                "name": "dim",
                "description": "Set a lamp.",
                "parameters": {
                    "type": "object",
                    "properties": {"room": room, "level": {"type": "integer", "maximum": 99}},
                    "required": ["room", "level"],
                },
            },
            {"name": "panic", "description": "All lamps full on."},
        ]
        self.ask(
            f"Is there light in the {self.first}?",
            until=lambda: self.called("read", room=self.first),
        )
        self.ask(
            f"Set the {self.second} to {self.goal}.",
            until=lambda: self.level[self.second] == self.goal,
        )
        self.ask(
            f"Now the {self.other}, to half of that, rounded down.",
            until=lambda: (
                self.level[self.other] == self.goal // 2 and self.called("dim", room=self.other)
            ),
        )

    def tool_read(self, room):
        return self.level[room]

    def tool_dim(self, room, level):
        self.level[room] = level

    def tool_panic(self):
        self.level = dict.fromkeys(self.rooms, 100)

    def solution(self):
        return [
            self.call("read", room=self.first),
            self.call("dim", room=self.second, level=self.goal),
            self.call("dim", room=self.other, level=self.goal // 2),
        ]
