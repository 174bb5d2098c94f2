"""Whether a text tells the answer of an instance: a first observation, or a hint.

Texts and answers are compared as words, without case and punctuation. What a player could work out
is not judged here, and an answer in disguise (reversed, spelt, as a sum) is not found.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

LONG = 3  # words from which an answer is not in a text by chance
_FIXED_FRAC = 0.5  # share of the instances that a short answer may stand at one place in
_BEFORE = 2  # words that make a place
_MAX_PLACES = 100  # of an answer in one observation, which may be all made of it
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower())


def contains(text: str, actions: Sequence[str]) -> bool:
    """Whether a text holds all the actions, word for word and one after the other."""
    wanted = _line(words(" ".join(actions)))
    return wanted != " " and wanted in _line(words(text))


def names_in_order(text: str, actions: Sequence[str]) -> bool:
    """Whether a text holds every action, word for word and in order, with other words between."""
    line, start = _line(words(text)), 0
    for action in actions:
        wanted = _line(words(action))
        found = line.find(wanted, start)
        if found < 0 or wanted == " ":
            return False
        start = found + len(wanted) - 1  # the space is the next one's as well
    return bool(actions)


def named(text: str, actions: Sequence[str]) -> list[str]:
    """Those of the actions that the text names, as it names them one after the other."""
    known = {tuple(words(action)): action for action in reversed(actions)}
    longest = max((len(key) for key in known), default=0)
    said, found, start = words(text), [], 0
    while start < len(said):
        sizes = range(min(longest, len(said) - start), 0, -1)
        keys = (tuple(said[start : start + size]) for size in sizes)
        key = next((key for key in keys if key in known), None)
        if key is not None:
            found.append(known[key])
        start += 1 if key is None else len(key)
    return found


def told_frac(
    shown: Mapping[int, str], solutions: Mapping[int, Sequence[str]]
) -> tuple[float, str]:
    """Share of the instances whose first observation tells the answer, and how it does.

    The answer is the words of the solution that differ between instances. A long one is told where
    it stands in the observation and not as often in those of other instances; a short one, which
    may stand there as one option of many, where it stands at one and the same place (counted from
    either end, or after the same words) in at least half of the instances.
    """
    answers = _answers(solutions)
    lines = {seed: _line(words(shown[seed])) for seed in answers}
    long = {seed: _line(answer) for seed, answer in answers.items() if len(answer) >= LONG}
    own = sum(answer in lines[seed] for seed, answer in long.items())
    others = sum(
        answer in line
        for seed, answer in long.items()
        for name, line in lines.items()
        if name != seed
    )
    by_chance = others / max(1, len(lines) - 1)
    frac, how = max(0.0, own - by_chance) / len(solutions), "word for word"
    places = Counter(
        place
        for seed, answer in answers.items()
        if len(answer) < LONG
        for place in dict.fromkeys(_places(lines[seed].split(), answer))
    )
    for place, count in places.most_common(1):
        if count >= max(2, _FIXED_FRAC * len(solutions)) and count / len(solutions) > frac:
            frac, how = count / len(solutions), place
    return frac, how


def _answers(solutions: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """Of each solution the words at places where solutions differ; all words if not all are of one
    length."""
    said = {seed: words(" ".join(solution)) for seed, solution in solutions.items()}
    if len({len(answer) for answer in said.values()}) == 1:
        columns = zip(*said.values(), strict=True)
        differ = [len(set(column)) > 1 for column in columns]
        if any(differ):
            return {
                seed: [word for word, kept in zip(answer, differ, strict=True) if kept]
                for seed, answer in said.items()
            }
    return {seed: answer for seed, answer in said.items() if answer}


def _places(text: Sequence[str], answer: Sequence[str]) -> Iterator[str]:
    """Every description of a place at which the answer stands in the text."""
    size = len(answer)
    starts = (s for s in range(len(text) - size + 1) if text[s : s + size] == list(answer))
    for start in itertools.islice(starts, _MAX_PLACES):
        yield f"as word {start + 1}"
        yield f"as word {len(text) - start - size + 1} from the end"
        if start >= _BEFORE:
            yield f"after {' '.join(text[start - _BEFORE : start])!r}"


def _line(parts: Sequence[str]) -> str:
    return f" {' '.join(parts)} " if parts else " "
