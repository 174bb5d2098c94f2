"""Public checkpoints in, the same model, out again: Hugging Face or GGUF to Orbax, and back.

Everything about a source is checked before the first byte is written: architecture, every tensor's
name, shape and dtype, the tokenizer, and the space on the disk. Then one group of parameters after
the other goes to disk, so memory is that of the largest group. Values are not changed: each tensor
keeps its dtype unless another is asked for.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from models import stored, tensors
from models.config import CONFIG_FILE, TransformerConfig, read_config
from models.errors import ModelError
from models.gguf_file import GGUFFile
from models.gguf_tokenizer import write_tokenizer
from models.hf import FAMILIES, from_hf, to_hf
from models.json_file import read_json
from models.shards import ADVICE, PICKLES, SafetensorsFolder, nbytes, write_folder
from models.tensors import Tensor
from models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9  # of one exported file
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(jnp.bfloat16),
}
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # one of them is needed
TOKENIZER_FILES = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)
LEGACY = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors that old writers stored though they follow from the config."""

FINITE_BLOCK = 2**22  # values looked at together when a tensor is checked


Source = SafetensorsFolder | GGUFFile
"""A checkpoint under its Hugging Face names."""


def import_checkpoint(
    source: Path, target: Path, *, dtype: str | None = None, tokenizer: Path | None = None
) -> TransformerConfig:
    """Convert a Hugging Face folder or a GGUF file to a folder that `load_weights` reads.

    Args:
        dtype: of the stored tensors; None keeps the source's.
        tokenizer: a folder to take the tokenizer from; None takes the source's.
    """
    check_paths(source, target)
    checkpoint, config, hf_config = _open(source)
    wanted = None if dtype is None else DTYPES[dtype]
    _check_tensors(config, checkpoint, one_dtype=wanted is None)
    total = sum(
        nbytes(tensor.shape, wanted or checkpoint.dtype(tensor.parts[0]))
        for tensor in tensors.all_tensors(config)
    )
    _check_space(target, total)
    with stored.new_folder(target) as folder:
        _bring_tokenizer(source, tokenizer, checkpoint, config, folder)
        _write_json(folder / stored.HF_CONFIG, hf_config)
        names = tensors.group_names(config)
        for index, name in enumerate(names):
            arrays = {
                tensor.name: _join(checkpoint, tensor, wanted)
                for tensor in tensors.group(config, name)
            }
            stored.write_group(folder, name, arrays)
            if index % max(1, len(names) // 10) == 0:
                logger.info("%d of %d groups of weights are on disk", index + 1, len(names))
        stored.finish(folder, dataclasses.asdict(config))
    return config


def check_paths(source: Path, target: Path) -> None:
    """Refuse a source that is not there, and a destination that is, or lies within the source."""
    # os.path has no error for a name that is too long or a link to itself, where Path has several.
    if not os.path.exists(source):
        raise ModelError(f"{source} does not exist; name a checkpoint folder or a .gguf file")
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if here == there:
        raise ModelError(f"source and destination are both {source}; name another destination")
    if here.is_dir() and here in there.parents:
        raise ModelError(f"{target} lies within the source {source}; name a place outside of it")
    if os.path.lexists(target):
        raise ModelError(f"{target} already exists; name a folder that does not, or remove it")
    try:
        str(target.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{str(target)!r} is not UTF-8, which Orbax needs; name another folder"
        ) from error


def _open(source: Path) -> tuple[Source, TransformerConfig, dict[str, Any]]:
    if source.suffix in PICKLES:
        raise ModelError(f"{source} is not read: {ADVICE}")
    if source.is_file() and source.suffix == ".gguf":
        file = GGUFFile(source)
        return file, file.config, file.hf_config
    if not source.is_dir():
        raise ModelError(
            f"{source} is neither a folder nor a .gguf file; name the checkpoint's folder"
        )
    if stored.is_stored(source):
        raise ModelError(f"{source} is converted already; --to hf turns it back")
    hf_config = _read_json(source / CONFIG_FILE)
    config = from_hf(hf_config, str(source / CONFIG_FILE))
    return SafetensorsFolder(source), config, hf_config


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); take it again") from error


