"""What the project needs of a tokenizer, and the parts that do not depend on its kind.

Text is untrusted: an environment may show `<|im_end|>` and a policy may write it. `encode` spells
such text in ordinary pieces; control ids come from `control` alone, by name. Joining control ids
and text into turns is a chat template's work, and not here.
"""

import abc
import codecs
import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from models.errors import ModelError

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What belongs to a tokenizer in a checkpoint's folder; the first there is the tokenizer itself."""

MAX_VOCAB = 1 << 22  # a file that names a higher id is broken, and its table would fill the memory


class Tokenizer(abc.ABC):
    """Text to token ids and back."""

    def __init__(
        self, files: Mapping[str, bytes], pieces: Sequence[bytes], control_ids: Mapping[str, int]
    ):
        self.files = dict(files)  # file name -> content: what `save` writes
        self.control_ids = dict(control_ids)  # as written, such as "<|im_end|>" -> its id
        self._pieces = list(pieces)  # the bytes that each id stands for; none for a silent mark

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Turn plain text into ids, never a control id; lone surrogates become '?'."""

    @property
    @abc.abstractmethod
    def pad_id(self) -> int:
        """Id that fills unused positions."""

    @property
    @abc.abstractmethod
    def template_text(self) -> str | None:
        """The chat template that came with the tokenizer, as its files spell it."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, control ids included: the fewest rows that an embedding may have."""
        return len(self._pieces)

    @property
    def digest(self) -> str:
        """SHA-256 of the files: two tokenizers with one digest are the same."""
        state = hashlib.sha256()
        for name in sorted(self.files):
            state.update(f"{name}\0{len(self.files[name])}\0".encode())
            state.update(self.files[name])
        return state.hexdigest()

    def control(self, name: str) -> int:
        """Id of the control token that is written `name`, such as `<|im_end|>`."""
        if name not in self.control_ids:
            known = list(self.control_ids)
            more = f" and {len(known) - 12} more" if len(known) > 12 else ""
            raise ModelError(
                f"the tokenizer has no control token {name!r}; it has "
                f"{', '.join(known[:12]) or 'none'}{more}: choose the chat template it was made for"
            )
        return self.control_ids[name]

    def piece(self, index: int) -> bytes:
        """The bytes of one id; none for a silent mark and for ids above the vocabulary.

        An embedding may have more rows than there are pieces, so such ids can be sampled.
        """
        return self._pieces[index] if 0 <= index < len(self._pieces) else b""

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text: silent marks vanish, and bytes that are not UTF-8 become U+FFFD."""
        return b"".join([self.piece(index) for index in ids]).decode("utf-8", errors="replace")

    def stream(self) -> "TextStream":
        """Decode ids as they come."""
        return TextStream(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files into `folder` in place of any other tokenizer's."""
        for name, content in self.files.items():
            write(Path(folder) / name, content)
        for name in set(FILES) - set(self.files):
            (Path(folder) / name).unlink(missing_ok=True)


class TextStream:
    """Text of ids that come one after the other; a character is given out once it is whole.

    What `add` returned so far and then `close` make up `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete."""
        return self._decoder.decode(b"".join([self._tokenizer.piece(index) for index in ids]))

    def close(self) -> str:
        """Return what is left: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def replace_surrogates(text: str) -> str:
    """What of `text` UTF-8 can hold: a lone surrogate, which it cannot, becomes '?'."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def one_line(error: Exception) -> str:
    """What a library said, which may quote a broken file, as one line."""
    return " ".join(str(error).split())


def write(target: Path, content: bytes) -> None:
    """Write a file under another name first, so that it is never seen half-written."""
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ModelError(
            f"tokenizer {target} cannot be written ({error.strerror}); free some space or name a "
            "folder that can be written"
        ) from error
