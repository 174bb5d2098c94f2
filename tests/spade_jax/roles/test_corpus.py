"""The corpus: both sources, their errors, and an order that resumes, shards and never ends."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from spade_jax.config import Config, CorpusConfig, DesignerConfig
from spade_jax.errors import CheckpointError, ConfigError, CorpusError
from spade_jax.roles import docstrings
from spade_jax.roles.corpus import CUT_MARKER, Corpus, cut_tokens, excerpt
from spade_jax.types import Document

PACKAGE = {
    "__init__.py": '''
from json import JSONDecoder, loads
from fakecorpus.deep import Walker as _hidden
from fakecorpus.deep import Walker
def orbit(mass):
    """orbit(mass)

    Follow a planet around its star.  It never
    returns `exactly` to :func:`~numpy.start` [1]_.

    .. math::

        x^2

    Parameters
    ----------
    mass : float
        How heavy the planet is.

    Notes
    -----
    Kepler knew.

    Examples
    --------
    >>> orbit(3)
    hidden
    """
def _private():
    """Nobody reads this."""
def __getattr__(name):
    raise RuntimeError(name)
''',
    "deep/__init__.py": '''
class Walker:
    """Walk downhill until the valley."""
copy_of_walker = Walker
number = 3
class Weird:
    """Refuses to be inspected."""
    def __getattribute__(self, name):
        raise KeyError(name)
    def __call__(self):
        pass
weird = Weird()
''',
    "deep/listed.py": '''
__all__ = ["shown", "absent"]
def shown():
    """Shown because it is listed."""
def unlisted():
    """Left out because it is not listed."""
''',
    "broken.py": "raise SystemExit('no')",
    "loud.py": """
import sys, warnings
print('noise'); print('noise', file=sys.stderr); warnings.warn('noise', DeprecationWarning)
""",
    "_private.py": "import pathlib; pathlib.Path(__file__).with_name('imported').touch()",
    "tests/__init__.py": "import pathlib; pathlib.Path(__file__).with_name('imported').touch()",
    "setup.py": "import pathlib; pathlib.Path(__file__).with_name('imported').touch()",
    "slow.py": """
import pathlib, time
folder = pathlib.Path(__file__).parent
with open(folder / "started", "a") as file:
    file.write("once ")
deadline = time.monotonic() + 30
while (folder / "wait").exists() and time.monotonic() < deadline:
    time.sleep(0.02)
