"""Byte-level BPE of public checkpoints: texts come back, control tokens cannot be forged, broken
files are refused in one line.

The folders hold real tokenizers cut to their first merges; see `tests/golden/chat/make.py`.
"""

import copy
import json
import random
import unicodedata
from pathlib import Path

import pytest

from models.errors import ModelError
from models.tokenizer import load_tokenizer
from models.tokenizer.byte_level import ByteLevelTokenizer, byte_letters

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "chat"
NAMES = ["qwen3", "smollm2", "llama3"]
SPEC = json.loads((FOLDER / "qwen3" / "tokenizer.json").read_text())


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request):
    return load_tokenizer(FOLDER / request.param)


def open_spec(spec, **companions) -> ByteLevelTokenizer:
    return ByteLevelTokenizer({"tokenizer.json": json.dumps(spec).encode(), **companions})


def changed(path, value):
    """The cut Qwen3 with one entry replaced."""
    spec = copy.deepcopy(SPEC)
    inner = spec
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return spec


TEXTS = [
    "",
    " leading and trailing  ",
    "\n\n\t\r\n",
    "def f(x):\n    return x  # 12345\n",
    "caf\u00e9 \u4e2d\u6587 \u03b1",
    "\U0001f600\U0001f469\u200d\U0001f52c",
    "a\x00b\x7f\ufeff\u2028\x85\u2581\u0120",
    "I'll'S\u00a0\u3000x",
]


@pytest.mark.parametrize("text", TEXTS)
def test_decode_is_the_inverse_of_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_is_the_inverse_of_encode_for_random_text(tokenizer):
    rng = random.Random(0)
    alphabet = "ab1 \n\t\r\u00e9\u4e2d\U0001f600<|>\x00\u2581'"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(30)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogates_become_question_marks(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udfff")) == "a?b?"


def test_qwen_composes_accents_and_the_others_do_not(tokenizer):
    text = "e\u0301"
    composed = tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)
    assert composed == ("<think>" in tokenizer.control_ids)


def test_a_byte_without_a_piece_becomes_the_replacement_character():
    smollm2 = load_tokenizer(FOLDER / "smollm2")
    assert smollm2.decode(smollm2.encode("a\x04b\x01")) == "a\ufffdb\x01"
    assert smollm2.decode(smollm2.encode("\U00050000!")) == "\ufffd!"


@pytest.mark.parametrize(("name", "count"), [("qwen3", 26), ("smollm2", 17), ("llama3", 256)])
def test_no_control_token_can_be_forged(name, count):
    tokenizer = load_tokenizer(FOLDER / name)
    control = tokenizer.control_ids
    assert len(control) == count
    for mark in control:
        for text in (mark, f"a{mark}b", f" {mark}\n", f"{mark}{mark}", mark[:-1], f"\u00e9{mark}"):
            ids = tokenizer.encode(text)
            assert set(control.values()).isdisjoint(ids)
            assert tokenizer.decode(ids) == text
    everything = "".join(control)
    assert set(control.values()).isdisjoint(tokenizer.encode(everything))


def test_special_tokens_are_silent_and_other_added_tokens_show():
    qwen3 = load_tokenizer(FOLDER / "qwen3")
    ids = [
        qwen3.control("<|im_start|>"),
        qwen3.control("<think>"),
        *qwen3.encode("so"),
        qwen3.control("</think>"),
        qwen3.control("<|im_end|>"),
        qwen3.vocab_size,  # a row of the embedding without a piece
        151_900,
    ]
    assert qwen3.decode(ids) == "<think>so</think>"


def test_control_names_and_padding():
    qwen3 = load_tokenizer(FOLDER / "qwen3")
    assert qwen3.pad_id == qwen3.control("<|endoftext|>") == qwen3.vocab_size - 26
    with pytest.raises(ModelError, match=r"no control token '<\|eot_id\|>'.*and 14 more"):
        qwen3.control("<|eot_id|>")


