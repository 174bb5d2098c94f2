"""Folders of safetensors files: mapped for reading, streamed for writing. Nothing is unpickled.

Reading maps the files, so a tensor costs no memory of its own until it is copied. A folder holds
`model.safetensors`, or several files and `model.safetensors.index.json`. Only float32, float16 and
bfloat16 are read: other formats are quantised, and a quantised model is another model.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from models.errors import ModelError
from models.json_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
ADVICE = (
    "these files can run code when opened, so they are never read: take the checkpoint's "
    "safetensors, or save it as such with save_pretrained(..., safe_serialization=True)"
)


class SafetensorsFolder:
    """The tensors of one checkpoint folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._tensors: dict[str, tuple[np.memmap, dict[str, Any]]] = {}
        homes: dict[str, str] = {}
        index = _read_index(folder)
        for shard in _shards(folder, index):
            data, header = _open(folder / shard)
            for name, entry in header.items():
                if name in homes:
                    raise ModelError(
                        f"{folder}: the tensor {name} is in {homes[name]} and in {shard}; keep one"
                    )
                if index is not None and index.get(name) != shard:
                    raise ModelError(
                        f"{folder / shard} holds {name}, which {INDEX} places in "
                        f"{index.get(name, 'no file')}; take the checkpoint's own files again"
                    )
                homes[name] = shard
                self._tensors[name] = (data, entry)
        if missing := sorted((index or {}).keys() - homes.keys()):
            raise ModelError(
                f"{folder}: {INDEX} names {missing[0]} in {(index or {})[missing[0]]}, which does "
                f"not hold it ({len(missing)} such tensors); take the files again"
            )

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name][1]["shape"])

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a tensor; one that is not a plain float is refused."""
        found = self._tensors[name][1]["dtype"]
        if found not in DTYPES:
            raise ModelError(
                f"{self.where}: {name} is {found}, expected one of {', '.join(DTYPES)}; convert a "
                "checkpoint that is not quantised"
            )
        return DTYPES[found]

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a view of the mapped file."""
        data, entry = self._tensors[name]
        start, end = entry["data_offsets"]
        flat = np.asarray(data)[start:end].view(self.dtype(name))
        # Some writers do not align tensors; what copies them later would stumble.
        flat = flat if flat.flags.aligned else flat.copy()
        return flat.reshape(self.shape(name))


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return which shard each tensor is in; None when there is a single file."""
    path = folder / INDEX
    if (folder / SINGLE).is_file() or not path.exists():
        return None
    try:
        index = read_json(path)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is not an index of shards ({error}); take it again") from error
    if not isinstance(index, dict) or not index:
        raise ModelError(f"{path}: weight_map names no tensors; take it again")
    for name, shard in index.items():
        # A plain name: no other folder is ever read, whatever the index says.
        if not isinstance(shard, str) or not re.fullmatch(r"[\w\-]+(\.[\w\-]+)*", shard):
            raise ModelError(
                f"{path} places {name} in {shard!r}, which is not a file name within the folder"
            )
        if not shard.endswith(".safetensors"):
            raise ModelError(f"{path} places {name} in {shard!r}, expected a .safetensors file")
    return index


def _shards(folder: Path, index: Mapping[str, str] | None) -> list[str]:
    """Return the files to open, all of which are there."""
    if index is None:
        if (folder / SINGLE).is_file():
            return [SINGLE]
        found = sorted(path.name for path in folder.iterdir())
        if pickles := [name for name in found if name.endswith(PICKLES)]:
            raise ModelError(f"{folder} has its weights in {pickles[0]}; {ADVICE}")
        if ggufs := [name for name in found if name.endswith(".gguf")]:
            raise ModelError(f"{folder} holds {ggufs[0]}; name that file itself as the source")
        raise ModelError(
            f"{folder} holds neither {SINGLE} nor {INDEX}; expected a Hugging Face checkpoint"
        )
    shards = sorted(set(index.values()))
    if missing := [shard for shard in shards if not os.path.isfile(folder / shard)]:
        raise ModelError(
            f"{folder / INDEX} names {missing[0]}, which is not there ({len(missing)} of "
            f"{len(shards)} files are missing); download it"
        )
    return shards


def _open(path: Path) -> tuple[np.memmap, dict[str, dict[str, Any]]]:
    """Map the data of one file and return its header."""
    try:
        with safe_open(path, framework="numpy"):  # checks sizes, offsets and overlaps
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        size = path.stat().st_size - 8 - length
        if size == 0:  # of empty tensors only; an empty file cannot be mapped
            raise ModelError(f"{path} holds no data; take it again")
        return np.memmap(path, np.uint8, "r", 8 + length, (size,)), header
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not a whole safetensors file ({error}); download or copy it again"
        ) from error


def plan_shards(
    entries: Sequence[tuple[str, tuple[int, ...], np.dtype]], shard_bytes: int
) -> list[list[tuple[str, tuple[int, ...], np.dtype]]]:
    """Cut a list of tensors into files of at most `shard_bytes`, or a single larger tensor."""
    shards: list[list[tuple[str, tuple[int, ...], np.dtype]]] = []
    used = shard_bytes + 1
    for entry in entries:
        size = nbytes(entry[1], entry[2])
        if used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += size
    return shards


def nbytes(shape: Iterable[int], dtype: np.dtype) -> int:
    """Return the size of a tensor without numpy's overflow."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def write_folder(
    folder: Path,
    entries: Sequence[tuple[str, tuple[int, ...], np.dtype]],
    tensors: Iterator[np.ndarray],
    shard_bytes: int,
) -> None:
    """Write tensors, which come in the order of `entries`, one at a time, and their index."""
    shards = plan_shards(entries, shard_bytes)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb") as file:
            _write_header(file, shard)
            for public, shape, dtype in shard:
                tensor = next(tensors)
                assert tensor.shape == shape and tensor.dtype == dtype, public
                file.write(np.ascontiguousarray(tensor).view(np.uint8).reshape(-1).data)
                index[public] = name
    if len(shards) > 1:
        total = sum(nbytes(shape, dtype) for _, shape, dtype in entries)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / INDEX).write_text(text + "\n")


def _write_header(file: BinaryIO, shard: Sequence[tuple[str, tuple[int, ...], np.dtype]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in shard:
        end = offset + nbytes(shape, dtype)
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    file.write(len(text).to_bytes(8, "little") + text)