""",
}
TITLES = [
    "fakecorpus.Walker",
    "fakecorpus.deep.Weird",
    "fakecorpus.deep.listed.shown",
    "fakecorpus.orbit",
]
ORBIT = (
    "Follow a planet around its star.  It never returns exactly to numpy.start.\n\n"
    "Kepler knew.\n\nmass : float How heavy the planet is."
)


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "site" / "fakecorpus"
    for name, source in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def embedded(tmp_path, **changes) -> CorpusConfig:
    settings = {"packages": ("fakecorpus",), "cache_dir": str(tmp_path / "cache"), "min_words": 1}
    return CorpusConfig(**(settings | changes))


def write_jsonl(tmp_path, records) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(
        b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)
    )
    return str(path)


def numbered(count: int) -> list[Document]:
    return [Document(document_id=f"d{i}", title=f"d{i}", text=f"text {i}") for i in range(count)]


def drawn(corpus: Corpus, count: int) -> list[str]:
    return [corpus.next().document_id for _ in range(count)]


# ---------------------------------------------------------------- embedded source


def test_embedded_documents_are_public_callables_with_clean_text(package, tmp_path, capfd):
    corpus = Corpus.load(embedded(tmp_path), 0)
    assert [document.title for document in corpus] == TITLES
    assert corpus[3] == Document("fakecorpus.orbit", "fakecorpus.orbit", ORBIT)
    assert not list(package.rglob("imported")), "private, test and setup modules must not run"
    assert "fakecorpus" not in sys.modules, "the packages are imported in another process"
    assert capfd.readouterr() == ("", "")

    again = Corpus.load(embedded(tmp_path), 0)
    assert [*again] == [*corpus]
    assert (package / "started").read_text() == "once ", (
        "the second load reads the prepared dataset"
    )

    (package / "deep" / "extra.py").write_text('def added():\n    """Added in a new version."""\n')
    assert "fakecorpus.deep.extra.added" in [
        document.title for document in Corpus.load(embedded(tmp_path), 0)
    ]


def test_embedded_length_limits(package, tmp_path):
    corpus = Corpus.load(embedded(tmp_path, min_words=10, max_words=12), 0)
    assert [document.title for document in corpus] == ["fakecorpus.orbit"]
    assert (
        corpus[0].text
        == "Follow a planet around its star.  It never returns exactly to numpy.start." + CUT_MARKER
    )
    with pytest.raises(CorpusError, match=r"corpus\.packages.*4 docstrings.*corpus\.min_words=99"):
        Corpus.load(embedded(tmp_path, min_words=99), 0)


def test_a_killed_preparation_leaves_nothing_that_is_used_and_only_one_process_prepares(
    package, tmp_path
):
    config = embedded(tmp_path)
    program = (
        "import sys; from spade_jax.config import CorpusConfig\n"
        "from spade_jax.roles.corpus import Corpus\n"
        "config = CorpusConfig(packages=('fakecorpus',), cache_dir=sys.argv[1], min_words=1)\n"
        "print(len(Corpus.load(config, 0)))"
    )
    # A killed process leaves its temporary folder behind: let it be in ours.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}

    def prepare() -> subprocess.Popen:
        (package / "wait").touch()
        child = subprocess.Popen(
            [sys.executable, "-c", program, config.cache_dir],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not (package / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (package / "started").exists()
        return child

    with prepare() as killed:
        killed.kill()
    assert list(Path(config.cache_dir).rglob("incomplete*"))
    (package / "started").unlink()

    loaded: list[Corpus] = []
    with prepare() as first:
        second = threading.Thread(target=lambda: loaded.append(Corpus.load(config, 0)))
        second.start()
        second.join(0.5)
        assert second.is_alive(), "the second process waits for the first"
        (package / "wait").unlink()
        second.join(60)
        assert first.communicate(timeout=60)[0] == "4\n"
    assert [document.title for document in loaded[0]] == TITLES
    assert (package / "started").read_text() == "once "
    assert not list(Path(config.cache_dir).rglob("incomplete*"))


def test_embedded_errors(package, tmp_path):
    with pytest.raises(
        CorpusError, match=r"corpus\.packages names 'no_such_package'.*not installed"
    ):
        Corpus.load(embedded(tmp_path, packages=("numpy", "no_such_package")), 0)
    with pytest.raises(CorpusError, match=r"corpus\.packages names 'no\.such\.package'"):
        Corpus.load(embedded(tmp_path, packages=("no.such.package",)), 0)
    (tmp_path / "file").touch()
    with pytest.raises(CorpusError, match=r"corpus\.cache_dir=.*file.*can be written"):
        Corpus.load(embedded(tmp_path, cache_dir=str(tmp_path / "file")), 0)

    Corpus.load(embedded(tmp_path), 0)
    for record in (tmp_path / "cache").rglob("*array_record*"):
        record.write_bytes(b"x" * 70000)
    with pytest.raises(CorpusError, match=r"corpus\.cache_dir=.*delete that folder"):
        Corpus.load(embedded(tmp_path), 0)

    (tmp_path / "site" / "speechless.py").touch()
    with pytest.raises(CorpusError, match=r"corpus\.packages=\('speechless',\) have no public"):
        Corpus.load(embedded(tmp_path, packages=("speechless",)), 0)
    (package / "__init__.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(
        CorpusError, match=r"corpus\.packages=\('fakecorpus',\) failed with exit code 7"
    ):
        Corpus.load(embedded(tmp_path), 0)


def test_docstrings_of_a_real_package():
    pairs = list(docstrings.documents(["numpy.fft", "numpy.fft"]))
    found = dict(pairs)
    assert len(found) == len(pairs) > 10
    assert found["numpy.fft.fft"].startswith(
        "Compute the one-dimensional discrete Fourier Transform.\n\n"
    )
    assert not any(">>>" in text or "----" in text or "`" in text for text in found.values())
    assert not any(name.rpartition(".")[2].startswith("_") for name in found)


# ---------------------------------------------------------------- JSON lines


def test_jsonl_schema(tmp_path, caplog):
    records = [
        {"orig_doc": "first  document\nhere", "text": "ignored", "title": "  A\nname "},
        {"text": "one two three four five six seven eight nine"},
        {"orig_doc": "", "text": "falls back to text", "other": 1},
        b"",
        b"   ",
        b"{broken",
        b"\xff\xfe\xff",
        b"[" * 100_000,
        [1, 2],
        {"text": "   "},
        {"orig_doc": 5},
        {"text": "short"},
        {"text": "first  document\nhere"},
        b'{"text": "lone \\ud800 surrogate"}',
        {"text": "line\u2028separator stays inside"},
    ]
    config = CorpusConfig(path=write_jsonl(tmp_path, records), min_words=3, max_words=5)
    with caplog.at_level("INFO", "spade_jax"):
        corpus = Corpus.load(config, 0)
    assert [(document.title, document.text) for document in corpus] == [
        ("A name", "first  document\nhere"),
        ("one two three four five six seven eight", "one two three four five" + CUT_MARKER),
        ("falls back to text", "falls back to text"),
        ("lone ? surrogate", "lone ? surrogate"),
        ("line separator stays inside", "line\u2028separator stays inside"),
    ]
    assert len({document.document_id for document in corpus}) == 5
    assert (
        "5 documents; skipped: 2 blank, 1 repeated, 1 too short, 3 unparsable, 3 without text"
        in caplog.text
    )
    assert [d.document_id for d in Corpus.load(config, 1)] == [d.document_id for d in corpus]


def test_jsonl_errors(tmp_path):
    with pytest.raises(
        CorpusError, match=r"corpus\.path=.*absent\.jsonl cannot be read.*JSON lines"
    ):
        Corpus.load(CorpusConfig(path=str(tmp_path / "absent.jsonl")), 0)
    with pytest.raises(CorpusError, match=r"corpus\.path=.*cannot be read"):
        Corpus.load(CorpusConfig(path=str(tmp_path)), 0)
    path = write_jsonl(tmp_path, [b"", b"{", {"text": "few words"}, {"title": "x"}])
    with pytest.raises(
        CorpusError, match=r"1 blank, 1 too short, 1 unparsable, 1 without text.*min_words=60 words"
    ):
        Corpus.load(CorpusConfig(path=path), 0)
    path = write_jsonl(tmp_path, [])
    with pytest.raises(CorpusError, match=r"\(no line\)"):
        Corpus.load(CorpusConfig(path=path), 0)


# ---------------------------------------------------------------- order


def test_every_epoch_is_another_permutation_that_the_seed_decides():
    documents = numbered(20)
    order = drawn(Corpus(documents, 7), 60)
    epochs = [order[start : start + 20] for start in (0, 20, 40)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(document.document_id for document in documents)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert drawn(Corpus(documents, 7), 60) == order
    assert drawn(Corpus(documents, 8), 60) != order


@pytest.mark.parametrize("source", ["embedded", "jsonl"])
def test_resuming_equals_going_on(source, package, tmp_path):
    if source == "embedded":
        config = embedded(tmp_path)
    else:
        config = CorpusConfig(
            path=write_jsonl(tmp_path, [{"text": f"word {i}"} for i in range(5)]), min_words=1
        )
    corpus = Corpus.load(config, 5)
    drawn(corpus, 7)
    state = json.loads(json.dumps(corpus.state()))
    expected = drawn(corpus, 20)
    resumed = Corpus.load(config, 5)
    resumed.restore(state)
    assert drawn(resumed, 20) == expected


def test_a_state_of_another_corpus_is_refused():
    state = Corpus(numbered(5), 0).state()
    changed = [*numbered(4), Document("d4", "d4", "other text")]
    for other in (Corpus(numbered(6), 0), Corpus(numbered(5), 1), Corpus(changed, 0)):
        with pytest.raises(CheckpointError, match="another corpus"):
            other.restore(state)


def test_independent_draws_repeat_documents_and_resume():
    documents = numbered(20)
    corpus = Corpus(documents, 7, draws="independent")
    order = drawn(corpus, 40)
    # by chance: one epoch of distinct documents has odds of 20! / 20^20, 2e-8
    assert len(set(order[:20])) < 20 and len(set(order)) > 10
    assert drawn(Corpus(documents, 7, draws="independent"), 40) == order
    assert drawn(Corpus(documents, 8, draws="independent"), 40) != order
    state = json.loads(json.dumps(corpus.state()))
    resumed = Corpus(documents, 7, draws="independent")
    resumed.restore(state)
    assert drawn(resumed, 9) == drawn(corpus, 9)


def test_each_skill_draws_its_own_documents(tmp_path):
    records = [
        {"text": "alpha one", "skill": "Optimization"},
        {"text": "beta two", "skill": ["Optimization", "Spatial Reasoning", 3]},
        {"text": "gamma three", "skill": " Spatial Reasoning "},
        {"text": "delta four", "skill": 5},
    ]
    path = write_jsonl(tmp_path, records)
    config = CorpusConfig(path=path, min_words=1, sampling="per_skill")
    corpus = Corpus.load(config, 0, skills=("Optimization", "Causal Inference"))
    assert [document.skills for document in corpus] == [
        ("Optimization",),
        ("Optimization", "Spatial Reasoning"),
        ("Spatial Reasoning",),
        (),
    ]

    def texts(skill, count):
        return [corpus.next(skill).text for _ in range(count)]

    # what one skill has drawn is drawn for the others too
    first = set(texts("Optimization", 2))
    spatial = texts("Spatial Reasoning", 3)
    new = {"beta two", "gamma three", "delta four"} - first
    assert set(spatial[: len(new)]) == new and set(spatial) <= new | first
    assert texts("Causal Inference", 2) == ["delta four"] * 2
    assert set(texts("Optimization", 1)) <= {"alpha one", "beta two"}  # the other was drawn more
    state = json.loads(json.dumps(corpus.state()))
    expected = texts("Optimization", 5) + texts("Spatial Reasoning", 5)
    corpus = Corpus.load(config, 0)
    corpus.restore(state)
    assert texts("Optimization", 5) + texts("Spatial Reasoning", 5) == expected

    uniform = Corpus.load(CorpusConfig(path=path, min_words=1), 0)
    assert {uniform.next("Causal Inference").text for _ in range(4)} == {
        "alpha one",
        "beta two",
        "gamma three",
        "delta four",
    }


def test_no_document_comes_again_for_another_skill_before_all_came_once():
    """Documents that name no skill are every skill's."""
    corpus = Corpus(numbered(6), 0, sampling="per_skill")
    skills = ["Optimization", "Spatial Reasoning", "Causal Inference"]
    order = [corpus.next(skill).document_id for skill in skills * 8]
    epochs = [order[start : start + 6] for start in range(0, 24, 6)]
    assert all(len(set(epoch)) == 6 for epoch in epochs), epochs
    assert len({tuple(epoch) for epoch in epochs}) > 1
    # and goes on so after a resume
    corpus = Corpus(numbered(6), 0, sampling="per_skill")
    begun = [corpus.next(skill).document_id for skill in skills]
    resumed = Corpus(numbered(6), 0, sampling="per_skill")
    resumed.restore(json.loads(json.dumps(corpus.state())))
    assert begun + [resumed.next(skill).document_id for skill in skills * 7] == order


