"""Whether a text tells the answer of an instance: a first observation, or a hint.

Texts and answers are compared as words, as `wording` reads them. What a player could work out is
not judged here, and an answer that has to be decoded (reversed, as a sum) is not found: that is a
task, if a poor one. Of an action that calls tools, only what it fills in counts: the values of the
arguments and the answer. The form of a call is public, and no prose holds it.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spade_jax.envs import tool_calls
from spade_jax.envs.wording import words

LONG = 3  # words from which an answer is not in a text by chance
_FIXED_FRAC = 0.5  # share of the instances that a short answer may stand at one place in
_SPREAD_FRAC = 0.9  # and each word of a long one at a place of its own
_BEFORE = 2  # words that make a place
_GLUED = 6  # letters from which an answer is not between others by chance
_GLUED_DIGITS = 3  # and digits
_MAX_PLACES = 100  # of an answer in one observation, which may be all made of it
_PIECE = re.compile(r"[^\W\d_]+|\d+")  # of a word: K42 is a letter and a number
CHANCE = 3  # characters from which a piece of a word is not in a text by chance


def values(action: str) -> list[str] | None:
    """What an action fills into calls of tools: its arguments and answer; None if it makes none."""
    move = tool_calls.parse(action)
    calls = [call for call in move.calls if isinstance(call, tool_calls.Call)]
    if not calls and move.answer is None:
        return None
    filled = [value for call in calls for value in _scalars(call.arguments)]
    return filled if move.answer is None else [*filled, move.answer]


def said(actions: Sequence[str]) -> list[str]:
    """The words of actions, without the form of calls."""
    return [word for action in actions for word in words(_plain(action))]


def contains(text: str, actions: Sequence[str]) -> bool:
    """Whether a text holds all the actions, word for word and one after the other."""
    wanted = _line(said(actions))
    return wanted != " " and wanted in _line(words(text))


def names_in_order(text: str, actions: Sequence[str]) -> bool:
    """Whether a text holds every action, word for word and in order, with other words between."""
    line, start = _line(words(text)), 0
    for action in actions:
        wanted = _line(said([action]))
        found = line.find(wanted, start)
        if found < 0 or wanted == " ":
            return False
        start = found + len(wanted) - 1  # the space is the next one's as well
    return bool(actions)


def joins(text: str, actions: Sequence[str]) -> bool:
    """Whether a text holds all actions in a row, cut into words in another way: as one word, or,
    if they are long, with any spaces and signs between their letters."""
    told, answer = words(text), said(actions)
    joined = "".join(answer)
    return (len(answer) >= LONG and joined in told) or (
        _is_long(answer) and joined in "".join(told)
    )


def fills_in(text: str, actions: Sequence[str], public: Iterable[str]) -> bool:
    """Whether a text holds, in any order, every value that calls of tools need and nothing public
    tells; `public` are words that are known anyway."""
    known = frozenset(public)
    filled = [words(value) for action in actions for value in values(action) or ()]
    hidden = [value for value in filled if not known.issuperset(value)]
    line = _line(words(text))
    return bool(hidden) and all(_line(value) in line for value in hidden)


def pieces(told: Iterable[str]) -> list[str]:
    """The runs of letters and of digits that words are made of, each once."""
    return list(dict.fromkeys(_PIECE.findall(" ".join(told))))


def handed_over(text: str, actions: Sequence[str]) -> list[str]:
    """The pieces of the actions' words that a text holds, long ones between other letters too."""
    told = words(text)
    known, glued = frozenset(pieces(told)), "".join(told)
    return [
        piece
        for piece in pieces(said(actions))
        if piece in known or (len(piece) >= _GLUED and piece in glued)
    ]


def shows(text: str, piece: str) -> bool:
    """Whether a text shows a piece, or with another ending if it is no short one."""
    shown = pieces(words(text))
    return piece in shown or (
        len(piece) >= CHANCE and any(each.startswith(piece) for each in shown)
    )


def named(text: str, actions: Sequence[str]) -> list[str]:
    """Those of the actions that the text names, as it names them one after the other."""
    known = {tuple(said([action])): action for action in reversed(actions)}
    longest = max((len(key) for key in known), default=0)
    told, found, start = words(text), [], 0
    while start < len(told):
        sizes = range(min(longest, len(told) - start), 0, -1)
        keys = (tuple(told[start : start + size]) for size in sizes)
        key = next((key for key in keys if key in known), None)
        if key is not None:
            found.append(known[key])
        start += 1 if key is None else len(key)
    return found


