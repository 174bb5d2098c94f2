"""Read the JSON files of a checkpoint, which are untrusted: only plain files of a sane size, so
that a pipe or a device never hangs the reader or fills the memory.
"""

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 2**27  # four times the largest tokenizer.json of a public model


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError, ValueError: it is no plain file, too large, or not JSON.
    """
    try:
        return json.loads(read_plain(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_plain(path: Path) -> bytes:
    """Return the bytes of a plain file.

    Raises:
        OSError, ValueError: it cannot be read, is no plain file, or is too large.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError("it is not a plain file")
    if size > MAX_BYTES:
        raise ValueError(f"it has {size} bytes, expected at most {MAX_BYTES}")
    return path.read_bytes()
