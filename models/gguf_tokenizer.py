"""A `tokenizer.json` from what a GGUF file says of its tokenizer: byte-level BPE only.

The file names how text is cut before merging (`tokenizer.ggml.pre`) but does not hold the rule; the
rules of the supported families are here. SentencePiece vocabularies are refused: their normaliser
is not in the file, so the tokenizer has to come from elsewhere.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import ModelError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # values of tokenizer.ggml.token_type


def _pattern(digits: str) -> str:
    """Words with one leading sign or space, digits, signs, line ends: as Qwen and Llama 3 cut."""
    return "|".join(
        (
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(digits: str) -> list[dict[str, Any]]:
    rule = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [rule | {"pattern": {"Regex": _pattern(digits)}}, _byte_level(False)]


_DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [_DIGITS, _byte_level(True)],
    "gpt-2": [_byte_level(True)],
    "qwen2": _split(r"\p{N}"),
    "llama-bpe": _split(r"\p{N}{1,3}"),
}
COMPOSED = ("qwen2",)  # text is brought to NFC first
WHOLE_WORDS = ("llama-bpe",)  # a word that is a token is not made by merges


def write_tokenizer(metadata: Mapping[str, Any], where: str, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into a folder.

    Args:
        metadata: of the GGUF file.
        where: the file, for messages.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        what = "holds no tokenizer" if kind is None else f"has a tokenizer of kind {kind}, {pre=}"
        raise ModelError(
            f"{where} {what}, which cannot be rebuilt (only BPE with pre one of "
            f"{', '.join(PRE_TOKENIZERS)}); name a folder with the model's tokenizer.json by "
            "--tokenizer"
        )
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    merges = metadata.get("tokenizer.ggml.merges")
    try:
        spec = _spec(tokens, types, merges, pre)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{where}: its tokenizer is damaged ({error}); name a folder with the model's "
            "tokenizer.json by --tokenizer"
        ) from error
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    # Writers say -1, or its 32 bits unsigned, for a token that there is not.
    ids = {
        name: index if index is not None and 0 <= index < len(tokens) else None
        for name, index in ids.items()
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, index in ids.items():
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    if metadata.get("tokenizer.ggml.add_bos_token") and ids["bos"] is not None:
        config["add_bos_token"] = True
        spec["post_processor"] = _leading(tokens[ids["bos"]], ids["bos"])
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    generation = {name: index for name, index in generation.items() if index is not None}
    for name, values in (
        ("tokenizer.json", spec),
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _spec(tokens: Any, types: Any, merges: Any, pre: str) -> dict[str, Any]:
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise TypeError("tokens or merges are not lists")
    types = types if types is not None else [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{len(types)} types for {len(tokens)} tokens")
    vocab = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != UNUSED
    }
    if len(vocab) < len(types) - types.count(UNUSED):
        raise ValueError("two of its tokens are spelt alike")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a merge is not of two pieces")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": _byte_level(True),
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in WHOLE_WORDS,
            "vocab": vocab,
            "merges": pairs,
        },
    }


def _leading(token: str, index: int) -> dict[str, Any]:
    """Put the beginning-of-text token before a text."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }
