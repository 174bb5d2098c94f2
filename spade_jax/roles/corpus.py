"""The documents that ground designs, and the endless seeded order in which they are drawn.

Two sources: the docstrings of installed packages (the embedded default) and the user's JSON lines.
All documents are held in memory. A draw is from all documents or from those of a skill, and either
each document comes once an epoch or every draw is by chance; which is a setting. Documents are not
chosen by what they say: a skill's are those whose line names it, or names no skill. Where a skill
has documents of its own, a draw is one of those that were drawn least, for whichever skill: none
comes again while the skill has one that never came.
"""

import hashlib
import json
import keyword
import logging
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import grain

from models.tokenizer import Tokenizer
from spade_jax.config import CorpusConfig
from spade_jax.errors import CheckpointError, CorpusError
from spade_jax.rollout.keys import named_rng
from spade_jax.types import Document

logger = logging.getLogger(__name__)

CUT_MARKER = " [...]"
_TITLE_WORDS = 8
_TERM = re.compile(r"\b[a-z]{4,12}\b")


class Corpus:
    """Documents, a shuffled order over them that never ends, and how common each of their words is.

    The order depends on the documents and the seed alone, and on the skills that ask where each has
    its own documents. Without documents there is none to draw. Of several processes each draws them
    all.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        seed: int,
        *,
        sampling: Literal["uniform", "per_skill"] = "uniform",
        draws: Literal["epoch", "independent"] = "epoch",
    ):
        self._documents = tuple(documents)
        self._seed = seed
        self._sampling, self._draws = sampling, draws
        self._order: Any = None  # of all documents
        self._positions: dict[str, int] = {}  # documents drawn, by order
        self._counts: Counter[str] = Counter()  # times that each was drawn for some skill, by id
        digest = hashlib.sha256(f"{seed}".encode())
        for document in self._documents:
            told = [document.document_id, document.text, document.skills]
            digest.update(json.dumps(told).encode())
        self._fingerprint = digest.hexdigest()[:16]

    @classmethod
    def load(
        cls,
        config: CorpusConfig,
        seed: int,
        *,
        skills: Sequence[str] = (),
    ) -> "Corpus":
        """Read the corpus that `config` names, to be drawn for `skills`; none where it is off.

        Raises:
            CorpusError: it has no usable document, or one of the skills has none.
        """
        documents: list[Document] = []
        if config.enabled:
            documents = _read_jsonl(config) if config.path else _read_docstrings(config)
        corpus = cls(
            documents,
            seed,
            sampling=config.sampling,
            draws=config.draws,
        )
        if config.enabled and config.sampling == "per_skill":
            for skill in skills:
                if not corpus._of(skill):
                    raise CorpusError(
                        f'corpus.sampling="per_skill", but none of the {len(documents)} documents '
                        f'is for the skill {skill!r}: each names others under "skill"; add some, '
                        'or set corpus.sampling to "uniform"'
                    )
        return corpus

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]

    def next(self, skill: str = "") -> Document | None:
        """Draw the next document, for `skill` if each has its own; None without any."""
        if not self._documents:
            return None
        name = skill if self._sampling == "per_skill" else ""
        position = self._positions.get(name, 0)
        self._positions[name] = position + 1
        documents = self._of(name)
        if self._draws == "independent":
            return named_rng(self._seed, "document", name, position).choice(documents)
        if self._sampling == "per_skill":
            return self._least_drawn(name, position, documents)
        if self._order is None:
            # Grain reshuffles in each epoch and can be indexed anywhere: the position is all the
            # state.
            self._order = grain.MapDataset.source(documents).seed(self._seed).shuffle().repeat()
        return self._order[position]

    def _least_drawn(self, skill: str, position: int, documents: Sequence[Document]) -> Document:
        """One of a skill's documents that were drawn least, by chance."""
        least = min(self._counts[each.document_id] for each in documents)
        ready = [each for each in documents if self._counts[each.document_id] == least]
        drawn = named_rng(self._seed, "document", skill, position).choice(ready)
        self._counts[drawn.document_id] += 1
        return drawn

    def _of(self, skill: str) -> tuple[Document, ...]:
        """The documents of a skill; all of them for none."""
        if not skill:
            return self._documents
        return tuple(each for each in self._documents if not each.skills or skill in each.skills)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue the orders, as JSON values."""
        return {
            "fingerprint": self._fingerprint,
            "positions": dict(self._positions),
            "counts": dict(self._counts),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, on the same documents and seed."""
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                "the checkpoint was drawing from another corpus: fingerprint "
                f"{state['fingerprint']}, now {self._fingerprint} ({len(self)} documents); restore "
                "the corpus section, run.seed, the corpus file and the package versions it was "
                "made with, or start a new run folder"
            )
        self._positions = {str(name): int(place) for name, place in state["positions"].items()}
        self._counts = Counter(state.get("counts", {}))  # checkpoints before they counted have none

    def document_frequency(self, term: str) -> int:
        """Return how many documents have the word `term`, of 4 to 12 letters, in title or text."""
        return self._frequencies[term.lower()]

    def rare_terms(self, text: str, max_share: float = 0.05) -> tuple[str, ...]:
        """Return the words of `text`, in order, that fewer than `max_share` of the documents have.

        A word here is 4 to 12 letters, in lower case; Python's keywords are left out.
        """
        limit = max_share * len(self)
        return tuple(
            term
            for term in _terms(text)
            if self.document_frequency(term) < limit and not keyword.iskeyword(term)
        )

    @cached_property
    def _frequencies(self) -> Counter[str]:
        return Counter(
            term
            for document in self._documents
            for term in _terms(f"{document.title}\n{document.text}")
        )


