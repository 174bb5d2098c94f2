"""The words of a text, so that what says the same reads the same: in lower case, without
punctuation, numbers in digits.

A number may be written out in English, or in the digits of any script. Scripts that set no spaces
between words have a word for each character, and so have signs, such as arrows. Numbers written out
in other languages are words like any other.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese, Japanese, Korean
)
_WORD = re.compile(rf"(?=\w)[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")
_QUOTES = "`^´¨˝|~"  # are symbols to Unicode
_SMALL_NAMES = """zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen"""
_TENS_NAMES = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL: dict[str, int] = dict(zip(_SMALL_NAMES.split(), range(20), strict=True))
_TENS: dict[str, int] = dict(zip(_TENS_NAMES.split(), range(20, 100, 10), strict=True))


def words(text: str) -> list[str]:
    """The words of a text."""
    found = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
    return list(_numbered([word for word in map(_in_digits, found) if _counts(word)]))


def _counts(word: str) -> bool:
    """Whether it is a word or a symbol, not punctuation."""
    return word[0].isalnum() or word[0] == "_" or _is_symbol(word)


def _is_symbol(word: str) -> bool:
    return unicodedata.category(word[0]).startswith("S") and word not in _QUOTES


def _in_digits(word: str) -> str:
    """A word with the digits of any script as 0 to 9."""
    if word.isascii():
        return word
    return "".join(_digit(character) for character in word)


def _digit(character: str) -> str:
    value = unicodedata.numeric(character, -1.0)
    return str(int(value)) if value in range(10) else character


def _numbered(parts: Sequence[str]) -> Iterator[str]:
    """The words with numbers below a thousand in digits: "two hundred and five" is 205."""
    start = 0
    while start < len(parts):
        value, size = _below_hundred(parts, start)
        if 0 < value < 10 and parts[start + size : start + size + 1] == ["hundred"]:
            value, size = 100 * value, size + 1
            linked = parts[start + size : start + size + 1] == ["and"]
            more, more_size = _below_hundred(parts, start + size + linked)
            if more_size:
                value, size = value + more, size + linked + more_size
        yield str(value) if size else parts[start]
        start += size or 1


def _below_hundred(parts: Sequence[str], start: int) -> tuple[int, int]:
    """The number that is written out at `start`, and of how many words it is: none if 0."""
    first, second = (parts[at] if at < len(parts) else "" for at in (start, start + 1))
    if first in _SMALL:
        return _SMALL[first], 1
    if first in _TENS:
        unit = _SMALL.get(second, 0)
        return (_TENS[first] + unit, 2) if 0 < unit < 10 else (_TENS[first], 1)
    return 0, 0
