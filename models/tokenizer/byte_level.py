"""Byte-level BPE in a Hugging Face `tokenizer.json`: Llama 3, SmolLM2, Qwen2, Qwen3 and their kin.

The package `tokenizers` does the merging. It is given the model without its added tokens, so no
text can become one; they are the control ids, by name, and those not marked special, such as
`<think>`, show in decoded text. Every text decodes to what the tokenizer's normaliser makes of it:
Qwen's composes accents (NFC), the others change nothing. A few vocabularies lack a piece for some
rare bytes (SmolLM2 for U+0004 and for unassigned planes): their characters become U+FFFD. Other
kinds of `tokenizer.json` (Unigram, WordPiece, BPE with dummy prefixes) are refused.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from models.errors import ModelError
from models.tokenizer.base import MAX_VOCAB, Tokenizer, one_line, replace_surrogates
from models.tokenizer.config_file import added_tokens, read_object, template_text, token_text

FILE_NAME = "tokenizer.json"
"""Name of the tokenizer in a folder of weights."""

# Composed characters only: a normaliser may compose, but not drop, change or add anything here.
_PROBE = " A b\u00e9\u4e2d\U0001f600\x00\r\n\t  'll 12345\ufffd<|x|>\n\n "


def byte_letters() -> dict[str, int]:
    """The letters in which byte-level BPE writes bytes: printable ones as themselves, the others as
    U+0100 and up, in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


class ByteLevelTokenizer(Tokenizer):
    """A tokenizer whose file is a `tokenizer.json`."""

    def __init__(self, files: Mapping[str, bytes]):
        spec = read_object(files, FILE_NAME)
        vocab = _vocab(spec)
        added = _added(spec, files, vocab)
        self._unspelt = {byte for letter, byte in byte_letters().items() if letter not in vocab}
        self._plain = _plain(spec, {token["content"] for token in added})
        self._template_text = template_text(files)
        config = read_object(files, "tokenizer_config.json")
        super().__init__(files, _pieces(vocab, added), {t["content"]: t["id"] for t in added})
        pad = token_text(config.get("pad_token"))
        self._pad_id = self.control_ids.get(pad, 0) if pad else 0
        self._check()

    @property
    def pad_id(self) -> int:
        """The checkpoint's padding token, or 0 where it names none."""
        return self._pad_id

    @property
    def template_text(self) -> str | None:
        """The chat template beside the tokenizer, if any."""
        return self._template_text

    def encode(self, text: str) -> list[int]:
        """Turn plain text into ids, never a control id; lone surrogates become '?'."""
        text = replace_surrogates(text)
        if self._unspelt and not self._unspelt.isdisjoint(text.encode()):
            # The library would leave such a character out without a word.
            spelt = [self._unspelt.isdisjoint(character.encode()) for character in text]
            text = "".join(c if ok else "\ufffd" for c, ok in zip(text, spelt, strict=True))
        return self._plain.encode(text, add_special_tokens=False).ids

    def _check(self) -> None:
        """Refuse what decodes to another text, such as a tokenizer that lowers or adds a space."""
        for text in (*self.control_ids, " ".join(self.control_ids)):
            if not set(self.control_ids.values()).isdisjoint(self.encode(text)):
                raise ModelError(f"it spells the text {text[:40]!r} with a control token")
        if (back := self.decode(self.encode(_PROBE))) != _PROBE:
            raise ModelError(
                f"the text {_PROBE!r} comes back as {back!r}; expected byte-level BPE that gives a "
                "text back unchanged"
            )


def _vocab(spec: dict[str, Any]) -> dict[str, int]:
    model = spec.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind != "BPE":
        raise ModelError(f"its model is of type {kind!r}; expected byte-level BPE")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(_is_id(index) for index in vocab.values()):
        raise ModelError("its vocabulary is missing or names ids that are no ids")
    needed = {*range(0x20, 0x7F), *"\n\ufffd".encode()}
    spelt = {byte for letter, byte in byte_letters().items() if letter in vocab}
    if missing := needed - spelt:
        raise ModelError(
            f"{len(missing)} bytes of plain text have no piece, such as {min(missing):#04x}; "
            "expected byte-level BPE (of another kind only a tokenizer.model can be read)"
        )
    if len(set(vocab.values())) != len(vocab):
        raise ModelError("several pieces of its vocabulary share one id")
    return vocab


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_VOCAB


