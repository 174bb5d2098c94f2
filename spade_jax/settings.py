"""What the sections of a configuration share: their values are checked on construction. Which
settings there are is in `config`.
"""

import dataclasses
import math
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from spade_jax.errors import ConfigError


class Section:
    """Refuses values of another type before ranges are compared: config files are Python."""

    def __init_subclass__(cls) -> None:
        ranges = cls.__dict__.get("__post_init__", lambda self: None)

        def check(self: Any) -> None:
            check_fields(cls.__name__.removesuffix("Config").lower(), self)
            ranges(self)

        cls.__post_init__ = check  # pyright: ignore[reportAttributeAccessIssue]


def check_fields(section: str, values: Any) -> None:
    """Refuse a dataclass one of whose fields holds a value of another type.

    Raises:
        ConfigError: names it as a field of `section`.
    """
    for name, kind in get_type_hints(type(values)).items():
        value = getattr(values, name)
        if not _is_a(value, kind):
            shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise ConfigError(f"{section}.{name}={value!r} is not a valid {shown}")
        if isinstance(value, str) and value.startswith("~"):
            _require_home(f"{section}.{name}", value)
        if dataclasses.is_dataclass(value) and section != "config":  # whose sections check theirs
            check_fields(f"{section}.{name}", value)


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is UnionType:
        return any(_is_a(value, choice) for choice in get_args(kind))
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def _require_home(name: str, value: str) -> None:
    try:
        Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{name}={value!r}: whose home that is, is not known here; write the path out"
        ) from error


def require(condition: bool, name: str, value: Any, expected: str) -> None:
    """Refuse the value of a setting unless the condition holds.

    Raises:
        ConfigError: says what was expected.
    """
    if not condition:
        raise ConfigError(f"{name}={value!r} is out of range: expected {expected}")
