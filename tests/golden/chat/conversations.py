"""Random conversations, and how each side renders them: token pieces of ours, or the official chat
template through transformers. Shared by the test, by `make.py` and by `compare.py`.

A conversation is JSON: `messages` in the form of Hugging Face, ending with a turn of the user or of
a tool, `tools`, and `thinking`. Texts hold no control token, which an official template would obey,
and completions begin and end with other than white space, which it may merge or strip.
"""

import random
import string
from typing import Any

import numpy as np

Conversation = dict[str, Any]

WORDS = (
    "move",
    "\\boxed{12}",
    "def f(x):",
    "caf\u00e9",
    "\u4e2d\u6587",
    "\U0001f600",
    "Zo\u0308e",
    "'s",
    "3.14",
    "\u00a0",
    "{}",
    "<x>",
    "\x00",
    "\u0416",
)
SPACES = (" ", " ", " ", "\n", "\n\n", "  ", "\t", "\r\n", "\n    ")


def conversation(rng: random.Random, features: set[str]) -> Conversation:
    """One conversation; `features` out of system, tools and thinking may be used in it."""
    tools = (
        [_tool(rng) for _ in range(rng.randrange(1, 4))] if _draw(rng, "tools", features) else []
    )
    thinking = _draw(rng, "thinking", features)
    messages: list[dict[str, Any]] = []
    if _draw(rng, "system", features):
        messages.append({"role": "system", "content": _text(rng)})
    messages.append({"role": "user", "content": _text(rng)})
    for _ in range(rng.randrange(5)):
        calls = [_call(rng, tools) for _ in range(rng.randrange(3))] if tools else []
        answer: dict[str, Any] = {"role": "assistant", "content": _text(rng).strip() or "ok"}
        if calls:
            answer["tool_calls"] = calls
            answer["content"] = rng.choice(["", answer["content"]])
        if thinking:
            answer["reasoning_content"] = _text(rng).strip("\n") or "hm"
        messages.append(answer)
        messages += [{"role": "tool", "content": _text(rng)} for _ in calls]
        if not calls:
            messages.append({"role": "user", "content": _text(rng)})
    return {"messages": messages, "tools": tools, "thinking": thinking}


def _draw(rng: random.Random, feature: str, features: set[str]) -> bool:
    return feature in features and rng.random() < 0.5


def _text(rng: random.Random) -> str:
    letters = string.ascii_lowercase + " .,"
    pieces = [
        rng.choice([*WORDS, "".join(rng.choices(letters, k=rng.randrange(1, 12)))])
        + rng.choice(["", *SPACES])
        for _ in range(rng.randrange(1, 12))
    ]
    return "".join(pieces)


def _tool(rng: random.Random) -> dict[str, Any]:
    name = "".join(rng.choices(string.ascii_lowercase, k=6))
    place = {"type": "string", "description": _text(rng)}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": _text(rng),
            "parameters": {"type": "object", "properties": {"place": place}, "required": ["place"]},
        },
    }


def _call(rng: random.Random, tools: list[dict[str, Any]]) -> dict[str, Any]:
    name = rng.choice(tools)["function"]["name"]
    arguments = {"place": _text(rng), "depth": rng.randrange(9), "far": [1.5, None, True]}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def official(peer: Any, talk: Conversation) -> list[int]:
    """Ids of the official template; `peer` is a tokenizer of transformers."""
    ids = peer.apply_chat_template(
        talk["messages"],
        tools=talk["tools"] or None,
        add_generation_prompt=True,
        enable_thinking=talk["thinking"],
        return_dict=False,
    )
    return [int(index) for index in ids]


def ours(chat: Any, talk: Conversation) -> list[int]:
    """Ids of our pieces, in the way in which an episode grows."""
    chat = chat.with_thinking(talk["thinking"])
    messages = list(talk["messages"])
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    ids = chat.open(messages.pop(0)["content"], system, talk["tools"]).tolist()
    while messages:
        answer = messages.pop(0)
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in answer.get("tool_calls", ())
        ]
        completion = chat.finish(answer["content"], answer.get("reasoning_content"), calls)
        results = []
        while messages and messages[0]["role"] == "tool":
            results.append(messages.pop(0)["content"])
        if results:
            piece = chat.reply_tools(completion, results)
        else:
            piece = chat.reply(completion, messages.pop(0)["content"])
        ids += [*completion.tolist(), *piece.tolist()]
    return ids


def without_dropped_thinking(chat: Any, talk: Conversation, ids: list[int]) -> list[int]:
    """Our ids less the thinking blocks that the Qwen3 template drops.

    It keeps the thinking of the turns since the user last spoke, and where there is none it drops
    the empty block that stood in the prompt, except in the turn that is to come.
    """
    if chat.thinking_ids is None:
        return ids
    opening, closing = chat.thinking_ids
    roles = [message["role"] for message in talk["messages"]]
    last_query = max(index for index, role in enumerate(roles) if role == "user")
    answers = [index for index, role in enumerate(roles) if role == "assistant"]
    dropped = [not talk["thinking"] or index < last_query for index in answers]
    kept: list[int] = []
    rest = np.array(ids)
    for is_dropped in dropped:
        start = int(np.argmax(rest == opening))
        end = int(np.argmax(rest == closing)) + 1
        assert rest[start] == opening and rest[end - 1] == closing
        gap = 1 if chat.tokenizer.decode(rest[end : end + 1].tolist()) == "\n\n" else 2
        assert chat.tokenizer.decode(rest[end : end + gap].tolist()) == "\n\n"
        kept += rest[: start if is_dropped else end + gap].tolist()
        rest = rest[end + gap :]
    return [*kept, *rest.tolist()]
