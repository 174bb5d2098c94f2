"""Public environments, played like any other program: a short text that names a package and one of
its environments.

    program("reasoning_gym", "chain_sum")  ->  the text for `Pool.open`
    catalogue("reasoning_gym")             ->  what the package offers, listed in another process

Such a text starts with a line that names its package. A pool that was made with that package gives
it a worker whose zygote has imported the package; in any other pool it is refused. So nothing of a
package is ever imported where jax runs. Reading order: this module (the trainer's side), `base`,
then a module for each package (the worker's side: standard library, and the package by its name).

Hash order is the same in all workers of a package, as a few of Reasoning Gym's datasets depend on
it. Not here: judging whether a package is any good. Its instances, scorer and rewards are taken as
they are, rewards cut to [-1, 1].
"""

import importlib.util
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spade_jax.envs import limits
from spade_jax.errors import SandboxError

PACKAGES = {
    "reasoning_gym": "reasoning_gym",
    "rlve": "Gym",
    "textarena": "textarena",
    "gem": "gem",
    "bfcl": "bfcl_eval",
}
"""Module that each package is imported by."""

_INSTALL = "pip install 'spade-jax[environments]' (and see BUILD.md for bfcl and Python 3.12)"
_HEADER = re.compile(r"# package: (\w+)\n")
_LIST_S = 120.0


class Listed(NamedTuple):
    """One environment of a package."""

    id: str
    family: str  # what it shares with its variants of another size, and with copies elsewhere
    unseeded: str  # why its seed does not fix it; "" if it claims that


def program(package: str, identifier: str, **options: Any) -> str:
    """The program that plays one environment of a package.

    Args:
        package: one of `PACKAGES`.
        identifier: as in the catalogue of the package. It is looked up when the program is played.
        options: settings of the environment in the package's own words; plain data.

    Raises:
        ValueError: there is no such package, or the options are not plain data.
    """
    _known(package)
    try:
        plain = json.loads(json.dumps(options, allow_nan=False)) == options
    except (TypeError, ValueError):
        plain = False
    if not plain:
        raise ValueError(f"options={options!r} are not plain data; use what JSON can hold")
    return (
        f"# package: {package}\n"
        f"from spade_jax.envs.adapters.{package} import Adapter\n\n\n"
        f"class PublicEnv(Adapter):\n"
        f"    identifier = {identifier!r}\n"
        f"    options = {options!r}\n"
    )


def package_of(text: str) -> str:
    """The package that a program asks for in its first line; "" for most programs."""
    header = _HEADER.match(text)
    return header[1] if header else ""


def require(packages: Sequence[str], package_path: Sequence[str] = ()) -> None:
    """Raise unless each package can be found, here or in a folder of `package_path`; nothing is
    imported.

    Raises:
        SandboxError: one is not installed.
    """
    for package in packages:
        module = _known(package)
        if importlib.util.find_spec(module) is None and not any(
            (Path(folder) / module).is_dir() for folder in package_path
        ):
            raise SandboxError(
                f"the environments of {package} need the module {module}, which is not installed; "
                f"install it with {_INSTALL}"
            )


def catalogue(package: str, package_path: Sequence[str] = ()) -> list[Listed]:
    """All environments of a package, sorted; takes seconds, as another process imports it.

    Raises:
        SandboxError: the package is not installed or cannot be imported.
    """
    require([package], package_path)
    done = subprocess.run(
        limits.command("spade_jax.envs.adapters.base", package, json.dumps(list(package_path))),
        env=limits.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIST_S,
    )
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1][:300]
        raise SandboxError(f"{package} cannot be imported: {reason}")
    return sorted(Listed(*entry) for entry in json.loads(done.stdout.splitlines()[-1]))


def parse(text: str) -> tuple[str, str]:
    """Package and identifier of a text such as `gem:game:Sokoban-v0-easy`.

    Raises:
        ValueError: it does not name a package.
    """
    package, _, identifier = text.partition(":")
    _known(package)
    return package, identifier


def _known(package: str) -> str:
    if package not in PACKAGES:
        raise ValueError(f"package={package!r} is not one of {', '.join(PACKAGES)}")
    return PACKAGES[package]