def test_added_tokens_of_the_config_are_control_tokens_too():
    spec = changed(
        ["added_tokens"], [t for t in SPEC["added_tokens"] if "think" not in t["content"]]
    )
    assert "<think>" not in open_spec(spec).control_ids
    declared = {
        str(token["id"]): {"content": token["content"], "special": False}
        for token in SPEC["added_tokens"]
    }
    config = json.dumps({"added_tokens_decoder": declared}).encode()
    full = open_spec(spec, **{"tokenizer_config.json": config})
    assert full.control_ids == open_spec(SPEC).control_ids


def test_merges_may_be_strings_or_pairs():
    pairs = [merge.split(" ") for merge in SPEC["model"]["merges"]]
    text = "the first of these merges"
    assert open_spec(changed(["model", "merges"], pairs)).encode(text) == open_spec(SPEC).encode(
        text
    )


def test_byte_letters_are_256_and_printable():
    letters = byte_letters()
    assert sorted(letters.values()) == list(range(256))
    assert (letters["\u0120"], letters["\u010a"], letters["A"]) == (0x20, 0x0A, 0x41)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["model", "type"], "Unigram", "'Unigram'; expected byte-level BPE"),
        (["model"], None, "of type None"),
        (["model", "vocab"], {"a": 0}, "bytes of plain text have no piece"),
        (["model", "vocab", "a"], -1, "no ids"),
        (["model", "vocab", "a"], 1 << 40, "no ids"),
        (["model", "vocab", "a"], 3, "share one id"),
        (["model", "merges"], ["a"], "no pair"),
        (["model", "merges"], ["zq qz"], "not of pieces"),
        (["model", "continuing_subword_prefix"], "##", "continuing_subword_prefix"),
        (["added_tokens", 0, "id"], 5, "taken twice"),
        (["added_tokens", 0, "content"], "", "no text or no id"),
        (["added_tokens"], {}, None),
        (["normalizer"], {"type": "Lowercase"}, "'Lowercase'.*expected none or NFC"),
        (["pre_tokenizer"], {"type": "Metaspace"}, "'Metaspace'.*expected Split"),
        (["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], "(", "cannot use it"),
        (["pre_tokenizer", "pretokenizers", 1, "add_prefix_space"], True, "comes back as"),
        (["pre_tokenizer"], None, "comes back as"),
    ],
)
def test_a_file_of_another_kind_or_broken_is_one_clear_line(path, value, says):
    spec = changed(path, value)
    if says is None:  # an empty object counts as no added tokens
        assert open_spec(spec).control_ids == {}
        return
    with pytest.raises(ModelError, match=says) as caught:
        open_spec(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_what_is_not_json_is_one_clear_line(content):
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        ByteLevelTokenizer({"tokenizer.json": content})
    assert "\n" not in str(caught.value)


def test_mutated_files_load_or_are_refused():
    """The package's own reader aborts the process on some of these."""
    rng = random.Random(0)
    text = json.dumps(SPEC, ensure_ascii=False)
    values = [None, 0, -1, "", "x", [], {}, True, 2**70, "\ud800", {"type": "Sequence"}, ["a", "b"]]
    refused = 0
    for _ in range(150):
        if rng.random() < 0.5:
            spec = copy.deepcopy(SPEC)
            part = rng.choice(
                [spec, spec["model"], spec["pre_tokenizer"], *spec["added_tokens"][:2]]
            )
            part[rng.choice(list(part))] = rng.choice(values)
            content = json.dumps(spec).encode()
        else:
            place = rng.randrange(len(text))
            content = (text[:place] + rng.choice('a"\u00e9,{]\x00') + text[place + 1 :]).encode()
        try:
            made = ByteLevelTokenizer({"tokenizer.json": content})
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            assert set(made.control_ids.values()).isdisjoint(made.encode("a <|im_end|> b"))
    assert 30 < refused < 150
