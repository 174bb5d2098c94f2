"""Documents from the docstrings of installed packages. Standard library only.

`documents` imports every public module of the packages, which may print, warn, patch or crash; so
the corpus runs this module as a program of its own (`extract`) and never imports those modules into
the run. Test modules, private names and set-up scripts are left out, as are the parts of a
docstring that are not prose: examples, references, tables, formulas.
"""

import importlib
import importlib.util
import inspect
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spade_jax.errors import CorpusError

EXTRACT_TIMEOUT_S = 600  # two orders above what numpy and scipy need

_SKIPPED_MODULES = re.compile(r"_.*|tests?|testing|conftest|setup|test_.*|.*_tests?")
_DROPPED = {"Examples", "Example", "References", "See Also", "Methods"}
_FIELDS = {
    "Parameters",
    "Other Parameters",
    "Returns",
    "Yields",
    "Receives",
    "Raises",
    "Warns",
    "Attributes",
}
_UNDERLINE = re.compile(r"[-=~]{3,}\s*")
_SIGNATURE = re.compile(r"[\w.]+\(.*\)(\s*->.*)?")
_ROLE = re.compile(r":[\w:.+-]+:`~?([^`<]*?)\s*(<[^`]*>)?`")
_CITATION = re.compile(r"\s*\[\w+\]_")


def documents(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, cleaned docstring) of each public callable, under its shallowest name."""
    seen: set[str] = set()
    for module in itertools.chain.from_iterable(map(_modules, packages)):
        for name in vars(module).get("__all__") or sorted(vars(module)):
            # `vars`, not `getattr`: aliases served by a module's __getattr__ stay asleep.
            found = vars(module).get(name)
            if name.startswith("_") or not callable(found):
                continue
            text = clean(_docstring(found, module.__name__.partition(".")[0]))
            if text and text not in seen:
                seen.add(text)
                yield f"{module.__name__}.{name}", text


def _modules(package: str) -> Iterator[types.ModuleType]:
    """Import `package` and its public submodules, breadth first, passing over those that fail."""
    waiting = deque([importlib.import_module(package)])
    while waiting:
        module = waiting.popleft()
        yield module
        for info in pkgutil.iter_modules(vars(module).get("__path__", ())):
            if not _SKIPPED_MODULES.fullmatch(info.name):
                # Third-party import code may raise anything at all, SystemExit included.
                try:
                    waiting.append(importlib.import_module(f"{module.__name__}.{info.name}"))
                except (Exception, SystemExit):
                    continue


def _docstring(found: Any, root: str) -> str:
    """Return the docstring of an object that `root` made itself, else nothing."""
    try:
        docstring = found.__doc__
        if inspect.isclass(found) or inspect.isroutine(found):
            own = (found.__module__ or root).partition(".")[0] == root
        else:  # an instance such as a ufunc or a distribution: it must say more than its class
            own = docstring != type(found).__doc__
    except Exception:  # attribute access on third-party objects may raise anything
        return ""
    return docstring if own and isinstance(docstring, str) else ""


def clean(docstring: str) -> str:
    """Return a docstring's prose, one paragraph a line: description and notes, then the fields."""
    prose: list[str] = []
    fields: list[str] = []
    for heading, lines in _sections(inspect.cleandoc(docstring).splitlines()):
        if heading not in _DROPPED:
            (fields if heading in _FIELDS else prose).extend(_paragraphs(lines))
    return "\n\n".join(prose + fields)


def _sections(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Split at underlined headings; the part before the first one has the heading ''."""
    heading, body = "", []
    for index, line in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        if line and not line[0].isspace() and _UNDERLINE.fullmatch(following):
            yield heading, body
            heading, body = line.strip(), []
        else:
            body.append(line)
    yield heading, body


def _paragraphs(lines: Sequence[str]) -> list[str]:
    """Join each paragraph's lines, without doctests, directives, signatures, tables and markup."""
    paragraphs: list[list[str]] = [[]]
    doctest = False
    directive = -1  # indentation of the directive whose body is being skipped
    for line in lines:
        stripped = line.strip()
        indentation = len(line) - len(line.lstrip())
        if not stripped:
            doctest = False
            paragraphs.append([])
            continue
        doctest = doctest or stripped.startswith(">>>")
        if directive >= 0 and indentation <= directive:
            directive = -1
        if directive < 0 and stripped.startswith(".. "):
            directive = indentation
        if (
            doctest
            or directive >= 0
            or _SIGNATURE.fullmatch(stripped)
            or not re.search(r"[a-zA-Z]", stripped)
        ):
            continue
        paragraphs[-1].append(
            _CITATION.sub("", _ROLE.sub(r"\1", stripped)).replace("`", "").replace("::", ":")
        )
    return [" ".join(paragraph) for paragraph in paragraphs if paragraph]


def extract(packages: Sequence[str]) -> list[tuple[str, str]]:
    """Run `documents` over the packages in a child process and return what it found."""
    for package in packages:
        require_installed(package)
    with tempfile.TemporaryDirectory(prefix="spade_jax_") as folder:
        output = Path(folder, "documents.jsonl")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
            "JAX_PLATFORMS": "cpu",  # a package that initialises jax must not take the accelerator
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "spade_jax.roles.docstrings", str(output), *packages]
        try:
            child = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                timeout=EXTRACT_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except subprocess.TimeoutExpired as error:
            raise CorpusError(
                f"reading the docstrings of corpus.packages={tuple(packages)} took over "
                f"{EXTRACT_TIMEOUT_S} s; take out the package that hangs when imported, or set "
                "corpus.path"
            ) from error
        if child.returncode:
            reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise CorpusError(
                f"reading the docstrings of corpus.packages={tuple(packages)} failed with exit "
                f"code {child.returncode} ({reason}); repair or take out that package, or set "
                "corpus.path"
            )
        found = [tuple(json.loads(line)) for line in output.read_bytes().splitlines()]
    if not found:
        raise CorpusError(
            f"corpus.packages={tuple(packages)} have no public docstring; "
            "name others or set corpus.path"
        )
    return found


def require_installed(package: str) -> None:
    """Raise CorpusError unless `package` can be imported here."""
    try:
        found = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise CorpusError(
            f"corpus.packages names {package!r}, which is not installed here; "
            "install it or take it out of the list"
        )


def main(output: str, *packages: str) -> None:
    """Write the documents of `packages` to `output`, one JSON pair a line."""
    warnings.simplefilter("ignore")
    with open(output, "w", encoding="utf-8", errors="replace") as file:
        for pair in documents(packages):
            file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Imported packages may have left threads or exit handlers behind; none of it is needed now.
    os._exit(0)
