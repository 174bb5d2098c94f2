"""How alike programs are, and how varied the newest of them: what shows that a designer collapses
onto one game.

Two views of a program. Its code: the share of token runs that two programs have in common, names
and numbers aside (`envs.similarity`). Its rules: the cosine of embeddings of all text that it shows
(`digests.rules`), which also finds one game in two codings. How programs behave is not looked at.

    vendi = exp(-sum_i l_i ln l_i),   l the eigenvalues of K / n, K the cosines of n programs

is 1 for n copies and n for n programs that have nothing in common (the paper's diversity figure,
there per 100 environments with a sentence encoder); for code, K holds the cosines of the sets of
token runs. An embedding by character n-grams needs no model and is the same everywhere: counts c of
all runs of 3, 4 and 5 bytes, hashed into 16,384 places, as ln(1 + c), at length 1. Measured on the
library (`benchmarks/diversity.py`): two programs of a family on other words have a cosine of at
most 0.90, or 0.94 where they share some, two of different families of at most 0.37. Of 112 of 14
families the Vendi scores are 32 by rules and 27 by code, of eight of one family 2.7 and 2.4.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from spade_jax.config import Config, DiversityConfig
from spade_jax.envs.similarity import near_duplicate, shingles
from spade_jax.errors import ConfigError
from spade_jax.roles import digests
from spade_jax.types import Design, Gate, GateResult

PLACES = 1 << 14
GRAMS = (3, 4, 5)
MAX_KEPT = 512  # embedded texts that are kept
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_STEP = np.uint64(1099511628211)


def ngrams(text: str) -> Float[np.ndarray, " places"]:
    """The embedding by hashed character n-grams; white space and case do not count."""
    line = f"  {' '.join(text.lower().split())}  "  # never shorter than the shortest run
    data = np.frombuffer(line.encode(errors="replace"), np.uint8).astype(np.uint64)
    hashes = []
    for size in GRAMS:
        starts = max(0, len(data) - size + 1)
        hashed = np.full(starts, size, np.uint64)
        for offset in range(size):
            hashed = hashed * _STEP + data[offset : offset + starts]
        hashed ^= hashed >> np.uint64(33)
        hashed *= _MIX
        hashed ^= hashed >> np.uint64(33)
        hashes.append(hashed)
    found, counts = np.unique(np.concatenate(hashes) % np.uint64(PLACES), return_counts=True)
    weights = np.log1p(counts)
    vector = np.zeros(PLACES, np.float32)
    vector[found] = weights / np.linalg.norm(weights)
    return vector


class Embedder:
    """Texts to unit vectors by one embedding, the newest kept."""

    def __init__(self, encoder: str = "") -> None:
        """Embed with the sentence encoder of that name or folder, or by n-grams.

        Raises:
            ConfigError: there is no such encoder, or the package is not installed.
        """
        self._model = _load_encoder(encoder) if encoder else None
        self._kept: dict[str, Float[np.ndarray, " places"]] = {}

    def __call__(self, texts: Sequence[str]) -> Float[np.ndarray, "texts places"]:
        """One row for each text; there must be one."""
        wanted = list(dict.fromkeys(texts))
        new = [text for text in wanted if text not in self._kept]
        found = {text: self._kept[text] for text in wanted if text in self._kept}
        if new:
            found |= dict(zip(new, self._embed(new), strict=True))
        self._kept = dict(list((self._kept | found).items())[-MAX_KEPT:])
        return np.stack([found[text] for text in texts])

    def _embed(self, texts: Sequence[str]) -> list[Float[np.ndarray, " places"]]:
        if self._model is None:
            return [ngrams(text) for text in texts]
        vectors = np.asarray(self._model.encode(list(texts), show_progress_bar=False), np.float32)
        return list(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))


def _load_encoder(name: str) -> Any:
    try:
        package = importlib.import_module("sentence_transformers")
    except ImportError as error:
        raise ConfigError(
            'diversity.embedding="sentence" needs the package sentence-transformers, which cannot '
            f'be imported ({error}); install it, or set diversity.embedding to "ngrams"'
        ) from error
    try:
        return package.SentenceTransformer(name, device="cpu")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"diversity.encoder={name!r} cannot be loaded ({' '.join(str(error).split())[:200]}); "
            "expected the name or folder of a sentence encoder"
        ) from error


@functools.lru_cache(maxsize=4)
def embedder(config: DiversityConfig) -> Embedder:
    """The embedder of the settings, which is made once.

    Raises:
        ConfigError: it cannot be made.
    """
    return Embedder(config.encoder if config.embedding == "sentence" else "")


class Nearness(NamedTuple):
    """Likeness to the nearest of known programs, and why it is a near-duplicate, or ""."""

    program: float
    rules: float
    reason: str


@dataclass(frozen=True)
class Likeness:
    """From where on programs are near-duplicates, and what their rules are compared by."""

    program_similarity: float
    rules_similarity: float
    embed: Embedder

    @classmethod
    def of(cls, config: Config) -> "Likeness":
        """Likeness as the settings have it."""
        diversity = config.diversity
        return cls(
            config.envs.duplicate_similarity, diversity.rules_similarity, embedder(diversity)
        )

    def nearest(self, program: str, known: Mapping[str, str]) -> Nearness:
        """Compare a program with others by id; 0 where there is none.

        Raises:
            SyntaxError: a program does not parse.
        """
        similarity, reason = near_duplicate(program, known, self.program_similarity)
        if not known:
            return Nearness(similarity, 0.0, reason)
        mine, *others = self.embed([digests.rules(text) for text in (program, *known.values())])
        cosines = np.stack(others) @ mine
        nearest = int(cosines.argmax())
        cosine = min(1.0, round(float(cosines[nearest]), 6))  # a copy's is 1 but for rounding
        if not reason and cosine >= self.rules_similarity:
            reason = (
                f"its texts are those of environment {list(known)[nearest]} again (cosine "
                f"{cosine:.3f}); expected less than {self.rules_similarity}: write another game"
            )
        return Nearness(similarity, cosine, reason)


def vendi(cosines: Float[np.ndarray, "programs programs"]) -> float:
    """Effective number of different ones, 1 to their number, of which there is at least one."""
    values = np.linalg.eigvalsh(cosines.astype(np.float64) / len(cosines))
    values = values[values > 1e-12]
    return float(np.exp(-(values * np.log(values)).sum()))


@dataclass(frozen=True)
class Written:
    """One program that the designer wrote and that parses, admitted or not."""

    program: str
    skill: str
    cycle: int
    admitted: bool
    repeats: bool  # a near-duplicate of an earlier one in the window
    # how many of its skill in a row, itself the last, are each a near-duplicate of the one before
    run: int


@dataclass
class Window:
    """The newest programs, in the order they were asked for. It is the same whatever the memory
    holds: a run without one refuses the same designs.
    """

    written: list[Written] = field(default_factory=list)
    # programs; not only those above, and as many as new ones are compared with
    admitted: list[str] = field(default_factory=list)

    def add(self, designs: Sequence[Design], likeness: Likeness, settings: DiversityConfig) -> None:
        """Take in a cycle's designs, of which those without a program that parses are left out, and
        those that the next answer of the same attempt mends: it is no repetition.
        """
        size, most = settings.window, max(settings.window, settings.compared)
        for design, later in itertools.zip_longest(designs, designs[1:]):
            source, gates = design.source, design.verdict.gates
            mended = later is not None and later.turn > 0
            if mended or source is None or gates.get(Gate.PARSE) != GateResult.PASSED:
                continue
            known = {str(index): each.program for index, each in enumerate(self.written)}
            repeats = bool(likeness.nearest(source.program, known).reason)
            run, before = 1, [each for each in self.written if each.skill == design.skill]
            if repeats and before:
                again = likeness.nearest(source.program, {"before": before[-1].program})
                run += before[-1].run if again.reason else 0
            admitted = design.verdict.admitted
            self.written.append(
                Written(source.program, design.skill, design.cycle, admitted, repeats, run)
            )
            self.admitted += [source.program] if admitted else []
            self.written, self.admitted = self.written[-size:], self.admitted[-most:]

    def vendi(self, embed: Embedder, size: int) -> tuple[float, float] | None:
        """Vendi scores of the newest admitted programs by rules and by code; None without any."""
        newest = self.admitted[-size:]
        if not newest:
            return None
        rows = embed([digests.rules(program) for program in newest]).astype(np.float64)
        runs = [shingles(program) for program in newest]
        code = [[len(a & b) / math.sqrt(len(a) * len(b)) for b in runs] for a in runs]
        return vendi(rows @ rows.T), vendi(np.array(code))

    def state(self) -> dict[str, Any]:
        """JSON-able copy."""
        return {"written": [asdict(each) for each in self.written], "admitted": self.admitted[:]}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Window":
        """The window of `state()`."""
        return cls([Written(**each) for each in state["written"]], list(state["admitted"]))
