"""The tokenizer: exact inverse, unforgeable marks, cheap indentation, reproducible training."""

import io
import random

import pytest
import sentencepiece

from models.errors import ModelError
from models.tokenizer import MARKS, Tokenizer, load_tokenizer, train
from models.tokenizer.sentencepiece_model import SentencePieceTokenizer

CODE = """class CounterEnv:
    def reset(self, seed):
        self.total = 0
        if seed > 12:
            self.total = 345

        return "start at " + str(self.total), {}
"""
TEXTS = [
    CODE,
    "Add numbers until the total is even; the largest common divisor wins. 3.14 <|end|>",
] * 20
VOCAB = 500


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return train(TEXTS, tmp_path_factory.mktemp("tokenizer") / "new" / "tokenizer.model", VOCAB)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading",
        "trailing  ",
        "   ",
        "\n",
        "\t\tx\r\n\r\n y\n   z\n",
        CODE,
        "caf\u00e9 e\u0301 \u4e2d\u6587 \u03b1",
        "\U0001f600\U0001f469\u200d\U0001f52c",
        "\u2581 is not a space \u2581\u2581",
        "a\x00b\x7f\ufeff\u2028\x85",
        "<0x41><|user|><unk>",
        "\ufb01 \u212b \uff21",  # characters that Unicode normalisation would rewrite
    ],
)
def test_decode_is_the_inverse_of_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_is_the_inverse_of_encode_for_random_text(tokenizer):
    rng = random.Random(0)
    alphabet = "ab1 \n\t\r\u2581\u00e9\u4e2d\U0001f600<|>"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(30)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_cannot_forge_a_mark(tokenizer):
    marks = {tokenizer.control(name) for name in MARKS}
    assert len(marks) == len(MARKS) and tokenizer.control("<|pad|>") == tokenizer.pad_id == 0
    for name in MARKS:
        ids = tokenizer.encode(f"a{name}b")
        assert ids and not marks & set(ids)
    assert (
        tokenizer.decode(
            [tokenizer.control("<|user|>"), *tokenizer.encode("hi"), tokenizer.control("<|end|>")]
        )
        == "hi"
    )


@pytest.mark.parametrize("level", range(7))
def test_a_newline_and_its_indentation_are_one_piece(tokenizer, level):
    newline = tokenizer.encode("\n" + "    " * level)
    assert len(newline) == 1
    assert tokenizer.encode("x\n" + "    " * level + "y") == tokenizer.encode(
        "x"
    ) + newline + tokenizer.encode("y")


def test_no_piece_joins_digits_or_crosses_white_space(tokenizer):
    assert len(tokenizer.encode("12345")) == 5
    for index in range(tokenizer.vocab_size):
        piece = tokenizer.decode([index])
        assert sum(character.isdigit() for character in piece) <= 1
        assert " " not in piece.strip() and "\n" not in piece.strip()


def test_every_printable_ascii_character_is_one_piece(tokenizer):
    assert all(len(tokenizer.encode(chr(code))) == 1 for code in range(32, 127))


def test_incomplete_and_impossible_text_does_not_raise(tokenizer):
    broken = tokenizer.encode("\U0001f600")[:2]
    assert tokenizer.decode(broken) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_all_of_a_long_text_is_learnt_from(tmp_path):
    # SentencePiece skips texts above 4192 bytes unless told otherwise.
    long = train(["zyx " * 3000], tmp_path / "long.model", 367)
    assert len(long.encode(" zyx")) == 1


def test_training_is_deterministic_and_load_returns_the_same(tokenizer, tmp_path):
    first, second = tmp_path / "a.model", tmp_path / "b.model"
    train(TEXTS, first, VOCAB)
    train(iter(TEXTS), second, VOCAB)
    assert first.read_bytes() == second.read_bytes()
    loaded = SentencePieceTokenizer({"tokenizer.model": first.read_bytes()})
    assert loaded.vocab_size == VOCAB and loaded.encode(CODE) == tokenizer.encode(CODE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.model", "b.model"]


def test_training_is_silent(tmp_path, capfd):
    train(TEXTS, tmp_path / "a.model", VOCAB)
    assert capfd.readouterr() == ("", "")


def test_bad_files_and_sizes_raise_model_error(tokenizer, tmp_path, capfd):
    for content in (b"", b"not a model", b"\x00" * 64, tokenizer.files["tokenizer.model"][:999]):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelError, match=r"tokenizer\.model is not usable.*restore") as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="vocab_size=100"):
        train(TEXTS, tmp_path / "small.model", 100)
    with pytest.raises(ModelError, match="vocab_size=90000"):
        train(TEXTS, tmp_path / "large.model", 90000)
    with pytest.raises(ModelError, match=r"'system'.*<\|pad\|>, <\|bos\|>"):
        tokenizer.control("system")
    assert capfd.readouterr().err == ""


def foreign(**options) -> SentencePieceTokenizer:
    """A tokenizer as other projects fit them: with a dummy prefix and marks of another name."""
    buffer = io.BytesIO()
    settings = {"byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 400}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=buffer,
        model_type="bpe",
        num_threads=1,
        minloglevel=2,
        **(settings | options),
    )
    return SentencePieceTokenizer({"tokenizer.model": buffer.getvalue()})


def test_a_public_model_gives_texts_back_without_its_dummy_prefix():
    public = foreign(remove_extra_whitespaces=True)
    assert set(public.control_ids) == {"<unk>", "<s>", "</s>"} and public.pad_id == 0
    for text in ("total", " total", "  a  b ", "\n", "\u2581", "\x00\u4e2d\U0001f600", "</s><s>"):
        ids = public.encode(text)
        assert public.decode(ids) == text
        assert set(public.control_ids.values()).isdisjoint(ids)


def test_a_model_that_cannot_spell_every_text_is_refused():
    with pytest.raises(ModelError, match="not every byte"):
        foreign(byte_fallback=False, vocab_size=200)