def excerpt(document: Document, words: int) -> str:
    """Return what the designer is shown: the title, then the first `words` words on one line."""
    return f"{document.title}\n{' '.join(document.text.split(None, words)[:words])}"


def cut_tokens(text: str, max_tokens: int, tokenizer: Tokenizer) -> str:
    """Return the beginning of a text that has at most `max_tokens` tokens, with a cut marked."""
    ids = tokenizer.encode(text)
    if len(ids) <= max_tokens:
        return text
    room = max_tokens - len(tokenizer.encode(CUT_MARKER))
    while room > 0:
        # A character may be cut in two, and a cut text be spelt in more tokens than before.
        kept = tokenizer.decode(ids[:room]).rstrip("\ufffd").rstrip() + CUT_MARKER
        if len(tokenizer.encode(kept)) <= max_tokens:
            return kept
        room -= 1
    return ""


def _terms(text: str) -> dict[str, None]:
    """Return the distinct candidate terms of `text` in order of first appearance."""
    return dict.fromkeys(_TERM.findall(text.lower()))


def _cut(text: str, max_words: int) -> str:
    """Keep the first `max_words` words with the white space between them, and mark a cut."""
    for count, word in enumerate(re.finditer(r"\S+", text), start=1):
        if count > max_words:
            return text[: word.start()].rstrip() + CUT_MARKER
    return text


def _read_docstrings(config: CorpusConfig) -> list[Document]:
    from spade_jax.roles import (
        docstring_dataset,
    )  # imports TFDS, which a corpus of one's own does not need

    pairs = docstring_dataset.load(config.packages, Path(config.cache_dir).expanduser())
    documents = [
        Document(document_id=title, title=title, text=_cut(text, config.max_words))
        for title, text in pairs
        if len(text.split()) >= config.min_words
    ]
    if not documents:
        raise CorpusError(
            f"corpus.packages={config.packages} has no usable document: {len(pairs)} docstrings, "
            f"all below corpus.min_words={config.min_words}; lower it or name more packages"
        )
    logger.info(
        "corpus %s: %d of %d docstrings", ", ".join(config.packages), len(documents), len(pairs)
    )
    return documents


def _read_jsonl(config: CorpusConfig) -> list[Document]:
    path = Path(config.path).expanduser()
    documents: dict[str, Document] = {}
    skipped: Counter[str] = Counter()
    try:
        # Bytes, so that only newlines end a line and one bad byte costs one line.
        with path.open("rb") as file:
            for line in file:
                document = _parse_line(line, config)
                if isinstance(document, str):
                    skipped[document] += 1
                elif documents.setdefault(document.document_id, document) is not document:
                    skipped["repeated"] += 1
    except OSError as error:
        raise CorpusError(
            f"corpus.path={config.path} cannot be read ({error.strerror}); "
            "give the path of a JSON lines file"
        ) from error
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    if not documents:
        raise CorpusError(
            f"corpus.path={config.path} has no usable document ({counts or 'no line'}); "
            'each line must be a JSON object with "orig_doc" or "text" of at least '
            f"corpus.min_words={config.min_words} words"
        )
    logger.info("corpus %s: %d documents; skipped: %s", path, len(documents), counts or "none")
    return list(documents.values())


def _parse_line(line: bytes, config: CorpusConfig) -> Document | str:
    """Return the document of a line, or why the line is skipped."""
    if not line.strip():
        return "blank"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "unparsable"
    text = (record.get("orig_doc") or record.get("text")) if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        return "without text"
    words = text.split(None, config.min_words)
    if len(words) < config.min_words:
        return "too short"
    title = record.get("title")
    if not isinstance(title, str) or not title.strip():
        title = " ".join(text.split(None, _TITLE_WORDS)[:_TITLE_WORDS])
    # JSON can spell lone surrogates, which no later encoder accepts.
    title, text = (value.encode("utf-8", errors="replace").decode() for value in (title, text))
    document_id = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Document(
        document_id=document_id,
        title=" ".join(title.split()),
        text=_cut(text, config.max_words),
        skills=_skills(record.get("skill")),
    )


def _skills(value: Any) -> tuple[str, ...]:
    """The skills that a line names: a text or a list of texts; none for anything else."""
    named = value if isinstance(value, list) else [value]
    return tuple(each.strip() for each in named if isinstance(each, str) and each.strip())
