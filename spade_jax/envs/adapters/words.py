"""A word list for games that want the one nltk downloads: that of Reasoning Gym, which comes in its
wheel.

Nothing is downloaded and no file is written: nltk's reader is replaced in the process.
"""

import contextlib
import functools
import importlib
import re
from typing import Any


class Words:
    """What games use of `nltk.corpus.words`."""

    def words(self, fileids: str = "en") -> list[str]:
        """All words, or for `en-basic` those that a short novel uses."""
        return list(_basic() if fileids == "en-basic" else _all())


def install() -> None:
    """Put the list in nltk's place, if both packages are there."""
    with contextlib.suppress(ImportError):
        nltk: Any = importlib.import_module("nltk")
        nltk.download = lambda *arguments, **options: False
        corpus: Any = importlib.import_module("nltk.corpus")
        _basic()  # read while files can be
        corpus.words = Words()


@functools.cache
def _all() -> tuple[str, ...]:
    return tuple(_read("words3to10.txt").split())


@functools.cache
def _basic() -> tuple[str, ...]:
    used = set(re.findall(r"[a-z]+", _read("in_the_year_2889.txt")))
    return tuple(word for word in _all() if word in used)


def _read(name: str) -> str:
    return importlib.import_module("reasoning_gym.data").read_data_file(name)
