"""A chat over a tokenizer fitted to a few prompts, shared by the tests of the roles."""

import pytest

from models.tokenizer import train
from spade_jax.rollout.chat import Chat


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    words = [
        "fire",
        "the",
        "levers",
        "in",
        "a",
        "hidden",
        "order",
        "and",
        "say",
        "done",
        "when",
        "every",
        "one",
        "is",
        "set",
    ]
    texts = [" ".join(words[i:] + words[:i]) for i in range(len(words))] * 20
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return Chat(train(texts, path, vocab_size=400))
