"""SentencePiece BPE with byte fallback: the project's own tokenizers and public `tokenizer.model`s.

`train` makes the kind in which code is cheap: there is no normalisation and no dummy prefix, a
newline with up to six levels of four-space indentation is one piece, digits stand alone, and the
chat marks are control pieces. A public model is read without its dummy prefix, since the texts
encoded here stand in the middle of a conversation; if it normalises, so does `encode`, and else
every text decodes to itself, byte for byte. Models without byte pieces are refused.
"""

import io
import os
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from models.errors import ModelError
from models.tokenizer.base import MAX_VOCAB, Tokenizer, one_line, replace_surrogates, write
from models.tokenizer.config_file import template_text

FILE_NAME = "tokenizer.model"
"""Name of the model file in a folder of weights."""

MARKS = ("<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Control pieces of the tokenizers that `train` makes; padding is id 0."""

_SPACE = "\u2581"  # how SentencePiece stores a space, so pieces given by hand must use it too
_NEWLINES = tuple("\n" + _SPACE * 4 * level for level in range(7))
_PRINTABLE = "".join(sorted(set(string.printable) - set(string.whitespace)))


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer whose file is a SentencePiece model."""

    def __init__(self, files: Mapping[str, bytes]):
        self._processor = _processor(files[FILE_NAME])
        size = self._processor.vocab_size()
        try:
            pieces = [self._piece_bytes(index) for index in range(size)]
            control = {
                self._processor.id_to_piece(index): index
                for index in range(size)
                if self._processor.is_control(index) or self._processor.is_unknown(index)
            }
        except UnicodeDecodeError as error:
            raise ModelError(f"one of its pieces is no text: {error}") from error
        byte_pieces = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        if size > MAX_VOCAB or not all(self._processor.is_byte(index) for index in byte_pieces):
            raise ModelError(
                f"of its {size} pieces not every byte has one, so that some text has no spelling; "
                "expected a model trained with byte_fallback"
            )
        self._space_ids = [byte_pieces[byte] for byte in _SPACE.encode()]
        self._template_text = template_text(files)
        super().__init__(files, pieces, control)

    @property
    def pad_id(self) -> int:
        """Its padding piece, or 0 where it has none."""
        return max(self._processor.pad_id(), 0)

    @property
    def template_text(self) -> str | None:
        """The chat template beside the model, if any."""
        return self._template_text

    def encode(self, text: str) -> list[int]:
        """Turn plain text into ids, never a control id; lone surrogates become '?'."""
        # A literal U+2581 would come back as a space, so it is spelt in bytes.
        ids: list[int] = []
        for index, part in enumerate(replace_surrogates(text).split(_SPACE)):
            if index:
                ids += self._space_ids
            ids += self._processor.encode(part)
        return ids

    def _piece_bytes(self, index: int) -> bytes:
        piece = self._processor.id_to_piece(index)
        if self._processor.is_control(index) or self._processor.is_unknown(index):
            return b""
        if self._processor.is_byte(index):
            return bytes([int(piece[1:-1], 16)])
        return piece.replace(_SPACE, " ").encode()


def _processor(proto: bytes) -> Any:
    """The library's own object, Any because its stubs disagree between releases."""
    messages: Any = sentencepiece_model_pb2
    try:
        model = messages.ModelProto.FromString(proto)
        # The texts encoded here begin and end within a conversation.
        model.normalizer_spec.add_dummy_prefix = False
        model.normalizer_spec.remove_extra_whitespaces = False
        processor: Any = sentencepiece.SentencePieceProcessor()
        if not proto or not processor.LoadFromSerializedProto(model.SerializeToString()):
            raise ModelError("the SentencePiece model is empty or cut short")
    except (DecodeError, RuntimeError, UnicodeDecodeError) as error:
        raise ModelError(f"it is no SentencePiece model: {one_line(error)}") from error
    return processor


def fit(texts: Iterable[str], vocab_size: int, words: Sequence[str] = ()) -> SentencePieceTokenizer:
    """Fit a tokenizer to `texts`; equal texts give equal bytes.

    Each of `words` becomes one piece wherever it stands, with a space, a quote or a letter before
    it: a small policy copies one piece long before it learns to copy a sequence of them.
    """
    buffer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=buffer,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            required_chars=_PRINTABLE,
            user_defined_symbols=[*_NEWLINES, *words],
            control_symbols=list(MARKS[2:]),
            pad_id=0,
            pad_piece=MARKS[0],
            bos_id=1,
            bos_piece=MARKS[1],
            unk_id=2,
            eos_id=-1,
            max_sentence_length=1 << 24,  # the default silently drops texts above 4 kB
            num_threads=1,  # merges of equal rank come in a fixed order
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ModelError(
            f"no tokenizer of vocab_size={vocab_size} can be fitted to these texts ({error}); "
            "give more text or change the size"
        ) from error
    return SentencePieceTokenizer({FILE_NAME: buffer.getvalue()})


def train(
    texts: Iterable[str],
    path: str | os.PathLike[str],
    vocab_size: int,
    words: Sequence[str] = (),
) -> SentencePieceTokenizer:
    """`fit` a tokenizer, write its model file to `path`, and return it."""
    tokenizer = fit(texts, vocab_size, words)
    write(Path(path), tokenizer.files[FILE_NAME])
    return tokenizer