def _check_tensors(config: TransformerConfig, source: Source, *, one_dtype: bool) -> None:
    """Refuse tensors that are missing, of another shape or dtype, or of no known use."""
    found = {name for name in source.names() if not LEGACY.fullmatch(name)}
    # Counted before the names are listed: a damaged config may speak of any number of them.
    count = config.num_layers * (3 * config.num_experts + 6)
    if count > 2 * len(found) + 1000:
        raise ModelError(
            f"{source.where}: the config asks for more than {count} tensors "
            f"(num_hidden_layers={config.num_layers}, experts={config.num_experts}), and there are "
            f"{len(found)}; take the checkpoint's own config"
        )
    expected = list(tensors.all_tensors(config))
    names = {part for tensor in expected for part in tensor.parts}
    repeated = config.tied_head and "lm_head.weight" in found
    found -= {"lm_head.weight"} if repeated else set()
    if missing := sorted(names - found):
        raise ModelError(
            f"{source.where}: {len(missing)} tensors are missing, such as {', '.join(missing[:3])}"
            + (f"; {len(found - names)} have no use" if found - names else "")
            + "; the config is of another model, or the checkpoint is not whole"
        )
    if unknown := sorted(found - names):
        raise ModelError(
            f"{source.where}: {len(unknown)} tensors have no use in a {config.family} model, such "
            f"as {', '.join(unknown[:3])}; the config is of another model"
        )
    for tensor in expected:
        for part in tensor.parts:
            if source.shape(part) != tensor.part_shape:
                raise ModelError(
                    f"{source.where}: {part} has shape {source.shape(part)}, but the config asks "
                    f"for {tensor.part_shape}"
                )
        dtypes = [source.dtype(part) for part in tensor.parts]
        if one_dtype and len(set(dtypes)) > 1:
            other = next(index for index, dtype in enumerate(dtypes) if dtype != dtypes[0])
            raise ModelError(
                f"{source.where}: {tensor.parts[other]} is {dtypes[other]}, but {tensor.parts[0]} "
                f"is {dtypes[0]}, and they become one parameter; name a dtype for all by --dtype"
            )
    if repeated:
        _check_tied(source)


def _check_tied(source: Source) -> None:
    """Refuse a head that differs from the embedding it is said to be."""
    embedding, head = source.read("model.embed_tokens.weight"), source.read("lm_head.weight")
    same = embedding.shape == head.shape and embedding.dtype == head.dtype
    if not same or not all(
        np.array_equal(_bits(a), _bits(b)) for a, b in zip(embedding, head, strict=True)
    ):
        raise ModelError(
            f"{source.where}: lm_head.weight differs from model.embed_tokens.weight, but "
            "config.json says tie_word_embeddings=true; set it to false to keep the head"
        )


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _join(source: Source, tensor: Tensor, dtype: np.dtype | None) -> np.ndarray:
    parts = []
    for name in tensor.parts:
        part = source.read(name)
        if not _finite(part):
            raise ModelError(
                f"{source.where}: {name} holds NaN or infinity; take the checkpoint again"
            )
        parts.append(part if dtype is None else _cast(part, dtype, source.where, name))
    return tensor.join(parts)