def told_frac(
    shown: Mapping[int, str], solutions: Mapping[int, Sequence[str]]
) -> tuple[float, str]:
    """Share of the instances whose text tells the answer, and how it does.

    The answer is the words of the solution that differ between instances. It is told where it
    stands in the text, or its letters do with nothing but spaces and signs between them, and not as
    often in those of other instances. A short one may stand there as one option of many, and is
    told if it does at one and the same place (counted from either end, or after the same words) in
    at least half of the instances; one with other words in between, if each of its words has such a
    place in nearly all.
    """
    answers = _answers(solutions)
    texts = {seed: words(shown[seed]) for seed in answers}
    lines = {seed: _line(text) for seed, text in texts.items()}
    long = {seed: _line(answer) for seed, answer in answers.items() if len(answer) >= LONG}
    found = [(_beyond_chance(long, lines) / len(solutions), "word for word")]
    glued = {seed: "".join(text) for seed, text in texts.items()}
    hidden = {
        seed: "".join(answer)
        for seed, answer in answers.items()
        if _is_long(answer) and _line(answer) not in lines[seed]
    }
    found.append((_beyond_chance(hidden, glued) / len(solutions), "letter for letter"))
    for (count, how), least_frac in (
        (_at_one_place(texts, answers), _FIXED_FRAC),
        (_at_their_places(texts, answers), _SPREAD_FRAC),
    ):
        if count >= max(2, least_frac * len(solutions)):
            found.append((count / len(solutions), how))
    return max(found, key=lambda each: each[0])


def _beyond_chance(answers: Mapping[int, str], texts: Mapping[int, str]) -> float:
    """How many answers stand in the text of their own instance, less what stands in another's."""
    own = sum(answer in texts[seed] for seed, answer in answers.items())
    others = sum(
        answer in text
        for seed, answer in answers.items()
        for name, text in texts.items()
        if name != seed
    )
    return max(0.0, own - others / max(1, len(texts) - 1))


def _at_one_place(
    texts: Mapping[int, Sequence[str]], answers: Mapping[int, list[str]]
) -> tuple[int, str]:
    """The place at which most of the short answers stand, and how many do."""
    places = Counter(
        place
        for seed, answer in answers.items()
        if len(answer) < LONG
        for place in dict.fromkeys(_places(texts[seed], answer))
    )
    return next(((count, place) for place, count in places.most_common(1)), (0, ""))


def _at_their_places(
    texts: Mapping[int, Sequence[str]], answers: Mapping[int, list[str]]
) -> tuple[int, str]:
    """In how many instances each word of a long answer stands at a place of its own, the same in
    all of them; and the first word's."""
    if len({len(answer) for answer in answers.values()}) != 1:
        return 0, ""
    told, places = set(answers), []
    starts = {seed: _starts(texts[seed]) for seed in answers}
    for column in range(len(next(iter(answers.values())))):
        at = {
            seed: dict.fromkeys(_described(texts[seed], 1, starts[seed].get(answer[column], ())))
            for seed, answer in answers.items()
        }
        counts = Counter(place for found in at.values() for place in found)
        place = max(counts, key=counts.__getitem__, default="")
        told &= {seed for seed, found in at.items() if place in found}
        places.append(place)
    if len(set(places)) < len(places):
        return 0, ""  # what to say again and again is left to be found
    return len(told), f"its first word {places[0]}"


def _answers(solutions: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """Of each solution the words at places where solutions differ; all words if not all are of one
    length."""
    whole = {seed: said(solution) for seed, solution in solutions.items()}
    if len({len(answer) for answer in whole.values()}) == 1:
        columns = zip(*whole.values(), strict=True)
        differ = [len(set(column)) > 1 for column in columns]
        if any(differ):
            return {
                seed: [word for word, kept in zip(answer, differ, strict=True) if kept]
                for seed, answer in whole.items()
            }
    return {seed: answer for seed, answer in whole.items() if answer}


def _places(text: Sequence[str], answer: Sequence[str]) -> Iterator[str]:
    """Every description of a place at which the answer stands in the text."""
    size = len(answer)
    starts = (s for s in range(len(text) - size + 1) if text[s : s + size] == list(answer))
    return _described(text, size, starts)


def _starts(text: Sequence[str]) -> dict[str, list[int]]:
    """Where each word of a text stands."""
    found: dict[str, list[int]] = {}
    for start, word in enumerate(text):
        found.setdefault(word, []).append(start)
    return found


def _described(text: Sequence[str], size: int, starts: Iterable[int]) -> Iterator[str]:
    """The places in words."""
    for start in itertools.islice(starts, _MAX_PLACES):
        yield f"as word {start + 1}"
        yield f"as word {len(text) - start - size + 1} from the end"
        if start >= _BEFORE:
            yield f"after {' '.join(text[start - _BEFORE : start])!r}"


def _is_long(answer: Sequence[str]) -> bool:
    """Whether the letters of an answer are not between others by chance."""
    joined = "".join(answer)
    return len(joined) >= (_GLUED_DIGITS if joined.isdecimal() else _GLUED)


def _plain(action: str) -> str:
    filled = values(action)
    return action if filled is None else " ".join(filled)


def _scalars(value: Any) -> Iterator[str]:
    """The texts, numbers and flags within an argument, as prose would write them."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _scalars(item)
    elif value is not None:
        yield str(value)


def _line(parts: Sequence[str]) -> str:
    return f" {' '.join(parts)} " if parts else " "