def test_how_documents_are_drawn_is_a_setting(tmp_path):
    path = write_jsonl(tmp_path, [{"text": f"word {index}"} for index in range(12)])
    chosen = {
        draws: drawn(Corpus.load(CorpusConfig(path=path, min_words=1, draws=draws), 0), 12)
        for draws in ("epoch", "independent")
    }
    assert len(set(chosen["epoch"])) == 12 > len(set(chosen["independent"]))


def test_a_skill_without_documents_is_named(tmp_path):
    path = write_jsonl(tmp_path, [{"text": "alpha", "skill": "Optimization"}])
    config = CorpusConfig(path=path, min_words=1, sampling="per_skill")
    with pytest.raises(CorpusError, match=r"none of the 1 documents is for the skill 'Spatial"):
        Corpus.load(config, 0, skills=("Optimization", "Spatial Reasoning"))


def test_a_corpus_that_is_off_reads_nothing(tmp_path):
    absent = CorpusConfig(path=str(tmp_path / "absent"), enabled=False, sampling="per_skill")
    corpus = Corpus.load(absent, 0, skills=("Optimization",))
    assert len(corpus) == 0 and corpus.next("Optimization") is None
    assert corpus.rare_terms("orbit") == ()
    corpus.restore(json.loads(json.dumps(corpus.state())))
    with pytest.raises(CheckpointError, match="another corpus"):
        Corpus(numbered(1), 0).restore(corpus.state())


