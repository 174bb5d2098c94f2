"""A walk over the header of a GGUF file before the package `gguf` reads it, and what its metadata
must be.

The package trusts lengths: an array that claims 2^60 numbers is one it reads on for ever, beyond
the end of the file, and an offset beyond 2^63 comes round to other bytes. So lengths, counts,
nesting and the place of every tensor are checked here first; values are the package's to read.
"""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from models.errors import ModelError

VERSIONS = (2, 3)
MAX_FIELDS = 2**16
MAX_TENSORS = 2**20
MAX_ELEMENTS = 2**22  # of all arrays together: the package makes an object of each
MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a scalar
_QUANTISED = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
_ALIGNMENT = "general.alignment"

KINDS: dict[str, type] = {
    "general.architecture": str,
    "split.count": int,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.bos_token_id": int,
    "tokenizer.ggml.eos_token_id": int,
    "tokenizer.ggml.padding_token_id": int,
    "tokenizer.ggml.unknown_token_id": int,
    "tokenizer.ggml.add_bos_token": bool,
    "tokenizer.chat_template": str,
}
ARCHITECTURE_KINDS: dict[str, type] = {  # below the architecture's own name
    "attention.sliding_window": int,
    "expert_count": int,
    "expert_weights_norm": bool,
    "rope.scaling.type": str,
    "rope.scaling.factor": float,
}
LISTS: dict[str, type] = {
    "tokenizer.ggml.tokens": str,
    "tokenizer.ggml.token_type": int,
    "tokenizer.ggml.merges": str,
}


def check_header(path: Path) -> None:
    """Refuse a file whose header speaks of more than the file holds."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).check()
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); download it again") from error


def check_kinds(metadata: Mapping[str, Any], where: str) -> None:
    """Refuse metadata that is of another kind than its name says."""
    prefix = f"{metadata.get('general.architecture')}."
    kinds = KINDS | {prefix + name: kind for name, kind in ARCHITECTURE_KINDS.items()}
    for name, kind in kinds.items():
        value = metadata.get(name)
        if value is not None and type(value) is not kind:
            raise ModelError(
                f"{where}: {name}={str(value)[:60]!r} is not of type {kind.__name__}; download the "
                "file again"
            )
    for name, kind in LISTS.items():
        values = metadata.get(name)
        if values is not None and not (
            isinstance(values, list) and all(type(value) is kind for value in values)
        ):
            raise ModelError(
                f"{where}: {name} is not a list of {kind.__name__}; download the file again"
            )


class _Walk:
    """A position in the header; every step checks that the file goes on that far."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._elements = data, 0, 0
        self._alignment = 32

    def check(self) -> None:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ValueError("it is of the other byte order; only little-endian files are read")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, expected 2 or 3")
        tensors, fields = self._number("Q"), self._number("Q")
        if tensors > MAX_TENSORS or fields > MAX_FIELDS:
            raise ValueError(f"it speaks of {tensors} tensors and {fields} fields of metadata")
        for _ in range(fields):
            self._field()
        places = [self._tensor() for _ in range(tensors)]
        start = self._at + -self._at % self._alignment
        end = 0
        for offset, size, name in sorted(places):
            if offset % self._alignment or offset < end or start + offset + size > len(self._data):
                raise ValueError(
                    f"its tensor {name!r} of {size} bytes at {offset} overlaps another, or lies "
                    "beyond the end of the file"
                )
            end = offset + size

    def _take(self, size: int) -> bytes:
        self._skip(size)
        return self._data[self._at - size : self._at]

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"it ends within the header, at {len(self._data)} bytes")
        self._at += size

    def _number(self, form: str) -> int:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(form)))[0]

    def _field(self) -> None:
        name, kind = self._take(self._number("Q")), self._number("I")
        if name == _ALIGNMENT.encode() and kind == 4:
            self._alignment = self._number("I")
            if self._alignment < 1 or self._alignment & (self._alignment - 1):
                raise ValueError(f"{_ALIGNMENT}={self._alignment} is not a power of two")
        elif kind != _ARRAY:
            self._value(kind, 1)
        else:
            kind, count = self._number("I"), self._number("Q")
            self._elements += count
            if self._elements > MAX_ELEMENTS:
                raise ValueError(f"its metadata {name[:60]!r} is a list of {count} values")
            self._value(kind, count)

    def _value(self, kind: int, count: int) -> None:
        """Pass over values of one kind; lists of lists are of no use to any known key."""
        if kind in _SIZES:
            self._skip(_SIZES[kind] * count)
        elif kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            raise ValueError(f"its metadata has a value of kind {kind}")

    def _tensor(self) -> tuple[int, int, bytes]:
        """Return where the data of a tensor begin, their size, and its name."""
        name, dimensions = self._take(self._number("Q"))[:60], self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name!r} has {dimensions} dimensions")
        shape = [self._number("Q") for _ in range(dimensions)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in _QUANTISED:
            raise ValueError(f"its tensor {name!r} is of the unknown quantisation {kind}")
        block, block_bytes = _QUANTISED[kind]
        count = 1
        for length in shape:
            count *= length
        if count < 1 or shape[0] % block:
            raise ValueError(
                f"its tensor {name!r} has the shape {shape}, which is not of blocks of {block}"
            )
        return offset, count // block * block_bytes, name
