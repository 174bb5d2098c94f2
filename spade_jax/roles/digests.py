"""What a program shows its player and what it is made of, read from its text alone.

Nothing is run: text that a program puts together from pieces is seen as the pieces. The results are
model text, to be placed like any other; the programs given here parse, as admitted ones do.
"""

import ast
import functools
import io
import tokenize
import warnings
from collections.abc import Iterator

MAX_TEXTS = 6  # of the texts a program shows, those of most words
MAX_TEXT_LETTERS = 120
MAX_ABOUT_LETTERS = 240
MAX_NAMES = 12
MAX_NAME_LETTERS = 24
MIN_TEXT_WORDS = 3  # fewer are a name or an item, and no sentence


@functools.lru_cache(maxsize=512)  # memory and window are compared with again and again
def rules(program: str) -> str:
    """Every text that the program may show, docstrings included, in their order; values that are
    put in are `{}`. Two programs of the same rules read alike here, however they are coded.

    Raises:
        SyntaxError: the program does not parse.
    """
    return "\n".join(_one_line(text) for text in _texts(_parse(program)))


def digest(program: str) -> str:
    """A few lines on a program: its class and size, what it is about, what it keeps, and the
    longest sentences it shows.

    Raises:
        SyntaxError: the program does not parse.
    """
    tree = _parse(program)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    made = next((node for node in reversed(classes) if node.name.endswith("Env")), None)
    name = "a module" if made is None else made.name[-MAX_NAME_LETTERS:]
    about = ast.get_docstring(tree) or (made and ast.get_docstring(made)) or ""
    lines = [f"{name}, {len(program.splitlines())} lines"]
    if about:
        lines.append(f"about: {_one_line(about)[:MAX_ABOUT_LETTERS]}")
    if names := _state(made or tree):
        lines.append(f"keeps: {', '.join(names)}")
    sentences = [_one_line(text) for text in _texts(tree) if _one_line(text) != _one_line(about)]
    sentences = [text for text in dict.fromkeys(sentences) if _num_words(text) >= MIN_TEXT_WORDS]
    kept = sorted(sentences, key=_num_words, reverse=True)[:MAX_TEXTS]
    lines += [f"says: {text[:MAX_TEXT_LETTERS]}" for text in sentences if text in kept]
    return "\n".join(lines)


def code(program: str) -> str:
    """The program without what says something to its reader and does nothing: comments, docstrings
    and other strings that stand by themselves. All else stays letter for letter; a program that
    does not parse stays whole.
    """
    text = program.replace("\r\n", "\n").replace("\r", "\n")  # as Python reads it
    lines = text.split("\n")
    try:
        cuts = [*_comments(text), *_loose_strings(_parse(text), lines)]
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return program
    for (row, column), (last, end), needed in sorted(cuts, reverse=True):
        before, after = lines[row][:column], lines[last][end:]
        if not needed and not before.strip() and not after.strip():
            lines[row : last + 1] = []
        else:
            comment = lines[row].startswith("#", column)
            lines[row : last + 1] = [f"{before}{'' if comment else 'pass'}{after}".rstrip()]
    return "\n".join(lines) if cuts else program


_Place = tuple[int, int]  # line and letter, from 0


def _comments(text: str) -> Iterator[tuple[_Place, _Place, bool]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0] - 1
            yield (row, token.start[1]), (row, token.end[1]), False


def _loose_strings(tree: ast.AST, lines: list[str]) -> Iterator[tuple[_Place, _Place, bool]]:
    """Where they are, and whether something must stand in their place."""

    def place(line: int, column: int) -> _Place:  # a column counts bytes
        return line - 1, len(lines[line - 1].encode()[:column].decode())

    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if not isinstance(statements, list):  # that of an expression
                continue
            loose = [each for each in statements if _is_loose(each)]
            for each in loose:
                assert each.end_lineno is not None and each.end_col_offset is not None
                start = place(each.lineno, each.col_offset)
                end = place(each.end_lineno, each.end_col_offset)
                yield start, end, len(loose) == len(statements) and not isinstance(node, ast.Module)


def _is_loose(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str | bytes)
    )


def _parse(program: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # of its escapes: it is not our text
        return ast.parse(program)


def _texts(tree: ast.AST) -> Iterator[str]:
    """String constants in order; without recursion, which a deep program could exhaust."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) and type(part.value) is str else "{}"
                for part in node.values
            )
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield node.value
        else:
            waiting += reversed(list(ast.iter_child_nodes(node)))


def _state(tree: ast.AST) -> list[str]:
    """Attributes that are written on `self`, in the order of their names' first appearance."""
    found = [
        node.attr[:MAX_NAME_LETTERS]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
    return list(dict.fromkeys(found))[:MAX_NAMES]


def _num_words(text: str) -> int:
    return len(text.split())


def _one_line(text: str) -> str:
    return " ".join(text.split())
