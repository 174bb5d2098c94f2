"""Which template a checkpoint gets, and what of its wording is taken over."""

import json
import time
from pathlib import Path

import pytest

from models.tokenizer import load_tokenizer
from spade_jax.errors import ConfigError
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.templates import FAMILIES, choose

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "chat"
CHATML = "{{'<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>'}}"


@pytest.fixture
def checkpoint(tmp_path):
    """A function that opens one of the tokenizers with another chat template, or none."""

    def make(name: str, text: str | None):
        load_tokenizer(FOLDER / name).save(tmp_path)
        config = {} if text is None else {"chat_template": text}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(tmp_path)

    return make


@pytest.mark.parametrize(
    ("folder", "name", "thinks", "has_tools", "default_system"),
    [
        (FOLDER / "qwen3", "qwen3", "on request", True, None),
        (FOLDER / "llama3", "llama3", "never", False, None),
        (FOLDER / "llama3_1", "llama3", "never", False, ""),
        (Path("assets/tiny"), "spade", "never", False, None),
    ],
)
def test_the_template_of_a_checkpoint(folder, name, thinks, has_tools, default_system):
    template = choose(load_tokenizer(folder))
    assert (template.name, template.thinks) == (name, thinks)
    assert (template.tools is not None) == has_tools
    assert template.default_system == default_system


def test_wording_is_the_checkpoints_own():
    smollm2 = choose(load_tokenizer(FOLDER / "smollm2"))
    assert smollm2.name == "chatml" and "SmolLM" in (smollm2.default_system or "")
    before, behind = choose(load_tokenizer(FOLDER / "qwen3")).tools or ("", "")
    assert before.startswith("# Tools\n\n") and before.endswith("<tools>")
    assert behind.startswith("\n</tools>\n\n") and behind.endswith("</tool_call>")
    llama = choose(load_tokenizer(FOLDER / "llama3_1"))
    assert llama.system_prefix == (
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    )


@pytest.mark.parametrize(
    ("folder", "name"), [("qwen3", "qwen3"), ("smollm2", "chatml"), ("llama3", "llama3")]
)
def test_without_a_template_the_control_tokens_decide(checkpoint, folder, name):
    template = choose(checkpoint(folder, None))
    assert template == FAMILIES[name]


def test_an_unknown_format_is_said(checkpoint):
    with pytest.raises(ConfigError, match=r"of none of them \(spade, chatml.*run\.chat_template"):
        choose(checkpoint("qwen3", "{{ '[INST]' }}"))
    tokenizer = checkpoint("qwen3", None)
    tokenizer.control_ids = {"<s>": 0}
    with pytest.raises(ConfigError, match="no chat template, and its control tokens"):
        choose(tokenizer)


def test_the_family_can_be_named(checkpoint):
    tokenizer = checkpoint("qwen3", "{{ '[INST]' }}")
    assert choose(tokenizer, "chatml").name == "chatml"
    assert choose(tokenizer, "qwen3").thinks == "on request"
    with pytest.raises(ConfigError, match=r"llama3 needs <\|begin_of_text\|>, <\|start_header"):
        choose(tokenizer, "llama3")
    with pytest.raises(ConfigError, match="'gemma': expected auto or one of spade, chatml"):
        choose(tokenizer, "gemma")


def test_a_system_message_of_the_template_that_differs(checkpoint):
    text = CHATML + r"""{{- '<|im_start|>system\nI\'m "Q", a model.<|im_end|>\n' }}"""
    template = choose(checkpoint("qwen3", text))
    assert (template.name, template.default_system) == ("chatml", 'I\'m "Q", a model.')


def test_a_checkpoint_that_always_thinks(checkpoint):
    tokenizer = checkpoint("qwen3", CHATML + r"{{- '<|im_start|>assistant\n<think>\n' }}")
    chat = Chat(tokenizer)
    assert chat.template.thinks == "always"
    opened = chat.open("hi").tolist()
    assert opened[-2:] == [tokenizer.control("<think>"), *tokenizer.encode("\n")]
    completion = chat.finish("5", "hm")
    assert chat.decode(completion) == "<think>\nhm\n</think>\n\n5"
    with pytest.raises(ConfigError, match=r"agent\.thinking to True"):
        chat.with_thinking(False)


def test_a_hostile_template_text_is_read_in_linear_time(checkpoint):
    started = time.process_time()
    for text in ("\\'" * 200_000, "'" * 200_001, '"' + "\\" * 200_001, "{#" * 100_000):
        template = choose(checkpoint("qwen3", CHATML + text))
        assert template.name == "chatml"
    assert time.process_time() - started < 10
