"""How alike two programs are, as text: what is left when names, comments, docstrings and numbers
are taken out, and the words of the strings are kept.

A program that was renamed, reformatted, commented or given other numbers is the same one. One that
follows the same pattern with the words of another document is not: it asks for other text. Whether
two programs behave alike is not looked at.

A program is the set of all runs of `SHINGLE` tokens; the similarity of two is the share of these
that both have (Jaccard), or what that would be if nothing had been added to the known one: a copy
with anything else beside it is a copy. Measured on the families of the library, each program
against 29 of its own family with other words: at most 0.94, and 0.4 to 0.7 at the median.
"""

import ast
import functools
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping

SHINGLE = 6  # long enough that a changed word counts, short enough that a moved method does not
_WORD = re.compile(r"[^\W\d]+|\d+")


def near_duplicate(program: str, known: Mapping[str, str], threshold: float) -> tuple[float, str]:
    """Similarity of a program to the nearest of the known ones (by id; 0 if there is none), and why
    it is refused: "" if it is below the threshold.

    Raises:
        SyntaxError: a program does not parse.
    """
    mine = shingles(program)
    scored = ((_likeness(mine, shingles(other)), name) for name, other in known.items())
    similarity, name = max(scored, key=lambda item: item[0], default=(0.0, ""))
    if not name or similarity < threshold:
        return similarity, ""
    return similarity, (
        f"names and numbers aside {similarity:.1%} of environment {name} again; expected less than "
        f"{threshold:.1%}: write another game"
    )


def _likeness(mine: frozenset[int], known: frozenset[int]) -> float:
    shared = len(mine & known)
    return shared / min(len(mine | known), 2 * len(known) - shared)


@functools.lru_cache(maxsize=512)  # memory and window are compared with again and again
def shingles(program: str) -> frozenset[int]:
    """Checksums of every run of `SHINGLE` tokens, of the whole where there are fewer.

    Raises:
        SyntaxError: the program does not parse.
    """
    with warnings.catch_warnings(action="ignore"):  # of its escapes: it is not our text
        tokens = list(_tokens(ast.parse(program)))
    starts = range(max(1, len(tokens) - SHINGLE + 1))
    return frozenset(
        zlib.crc32(" ".join(tokens[start : start + SHINGLE]).encode(errors="replace"))
        for start in starts
    )


def _tokens(tree: ast.AST) -> Iterator[str]:
    """The syntax tree in order; without recursion, which a deep program could exhaust."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                for word in _WORD.findall(node.value.lower()):
                    yield "0" if word.isdecimal() else word
            else:
                yield "0" if isinstance(node.value, int | float | complex) else "constant"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        elif not isinstance(node, ast.expr_context):
            yield type(node).__name__
            waiting += reversed(list(ast.iter_child_nodes(node)))
