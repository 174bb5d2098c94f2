"""In the manner of SPADE's tool programs: their base class, global generator, lambdas."""

import json
import random

from tool_use_base_env import ToolUseBaseEnv


class PantryEnv(ToolUseBaseEnv):
    def __init__(self, max_turns=8, **kwargs):
        super().__init__(max_turns=max_turns, **kwargs)

    def reset(self, seed=None):
        self.turn_count = 0
        self._call_history = []
        if seed is not None:
            random.seed(seed)
        shelf = {name: random.randint(2, 9) for name in ("rice", "beans", "oats")}
        self._state = {"shelf": shelf, "listed": False, "list": []}
        self._tools = {
            "shelf": {
                "description": "What is on the shelf",
                "parameters": {"type": "object", "properties": {}},
            },
            "add": {
                "description": "Put a thing on the shopping list",
                "parameters": {
                    "type": "object",
                    "properties": {"thing": {"type": "string"}, "count": {"type": "integer"}},
                    "required": ["thing"],
                },
            },
            "clear": {"description": "Empty the list"},
        }
        self._user_messages = ["Look at the shelf.", "Put three of the scarcest thing on the list."]
        scarce = min(shelf, key=lambda name: (shelf[name], name))
        self._message_criteria = [
            lambda state: state["listed"],
            lambda state: [scarce, 3] in state["list"],
        ]
        self._current_msg = 0
        self._expected_answer = "done"
        return self._user_messages[0] + self._obs_suffix(), {}

    def _progress(self):
        if self._current_msg < 2 and self._message_criteria[self._current_msg](self._state):
            self._current_msg += 1
            if self._current_msg == 2:
                return " | all steps complete, answer done"
            return f" | next: {self._user_messages[self._current_msg]}"
        return ""

    def _check_answer(self, answer):
        return super()._check_answer(answer) and self._current_msg == 2

    def tool_shelf(self):
        self._state["listed"] = True
        return json.dumps(self._state["shelf"]) + self._progress()

    def tool_add(self, thing, count=1):
        self._state["list"].append([thing, count])
        return f"{count} x {thing}, {self._state['shelf'][thing]} there{self._progress()}"

    def tool_clear(self):
        self._state["list"] = []
        return "empty" + self._progress()

    def solution(self):
        return "look, add three of the scarcest, answer done"