def test_the_prompt_about_a_document_needs_a_corpus():
    off = CorpusConfig(enabled=False)
    for prompt in ("compact", "multi_turn"):
        Config(corpus=off, designer=DesignerConfig(prompt=prompt))
    with pytest.raises(ConfigError, match=r'designer\.prompt="corpus".*corpus\.enabled=False'):
        Config(corpus=off, designer=DesignerConfig(prompt="corpus"))


# ---------------------------------------------------------------- words


def test_a_text_is_cut_to_tokens(chat):
    text = "fire the levers ☃☃ in a hidden order"
    tokenizer = chat.tokenizer
    whole = len(tokenizer.encode(text))
    kept = []
    for room in range(1, whole):
        cut = cut_tokens(text, room, tokenizer)
        assert len(tokenizer.encode(cut)) <= room
        assert cut == "" or cut.endswith(CUT_MARKER)
        kept.append(cut.removesuffix(CUT_MARKER))
        assert text.startswith(kept[-1])
    assert kept == sorted(kept, key=len) and kept[0] == ""
    assert kept[-1].startswith("fire the levers")
    assert cut_tokens(text, whole, tokenizer) == text


def test_rare_terms_against_a_count_by_hand():
    texts = ["common words", "common words again", "common Words orbit", "common lambda"]
    documents = [
        Document(f"d{i}", f"pkg.title_{i}.galaxy" if i == 0 else "pkg", text)
        for i, text in enumerate(texts)
    ]
    corpus = Corpus(documents, 0)
    counts = {
        "common": 4,
        "words": 3,
        "again": 1,
        "orbit": 1,
        "galaxy": 1,
        "title": 0,
        "absent": 0,
        "WORDS": 3,
    }
    assert {term: corpus.document_frequency(term) for term in counts} == counts
    text = "Orbit! common again, orbit words_again absent sun encyclopaediae lambda w0rds galaxy"
    # 1 of 4 documents is a share of 0.25: not below 0.25, below 0.26.
    assert corpus.rare_terms(text, 0.25) == ("absent",)
    assert corpus.rare_terms(text, 0.26) == ("orbit", "again", "absent", "galaxy")
    assert corpus.rare_terms(text, 1.0) == ("orbit", "again", "absent", "galaxy")
    assert corpus.rare_terms("common", 1.01) == ("common",)


def test_excerpt_is_the_title_and_one_line():
    document = Document("d", "A title", "one  two\n\nthree four")
    assert excerpt(document, 3) == "A title\none two three"
    assert excerpt(document, 9) == "A title\none two three four"
