"""Untrusted text on a terminal: what a program or a model wrote is shown, never obeyed.

A terminal acts on control characters: it can be made to set the clipboard, to rename its window, to
overwrite what stands above, or to show text in another order than it is stored. Here each of them
becomes a visible escape. What letters look like, and what a text claims, is not judged.
"""

import os
import sys
import unicodedata

from spade_jax.errors import SpadeError


def say(*lines: str) -> None:
    """Print lines at once.

    Raises:
        BrokenPipeError: nobody reads them.
        SpadeError: they cannot be written.
    """
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        mute()
        raise SpadeError(f"standard output cannot be written: {error.strerror}") from error


def mute() -> None:
    """Have what is buffered for standard output, and all that comes, go nowhere: it would be tried
    again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def visible(text: str) -> str:
    """`text` on one line: line breaks, tabs and all else that does not print are escaped."""
    return "".join(map(_shown, text))


def visible_lines(text: str) -> list[str]:
    """The lines of `text`, split where a reader expects it; tabs are kept."""
    lines = text.replace("\r\n", "\n").split("\n")
    return ["\t".join(map(visible, line.split("\t"))) for line in lines]


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return ascii(character)[1:-1]
