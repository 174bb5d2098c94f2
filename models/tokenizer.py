"""A SentencePiece byte-fallback BPE tokenizer: code is cheap, and chat marks cannot be forged.

Every text has an encoding and decodes to itself, byte for byte: there is no normalisation, no dummy
prefix, and what no piece covers is spelt in bytes. A newline with up to six levels of four-space
indentation is one piece; digits stand alone. The chat marks are control pieces, which `encode`
never emits whatever the text says. Tokenizers of public checkpoints (Hugging Face
`tokenizer.json`) are deliberately not here.
"""

import io
import os
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from models.errors import ModelError

FILE_NAME = "tokenizer.model"
"""Name of the model file in a folder of weights."""

MARKS = ("pad", "bos", "user", "assistant", "end")
"""Names of the control pieces `<|pad|>`, `<|bos|>` ...; padding is id 0."""

_SPACE = "\u2581"  # how SentencePiece stores a space, so pieces given by hand must use it too
_SPACE_BYTES = _SPACE.encode()
_NEWLINES = tuple("\n" + _SPACE * 4 * level for level in range(7))
_PRINTABLE = "".join(sorted(set(string.printable) - set(string.whitespace)))


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, proto: bytes):
        self.serialised = proto  # the bytes of the model file
        # SentencePiece is a C++ extension whose stubs disagree between releases, hence Any.
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        if not proto or not self._processor.LoadFromSerializedProto(proto):
            raise ModelError("the SentencePiece model is empty")
        self._control = {
            name: self._processor.piece_to_id(f"<|{name}|>")
            for name in MARKS
            if self._processor.is_control(self._processor.piece_to_id(f"<|{name}|>"))
        }
        missing = [name for name in MARKS if name not in self._control]
        if missing or self._control["pad"] != 0:
            raise ModelError(
                f"its control pieces {missing or ['pad']} are missing or not where they should be"
            )
        self._bytes = [self._piece_bytes(index) for index in range(self.vocab_size)]
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_BYTES]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read the model file that `train` wrote."""
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise ModelError(
                f"tokenizer {path} cannot be read ({error.strerror}); "
                "point to a folder that holds one"
            ) from error
        except (RuntimeError, ModelError) as error:
            raise ModelError(
                f"tokenizer {path} is not a usable SentencePiece model ({error}); "
                "restore the file or train it again"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, control pieces and bytes included."""
        return self._processor.vocab_size()

    @property
    def pad_id(self) -> int:
        """Id that fills unused positions."""
        return 0

    def control(self, name: str) -> int:
        """Id of the chat mark `name`, one of `MARKS`."""
        if name not in self._control:
            raise ModelError(f"there is no chat mark {name!r}; expected one of {', '.join(MARKS)}")
        return self._control[name]

    def encode(self, text: str) -> list[int]:
        """Turn plain text into ids, never a control id; lone surrogates become '?'."""
        # A literal U+2581 would come back as a space, so it is spelt in bytes.
        ids: list[int] = []
        for index, part in enumerate(text.encode("utf-8", errors="replace").split(_SPACE_BYTES)):
            if index:
                ids += self._space_ids
            ids += self._processor.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text: control ids vanish, and bytes that are not UTF-8 become U+FFFD."""
        return b"".join([self._bytes[index] for index in ids]).decode("utf-8", errors="replace")

    def _piece_bytes(self, index: int) -> bytes:
        piece = self._processor.id_to_piece(index)
        if self._processor.is_control(index) or self._processor.is_unknown(index):
            return b""
        if self._processor.is_byte(index):
            return bytes([int(piece[1:-1], 16)])
        return piece.replace(_SPACE, " ").encode()


def train(
    texts: Iterable[str],
    path: str | os.PathLike[str],
    vocab_size: int,
    words: Sequence[str] = (),
) -> Tokenizer:
    """Fit a tokenizer to `texts`, write it to `path`, return it; equal texts give equal bytes.

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
            control_symbols=[f"<|{name}|>" for name in MARKS[2:]],
            pad_id=0,
            pad_piece="<|pad|>",
            bos_id=1,
            bos_piece="<|bos|>",
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
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(buffer.getvalue())
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ModelError(
            f"tokenizer {target} cannot be written ({error.strerror}); free some space or name a "
            "folder that can be written"
        ) from error
    return Tokenizer.load(target)