def _added(
    spec: dict[str, Any], files: Mapping[str, bytes], vocab: dict[str, int]
) -> list[dict[str, Any]]:
    """Added tokens of both files, those of `tokenizer.json` first, each once."""
    listed = spec.get("added_tokens") or []
    if not isinstance(listed, list):
        raise ModelError("its added_tokens are not a list")
    found: dict[str, dict[str, Any]] = {}
    taken = {index: text for text, index in vocab.items()}
    for token in (*listed, *added_tokens(files)):
        text = token.get("content") if isinstance(token, dict) else None
        if not isinstance(text, str) or not text or not _is_id(token.get("id")):
            raise ModelError(f"one of its added tokens has no text or no id: {repr(token)[:80]}")
        known = found.get(text, token)["id"]
        if taken.setdefault(token["id"], text) != text or vocab.get(text, known) != token["id"]:
            raise ModelError(f"the id {token['id']} of its added token {text!r} is taken twice")
        if known != token["id"]:
            raise ModelError(f"its added token {text!r} has the ids {known} and {token['id']}")
        found.setdefault(text, token)
    return list(found.values())


def _plain(spec: dict[str, Any], names: set[str]) -> tokenizers.Tokenizer:
    """The tokenizer for plain text: it cannot give an added token, which it does not know.

    It is put together part by part, not read by the package, whose reader aborts the whole process
    on some broken files. Truncation, padding and post-processing stay away: they would cut a text
    or add to it.
    """
    model = spec["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ModelError(f"its {name} is {str(model[name])[:20]!r}; expected none")
    vocab = {text: index for text, index in model["vocab"].items() if text not in names}
    try:
        plain = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=_merges(model.get("merges"), vocab),
                ignore_merges=model.get("ignore_merges") is True,
            )
        )
        normalizer, pre_tokenizer = spec.get("normalizer"), spec.get("pre_tokenizer")
        if normalizer is not None:
            plain.normalizer = _normalizer(normalizer)
        if pre_tokenizer is not None:
            plain.pre_tokenizer = _pre_tokenizer(pre_tokenizer)
    except ModelError:
        raise
    except Exception as error:  # the package raises bare Exceptions, such as for a bad expression
        raise ModelError(f"the package tokenizers cannot use it: {one_line(error)}") from error
    return plain


def _merges(listed: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in their order; files write them as "left right" or as ["left", "right"]."""
    if not isinstance(listed, list):
        raise ModelError("its merges are not a list")
    merges = []
    for item in listed:
        pair = item.split(" ") if isinstance(item, str) else item
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(x) is str for x in pair):
            raise ModelError(f"one of its merges is no pair: {str(item)[:40]!r}")
        left, right = pair
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"its merge {str(pair)[:40]!r} is not of pieces of its vocabulary")
        merges.append((left, right))
    return merges


def _normalizer(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "NFC":
        return normalizers.NFC()
    if kind == "Sequence" and isinstance(part.get("normalizers"), list):
        return normalizers.Sequence([_normalizer(item) for item in part["normalizers"]])
    raise ModelError(f"its normalizer is {str(part)[:60]!r}; expected none or NFC")


def _pre_tokenizer(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "Sequence" and isinstance(part.get("pretokenizers"), list):
        parts = [_pre_tokenizer(item) for item in part["pretokenizers"]]
        return pre_tokenizers.Sequence(parts)
    if kind == "ByteLevel":
        return pre_tokenizers.ByteLevel(
            add_prefix_space=part.get("add_prefix_space") is True,
            use_regex=part.get("use_regex", True) is True,
        )
    if kind == "Digits":
        return pre_tokenizers.Digits(individual_digits=part.get("individual_digits") is True)
    pattern = part.get("pattern") if kind == "Split" else None
    if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        behavior = {"Isolated": "isolated", "Removed": "removed"}.get(str(part.get("behavior")))
        if behavior is not None:
            invert = part.get("invert") is True
            return pre_tokenizers.Split(tokenizers.Regex(pattern["Regex"]), behavior, invert)
    raise ModelError(
        f"its pre_tokenizer has the part {str(part)[:80]!r}; expected Split by a Regex, Digits, "
        "ByteLevel or a Sequence of them"
    )


def _pieces(vocab: dict[str, int], added: list[dict[str, Any]]) -> list[bytes]:
    letters = byte_letters()
    pieces = [b""] * (1 + max([*vocab.values(), *(token["id"] for token in added)]))
    for text, index in vocab.items():
        spelt = [letters.get(letter, -1) for letter in text]
        pieces[index] = bytes(spelt) if min(spelt, default=-1) >= 0 else text.encode()
    for token in added:
        shown = not token.get("special")
        pieces[token["id"]] = token["content"].encode() if shown else b""
    return pieces
