"""Load parameters onto their devices, and save small ones.

Two kinds of folders are read: those of converted checkpoints (`models.stored`), and our own small
ones, a single safetensors file with a tensor per parameter and layer. The latter are written here
under a temporary name and renamed, the config last, so a folder never holds half a file. Nothing is
pickled. Optimiser state is not here.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models import layout
from models.config import CONFIG_FILE, TransformerConfig, read_config
from models.errors import ModelError
from models.execution import PLAIN, Execution
from models.restore import check_room, load_stored
from models.sharding import param_shardings
from models.stored import is_stored
from models.transformer import Params, abstract_params

WEIGHTS_FILE = "model.safetensors"


def named_leaves(params: Params) -> Iterator[tuple[str, jax.Array]]:
    """Yield each parameter of each layer with its dotted name, such as `blocks.0.moe.down`.

    From a stack of layers one is cut at a time.
    """
    for path, leaf in nnx.to_flat_state(params):
        value = leaf.get_value()
        if path[0] == "blocks" and layout.is_stacked(params):
            for index in range(value.shape[0]):
                yield _dotted(("blocks", index, *path[1:])), value[index]
        else:
            yield _dotted(path), value


def _dotted(path: Iterable[object]) -> str:
    return ".".join(str(part) for part in path)


def save_weights(
    folder: str | Path, config: TransformerConfig, params: Params, dtype: str = "bfloat16"
) -> None:
    """Write parameters, rounded to `dtype`, and the config."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made ({error}); pick another folder") from error
    arrays = {
        name: np.ascontiguousarray(np.asarray(jax.device_get(leaf)).astype(jnp.dtype(dtype)))
        for name, leaf in named_leaves(params)
    }
    text = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
    _replace(folder / WEIGHTS_FILE, lambda path: save_file(arrays, path))
    _replace(folder / CONFIG_FILE, lambda path: path.write_text(text))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, flush to disk, then rename over it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} cannot be written ({error}); free space or pick another folder"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def load_weights(
    folder: str | Path,
    config: TransformerConfig,
    mesh: Mesh | None = None,
    execution: Execution = PLAIN,
) -> Params:
    """Read parameters in `execution.param_dtype` into its layout, each onto its devices when a mesh
    is given.
    """
    folder = Path(folder)
    _check_config(folder, config)
    check_room(config, mesh, execution)
    if is_stored(folder):
        return load_stored(folder, config, mesh, execution)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(f"{path} does not exist; point to a folder written by save_weights")
    layers = layout.per_layer(abstract_params(config, execution))
    expected = {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(layers)}
    try:
        with safe_open(path, framework="numpy") as file:
            _check_names(folder, expected.keys(), set(file.keys()))
            arrays = {
                name: _read(file, folder, name, shape).astype(dtype)
                for name, (shape, dtype) in expected.items()
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a readable safetensors file ({error}); write or copy it again"
        ) from error
    params = jax.tree.unflatten(jax.tree.structure(layers), list(arrays.values()))
    if execution.layers == "scanned":
        params = layout.stacked(params)
    if mesh is None:
        return jax.tree.map(jnp.asarray, params)
    return jax.tree.map(
        lambda value, sharding: jax.make_array_from_callback(
            value.shape, sharding, value.__getitem__
        ),
        params,
        param_shardings(config, mesh, execution),
    )


def _read(file, folder: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return one tensor as float32 after checking its shape and values."""
    tensor = file.get_tensor(name)
    if tensor.shape != shape:
        raise ModelError(
            f"tensor {name} in {folder} has shape {tensor.shape}, but the config asks for {shape}; "
            "use the config the weights were saved with"
        )
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise ModelError(
            f"tensor {name} in {folder} is {tensor.dtype}, not a float; write it again"
        )
    tensor = tensor.astype(np.float32)
    if not np.isfinite(tensor).all():
        raise ModelError(
            f"tensor {name} in {folder} holds NaN or infinity; use an earlier copy of the weights"
        )
    return tensor


def _check_config(folder: Path, config: TransformerConfig) -> None:
    saved = read_config(folder)
    differing = [
        f"model.{field.name}={getattr(config, field.name)} (saved: {getattr(saved, field.name)})"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(saved, field.name)
    ]
    if differing:
        raise ModelError(
            f"the weights in {folder} are of another model: {', '.join(differing)}; set the fields "
            "as saved, or in a config file model=models.config.read_config(folder)"
        )


def _check_names(folder: Path, expected, found: set[str]) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing or extra:
        raise ModelError(
            f"tensors in {folder} do not match the config: missing {missing or 'none'}, "
            f"unexpected {extra or 'none'}; use the config the weights were saved with"
        )
