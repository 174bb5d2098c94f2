"""The documents that ground designs, and the endless seeded order in which they are drawn.

Two sources: the docstrings of installed packages (the embedded default) and the user's JSON lines.
All documents are held in memory. There is no draw by topic or by skill: every document comes once
per epoch, whatever it is used for.
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
from typing import Any

import grain

from spade_jax.config import CorpusConfig
from spade_jax.errors import CheckpointError, CorpusError
from spade_jax.types import Document

logger = logging.getLogger(__name__)

CUT_MARKER = " [...]"
_TITLE_WORDS = 8
_TERM = re.compile(r"\b[a-z]{4,12}\b")


class Corpus:
    """Documents, a shuffled order over them that never ends, and how common each of their words is.

    Process p of P draws the places p, p + P, p + 2P ... of one order, which depends on the
    documents and the seed alone.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._documents = tuple(documents)
        self._process_index = process_index
        self._process_count = process_count
        self._position = 0  # documents this process has drawn
        # Grain reshuffles in each epoch and can be indexed anywhere: the position is all the state.
        self._order: Any = grain.MapDataset.source(self._documents).seed(seed).shuffle().repeat()
        digest = hashlib.sha256(f"{seed}".encode())
        for document in self._documents:
            digest.update(json.dumps([document.document_id, document.text]).encode())
        self._fingerprint = digest.hexdigest()[:16]

    @classmethod
    def load(
        cls, config: CorpusConfig, seed: int, *, process_index: int = 0, process_count: int = 1
    ) -> "Corpus":
        """Read the corpus that `config` names; CorpusError when it has no usable document."""
        documents = _read_jsonl(config) if config.path else _read_docstrings(config)
        return cls(documents, seed, process_index, process_count)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]

    def next(self) -> Document:
        """Draw this process's next document."""
        place = self._process_index + self._position * self._process_count
        self._position += 1
        return self._order[place]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue the order, as JSON values."""
        return {"fingerprint": self._fingerprint, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, on the same documents and seed."""
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                "the checkpoint was drawing from another corpus: fingerprint "
                f"{state['fingerprint']}, now {self._fingerprint} ({len(self)} documents); restore "
                "the corpus section, run.seed, the corpus file and the package versions it was "
                "made with, or start a new run folder"
            )
        self._position = state["position"]

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
        document_id=document_id, title=" ".join(title.split()), text=_cut(text, config.max_words)
    )
