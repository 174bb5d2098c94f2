"""Untrusted text on a terminal: what a program or a model wrote is shown, never obeyed.

A terminal acts on control characters: it can be made to set the clipboard, to rename its window, to
overwrite what stands above, or to show text in another order than it is stored. Here each of them
becomes a visible escape. What letters look like, and what a text claims, is not judged.
"""

import contextlib
import functools
import os
import sys
import unicodedata
from collections.abc import Iterator

from spade_jax.errors import SpadeError


def say(*lines: str, end: str = "\n") -> None:
    """Print lines at once.

    Raises:
        BrokenPipeError: nobody reads them.
        SpadeError: they cannot be written.
    """
    try:
        print(*lines, sep="\n", end=end, flush=True)
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


def typed(note: str, max_bytes: int) -> Iterator[str]:
    """One text a line from standard input until it ends; blank lines are none.

    A person at a terminal sees `note` and may edit the line; what is piped in is shown as if typed.

    Raises:
        SpadeError: a line is not text, or has more than `max_bytes`.
    """
    if sys.stdin is None:  # closed by whoever started this
        return
    if sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty():
        yield from _typed_by_hand(note)
        return
    read = functools.partial(sys.stdin.buffer.readline, max_bytes + 1)
    for number, line in enumerate(iter(read, b""), 1):
        if len(line) > max_bytes:
            raise SpadeError(f"line {number} of standard input has more than {max_bytes} bytes")
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SpadeError(
                f"line {number} of standard input is not UTF-8 text: {error}"
            ) from error
        if text:
            say(f"> {visible(text)}")
            yield text


def _typed_by_hand(note: str) -> Iterator[str]:
    with contextlib.suppress(ImportError):  # not in every Python; it lets a line be edited
        import readline  # noqa: F401
    say(f"({note})")
    while True:
        try:
            text = input("> ")
        except EOFError:
            say("")
            return
        except UnicodeDecodeError:
            text = "\udcff"
        if not encodable(text):
            say("(that is not UTF-8 text; try again)")
        elif text:
            yield text


def encodable(text: str) -> bool:
    """Whether UTF-8 can hold `text`: no surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return ascii(character)[1:-1]