def _cast(array: np.ndarray, dtype: np.dtype, where: str, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if not _finite(result):
        raise ModelError(
            f"{where}: {name} does not fit {dtype}, whose largest value is smaller; use bfloat16 "
            "or float32"
        )
    return result


def _finite(array: np.ndarray) -> bool:
    """Whether all values are finite, a block at a time."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)
    return all(
        bool(np.isfinite(flat[start : start + FINITE_BLOCK]).all())
        for start in range(0, flat.size, FINITE_BLOCK)
    )


def _check_space(target: Path, needed: int) -> None:
    parent = next(path for path in target.absolute().parents if os.path.exists(path))
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ModelError(
            f"{target} needs {needed / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free; free "
            "some or name a folder on another disk"
        )


def _bring_tokenizer(
    source: Path,
    given: Path | None,
    checkpoint: Source,
    config: TransformerConfig,
    folder: Path,
) -> None:
    """Copy the tokenizer's files, or build one from a GGUF file, and check its size."""
    built = given is None and isinstance(checkpoint, GGUFFile)
    home = folder if built else given or source
    if isinstance(checkpoint, GGUFFile) and built:
        write_tokenizer(checkpoint.metadata, checkpoint.where, folder)
    else:
        copy_tokenizer(home, folder)
    size = _tokenizer_size(home)
    if size > config.vocab_size:
        raise ModelError(
            f"{given or source}: the tokenizer has {size} ids, but the embedding has "
            f"{config.vocab_size} rows; take the tokenizer of this checkpoint"
        )
    try:
        load_tokenizer(folder)
    except ModelError as error:
        logger.warning("the weights come in, but train cannot use the tokenizer: %s", error)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation settings as they are."""
    if not any((source / name).is_file() for name in TOKENIZERS):
        raise ModelError(
            f"{source} holds no tokenizer: expected {' or '.join(TOKENIZERS)}; put it there or "
            "name a folder that has it with --tokenizer"
        )
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            if name.endswith(".json") and not isinstance(_read_json(source / name), dict):
                raise ModelError(f"{source / name} is not a JSON object; take it again")
            shutil.copyfile(source / name, folder / name)


def _tokenizer_size(folder: Path) -> int:
    """Return one more than the largest id."""
    path = folder / TOKENIZERS[0]
    if not path.is_file():
        return _sentencepiece_size(folder / TOKENIZERS[1])
    values = _read_json(path)
    try:
        ids = [token["id"] for token in values.get("added_tokens") or []]
        vocab = values["model"]["vocab"]
        # A list is of a unigram model, whose ids are positions.
        ids += vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        if bad := [index for index in ids if type(index) is not int or index < 0]:
            raise ValueError(f"{bad[0]!r} is no id")
        return max(ids) + 1
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not a tokenizer ({error!r}); take it again") from error


def _sentencepiece_size(path: Path) -> int:
    import sentencepiece

    # A C++ extension whose stubs disagree between releases, hence Any.
    processor: Any = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(str(path))
        return processor.vocab_size()
    except (RuntimeError, OSError) as error:
        raise ModelError(f"{path} is not a SentencePiece model; take it again") from error


@runtime_checkable
class Weights(Protocol):
    """Parameters under our names, a group at a time."""

    where: str

    def dtypes(self, group: str) -> dict[str, np.dtype]: ...
    def read(self, group: str) -> dict[str, np.ndarray]: ...


class StoredWeights:
    """The parameters of a converted folder."""

    def __init__(self, folder: Path) -> None:
        if not stored.is_stored(folder):
            raise ModelError(
                f"{folder} is not a folder made by `spade-jax convert`; name one that is"
            )
        self.where, self._folder = str(folder), folder
        self.config = read_config(folder)
        stored.check_files(folder)

    def dtypes(self, group: str) -> dict[str, np.dtype]:
        """Return the dtypes of a group, whose names and shapes are those of the config."""
        return stored.check_group(self._folder, self.config, group)

    def read(self, group: str) -> dict[str, np.ndarray]:
        """Return a group in host memory."""
        names = [tensor.name for tensor in tensors.group(self.config, group)]
        return stored.read_group(self._folder, group, dict.fromkeys(names))


def export_checkpoint(
    weights: Weights,
    config: TransformerConfig,
    tokenizer: Path,
    target: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write parameters as a Hugging Face checkpoint.

    Args:
        tokenizer: the folder of the tokenizer, and of the public config where there is one.
        dtype: of the written tensors; None keeps that of the weights.
    """
    hf_config = public_config(tokenizer, config)
    entries = []
    for group in tensors.group_names(config):
        found = weights.dtypes(group)
        for tensor in tensors.group(config, group):
            kind = found[tensor.name] if dtype is None else DTYPES[dtype]
            entries += [(part, tensor.part_shape, kind) for part in tensor.parts]
    kinds = {entry[2].name for entry in entries}
    hf_config["torch_dtype" if "torch_dtype" in hf_config else "dtype"] = (
        kinds.pop() if len(kinds) == 1 else "float32"
    )
    _check_space(target, sum(nbytes(shape, kind) for _, shape, kind in entries))

    def written() -> Iterator[np.ndarray]:
        for group in tensors.group_names(config):
            arrays = weights.read(group)
            for tensor in tensors.group(config, group):
                whole = arrays.pop(tensor.name)
                if dtype is not None:
                    whole = _cast(whole, DTYPES[dtype], weights.where, f"{group}.{tensor.name}")
                yield from tensor.split(whole)

    with stored.new_folder(target) as folder:
        copy_tokenizer(tokenizer, folder)
        write_folder(folder, entries, written(), shard_bytes)
        _write_json(folder / CONFIG_FILE, hf_config)
        stored.flush(folder)


def store(
    weights: Weights,
    config: TransformerConfig,
    tokenizer: Path,
    target: Path,
    *,
    dtype: str | None = None,
) -> None:
    """Write parameters as a folder that `load_weights` reads.

    Args:
        tokenizer: the folder of the tokenizer, and of the public config where there is one.
    """
    names = tensors.group_names(config)
    total = 0
    for name in names:
        found = weights.dtypes(name)
        for tensor in tensors.group(config, name):
            kind = found[tensor.name] if dtype is None else DTYPES[dtype]
            total += nbytes(tensor.shape, kind)
    _check_space(target, total)
    with stored.new_folder(target) as folder:
        copy_tokenizer(tokenizer, folder)
        if config.family in FAMILIES:
            _write_json(folder / stored.HF_CONFIG, public_config(tokenizer, config))
        for name in names:
            arrays = weights.read(name)
            if dtype is not None:
                arrays = {
                    key: _cast(array, DTYPES[dtype], weights.where, f"{name}.{key}")
                    for key, array in arrays.items()
                }
            stored.write_group(folder, name, arrays)
        stored.finish(folder, dataclasses.asdict(config))


def public_config(folder: Path, config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json that a checkpoint came with, or one made for it where it is gone."""
    made = to_hf(config)
    path = folder / stored.HF_CONFIG
    if not path.is_file():
        if from_hf(made, config.family) != config:
            raise ModelError(
                f"the model is no {config.family} model that others compute alike: its "
                f"{_differences(config, from_hf(made, config.family))} cannot be said in a public "
                "config.json; set them so before training"
            )
        return made
    values = _read_json(path)
    if from_hf(values, str(path)) != config:
        raise ModelError(
            f"{path} is of another model than the weights; remove it to have one made, or convert "
            "the checkpoint again"
        )
    return values


def _differences(config: TransformerConfig, public: TransformerConfig) -> str:
    names = [field.name for field in dataclasses.fields(config)]
    return ", ".join(
        f"{name}={getattr(config, name)} (expected {getattr(public, name)})"
        for name in names
        if getattr(config, name) != getattr(public, name)
    )


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
