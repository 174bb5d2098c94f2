"""Token pieces against the ids of official chat templates, which `tests/golden/chat/make.py` wrote
with transformers.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from models.tokenizer import load_tokenizer
from spade_jax.rollout.chat import Chat

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "chat"
GOLDENS = json.loads((FOLDER / "goldens.json").read_text())


def _conversations():
    spec = importlib.util.spec_from_file_location("conversations", FOLDER / "conversations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


conversations = _conversations()


def kept_whole(talk) -> bool:
    """Whether the Qwen3 template keeps all that was said: thinking, and one query of the user."""
    roles = [message["role"] for message in talk["messages"]]
    return (talk["thinking"] and roles.count("user") == 1) or "assistant" not in roles


@pytest.mark.parametrize("name", ["smollm2", "llama3", "llama3_1"])
def test_pieces_equal_the_official_template(name):
    chat = Chat(load_tokenizer(FOLDER / name))
    for talk in GOLDENS[name]:
        assert conversations.ours(chat, talk) == talk["ids"]


def test_qwen3_pieces_equal_the_official_template_where_it_keeps_history():
    chat = Chat(load_tokenizer(FOLDER / "qwen3"))
    kept = [talk for talk in GOLDENS["qwen3"] if kept_whole(talk)]
    assert any(len(talk["messages"]) > 4 and talk["tools"] for talk in kept)
    for talk in kept:
        assert conversations.ours(chat, talk) == talk["ids"]


def test_qwen3_pieces_differ_by_the_thinking_that_the_official_template_drops():
    chat = Chat(load_tokenizer(FOLDER / "qwen3"))
    dropped = [talk for talk in GOLDENS["qwen3"] if not kept_whole(talk)]
    assert {talk["thinking"] for talk in dropped} == {True, False}
    for talk in dropped:
        ids = conversations.ours(chat, talk)
        assert ids != talk["ids"]
        assert conversations.without_dropped_thinking(chat, talk, ids) == talk["ids"]


def test_goldens_cover_what_a_template_can_do():
    talks = GOLDENS["qwen3"]
    text = json.dumps(talks)
    assert len(talks) >= 40 and "tool_calls" in text and "reasoning_content" in text
    for role in ("system", "tool"):
        assert any(message["role"] == role for talk in talks for message in talk["messages"])
    adjacent = [
        [message["role"] for message in talk["messages"]] for talk in talks if talk["tools"]
    ]
    assert any("tool tool" in " ".join(roles) for roles in adjacent)  # merged into one turn
