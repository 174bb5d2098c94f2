"""A conversation as token pieces around turns: it only ever grows by appended ids.

    <|bos|><|user|>message<|end|><|assistant|>completion<|end|><|user|>text<|end|><|assistant|>
    `---------------- open -----------------' `--- sampled ---'`------------ reply -----------'

Nothing is re-tokenised or re-rendered (design decision 1). The pieces equal the official rendering
token by token, but for two things. Official templates drop earlier turns' thinking (Qwen3 also the
empty block that keeps a turn from thinking); here what the model saw stays. And messages are
untrusted: a control token spelt in one is ordinary text, where an official template would obey it.
A completion stays as it was sampled, so white space at its ends, which official templates may merge
or strip, is kept too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from models.tokenizer import Tokenizer
from spade_jax.errors import ConfigError
from spade_jax.rollout.templates import NO_THOUGHT, THINK_CLOSE, THINK_OPEN, Template, choose
from spade_jax.types import Thinking

Part = int | str
"""A control id, or text that is encoded together with the text beside it."""


class Chat:
    """The pieces of one tokenizer's chat template, as int32 arrays."""

    def __init__(
        self, tokenizer: Tokenizer, template: Template | None = None, thinking: bool | None = None
    ):
        """Speak `template`, or the one that the tokenizer's files name; without `thinking` as
        little as the template can.
        """
        self._tokenizer = tokenizer
        self._template = template or choose(tokenizer)
        always = self._template.thinks == "always"
        self._thinking = always if thinking is None else thinking
        if self._thinking and self._template.thinks == "never":
            raise ConfigError(
                f"thinking=True, but the chat template {self._template.name} of this checkpoint "
                "does not think; set designer.thinking, hint.thinking and agent.thinking to False"
            )
        if always and not self._thinking:
            raise ConfigError(
                "thinking=False, but the chat template of this checkpoint opens every turn with "
                "thinking; set designer.thinking, hint.thinking and agent.thinking to True"
            )
        marks = sorted(tokenizer.control_ids, key=len, reverse=True)  # the longest match counts
        self._marks = re.compile("(" + "|".join(map(re.escape, marks)) + ")")
        self._end = tokenizer.control(self._template.end)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the pieces are made with."""
        return self._tokenizer

    @property
    def template(self) -> Template:
        """The chat template that is spoken."""
        return self._template

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, the end of a turn first."""
        known = self._tokenizer.control_ids
        return (self._end, *(known[name] for name in self._template.stops if name in known))

    @property
    def thinking_ids(self) -> tuple[int, int] | None:
        """Ids that open and close a thinking block; None where the tokenizer has none."""
        known = self._tokenizer.control_ids
        if THINK_OPEN in known and THINK_CLOSE in known:
            return known[THINK_OPEN], known[THINK_CLOSE]
        return None

    @property
    def thinking_block(self) -> Thinking | None:
        """What a budget of thinking needs; None where the tokenizer has no such block."""
        if self.thinking_ids is None:
            return None
        closing = self._ids(self._split(f"\n{THINK_CLOSE}\n\n"))
        return Thinking(*self.thinking_ids, tuple(closing.tolist()))

    def with_thinking(self, thinking: bool) -> "Chat":
        """The same chat with thinking on or off."""
        if thinking == self._thinking:
            return self
        return Chat(self._tokenizer, self._template, thinking)

    def open(
        self, text: str, system: str | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Int[np.ndarray, " seq"]:
        """Begin a conversation with the user's first message and hand the word to the model.

        `tools` are JSON schemas of functions; a system message of None is the template's own.
        """
        begin = self._split(self._template.begin)
        return self._ids([*begin, *self._system(system, tools), *self._user([self._clean(text)])])

    def reply(
        self, completion: Int[np.ndarray, " completion"], text: str
    ) -> Int[np.ndarray, " seq"]:
        """Return what follows `completion`: the end mark if it was cut, the user's next message."""
        return self._ids([*self._close(completion), *self._user([self._clean(text)])])

    def reply_tools(
        self,
        completion: Int[np.ndarray, " completion"],
        results: Sequence[str],
        text: str = "",
    ) -> Int[np.ndarray, " seq"]:
        """As `reply`, with the results of the tool calls of `completion` in one turn, and in a turn
        of its own what the user says after them.
        """
        self._need_tools()
        parts: list[Part] = []
        for result in results:
            parts += [*self._split("\n<tool_response>\n" if parts else "<tool_response>\n"), result]
            parts += self._split("\n</tool_response>")
        if not text:
            return self._ids([*self._close(completion), *self._user(parts)])
        said = self._user([self._clean(text)])
        return self._ids([*self._close(completion), *self._turn("user", parts), *said])

    def finish(
        self,
        text: str,
        thought: str | None = None,
        calls: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> Int[np.ndarray, " seq"]:
        """Return a complete completion that says `text`: what supervised examples teach.

        `thought` stands in a thinking block before it, `calls` of tools (name, arguments) after it.
        """
        parts: list[Part] = []
        if thought is not None:
            if not self._thinking:
                raise ConfigError("a thought was given to a chat without thinking")
            opened = self._template.thinks == "always"
            parts = [] if opened else self._split(f"{THINK_OPEN}\n")
            parts += [thought, *self._split(f"\n{THINK_CLOSE}\n\n")]
        parts.append(text)
        if calls:
            self._need_tools()
        for index, (name, arguments) in enumerate(calls):
            call = f'{{"name": {_json(name)}, "arguments": {_json(arguments)}}}'
            parts += self._split("\n<tool_call>\n" if text or index else "<tool_call>\n")
            parts += [call, *self._split("\n</tool_call>")]
        return self._ids([*parts, self._end])

    def decode(self, completion: Int[np.ndarray, " seq"] | Sequence[int]) -> str:
        """Return the text of a completion, without its marks; thinking shows in its tags."""
        text = self._tokenizer.decode([int(token) for token in completion])
        # The tag that opened the block is in the prompt.
        return f"{THINK_OPEN}\n{text}" if self._template.thinks == "always" else text

    def _system(self, system: str | None, tools: Sequence[Mapping[str, Any]]) -> list[Part]:
        template = self._template
        if tools:
            self._need_tools()
        if system is not None and not template.has_system:
            raise ConfigError(f"the chat template {template.name} has no system message")
        if system is None and template.default_system is None and not tools:
            return []
        parts = [*self._header("system"), *self._split(template.system_prefix)]
        if system is not None:
            parts.append(self._clean(system))
        elif template.default_system is not None:
            parts += self._split(template.default_system)
        if tools and template.tools:
            before, behind = template.tools
            own = system is not None or template.default_system is not None
            parts += self._split(f"\n\n{before}" if own else before)
            parts.append("".join(f"\n{_json(tool)}" for tool in tools))
            parts += self._split(behind)
        return [*parts, self._end, *self._split(template.after)]

    def _user(self, message: Sequence[Part]) -> list[Part]:
        """A turn of the user, and the opening of the model's."""
        opening = {
            "never": "",
            "on request": "" if self._thinking else NO_THOUGHT,
            "always": f"{THINK_OPEN}\n",
        }[self._template.thinks]
        return [*self._turn("user", message), *self._header("assistant"), *self._split(opening)]

    def _turn(self, role: str, message: Sequence[Part]) -> list[Part]:
        """A whole turn."""
        return [*self._header(role), *message, self._end, *self._split(self._template.after)]

    def _close(self, completion: Int[np.ndarray, " completion"]) -> list[Part]:
        ended = completion.size > 0 and int(completion[-1]) == self._end
        return [*([] if ended else [self._end]), *self._split(self._template.after)]

    def _header(self, role: str) -> list[Part]:
        return self._split(self._template.header.format(role=role))

    def _clean(self, message: str) -> str:
        return message.strip() if self._template.strips else message

    def _split(self, text: str) -> list[Part]:
        """Cut text of the template at its control tokens; never for text of others."""
        known = self._tokenizer.control_ids
        return [known.get(part, part) for part in self._marks.split(text) if part]

    def _ids(self, parts: Sequence[Part]) -> Int[np.ndarray, " seq"]:
        """Encode parts; text runs on across parts, for where it is cut decides its pieces."""
        ids: list[int] = []
        run = ""
        for part in parts:
            if isinstance(part, str):
                run += part
            else:
                ids += [*self._tokenizer.encode(run), part]
                run = ""
        return np.array([*ids, *self._tokenizer.encode(run)], np.int32)

    def _need_tools(self) -> None:
        if self._template.tools is None:
            raise ConfigError(
                f"the chat template {self._template.name} of this checkpoint says nothing of tools "
                "in a form that is known here; use a checkpoint that was trained with them, such "
                "as Qwen2.5 or Qwen3"
            )


def _json(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
