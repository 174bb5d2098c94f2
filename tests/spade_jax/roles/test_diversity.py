"""Embeddings, Vendi scores and runs of repeats by hand; each option of the gate has its effect."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from helpers import make_trajectory
from spade_jax.config import Config, DiversityConfig
from spade_jax.envs.similarity import shingles
from spade_jax.errors import ConfigError
from spade_jax.roles import diversity
from spade_jax.roles.diversity import Embedder, Likeness, Nearness, Window, ngrams, vendi
from spade_jax.types import Design, EnvironmentSource, Gate, GateResult, Verdict

SKILL = "Optimization"
VAULT = '''
class VaultEnv:
    """Open a vault of three dials by trying numbers."""
    def reset(self, seed):
        self.code = seed * 7 % 90
        return "The vault has three dials, say a number from 10 to 99.", {}
'''
RENAMED = VAULT.replace("VaultEnv", "SafeEnv").replace("code", "secret").replace("90", "80")
# the same texts, coded otherwise
RECODED = '''
TALK = {"open": "The vault has three dials, say a number from 10 to 99."}
class DialsEnv:
    """Open a vault of three dials by trying numbers."""
    def reset(self, seed):
        digits = []
        while len(digits) < 3:
            seed = (seed ^ 977) + 13
            digits.append(seed % 10)
        self.wanted = tuple(digits)
        return TALK["open"], dict(zip("abc", digits))
'''
FERRY = '''
class FerryEnv:
    """Bring goats and wolves over a river without a loss."""
    def reset(self, seed):
        self.bank = ["goat", "wolf", "cabbage"][: seed % 3]
        return "On the bank wait passengers; who shall board the ferry first?", {}
'''


def likeness(program=0.95, rules=0.98) -> Likeness:
    return Likeness(program, rules, Embedder())


def design(program, cycle=0, gate="", parsed=True, skill=SKILL):
    gates = {Gate.PARSE: GateResult.PASSED if parsed else GateResult.REFUSED}
    return Design(
        "d",
        cycle,
        skill,
        "easy",
        "doc",
        "text",
        make_trajectory(),
        Verdict(not gate, gate, gates=gates),
        None if program is None else EnvironmentSource(program, skill, "easy", "doc"),
    )


# ---------------------------------------------------------------- embeddings and Vendi


def slow_ngrams(text: str) -> np.ndarray:
    """The embedding with Python's integers."""
    line = f"  {' '.join(text.lower().split())}  ".encode()
    counts = [0] * diversity.PLACES
    for size in (3, 4, 5):
        for start in range(len(line) - size + 1):
            value = size
            for byte in line[start : start + size]:
                value = (value * 1099511628211 + byte) % 2**64
            value ^= value >> 33
            value = value * 0xFF51AFD7ED558CCD % 2**64
            value ^= value >> 33
            counts[value % diversity.PLACES] += 1
    vector = np.array([math.log1p(count) for count in counts])
    return vector / math.sqrt(sum(vector**2))


@pytest.mark.parametrize("text", ["", "a", "The vault  has\nTHREE dials, ünïcode ☃ \ud800"])
def test_ngrams_are_counts_in_hashed_places(text):
    if "\ud800" in text:
        found = ngrams(text)
        np.testing.assert_array_equal(found, ngrams(text.replace("\ud800", "?")))
        text = text.replace("\ud800", "?")
    np.testing.assert_allclose(ngrams(text), slow_ngrams(text), atol=1e-6)
    assert np.linalg.norm(ngrams(text)) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(ngrams(text), ngrams(f" {text.upper()}\n"))


@pytest.mark.parametrize(
    ("rows", "score"),
    [
        ([[1, 0, 0]], 1),
        ([[1, 0, 0]] * 5, 1),  # copies of one
        (np.eye(3), 3),  # nothing in common
        ([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]], 2),
        # eigenvalues 3/4 and 1/4 at a cosine of 1/2
        ([[1, 0, 0], [0.5, math.sqrt(0.75), 0]], (4 / 3) ** 0.75 * 4**0.25),
        # three alike, one apart: 3/4 and 1/4 again
        ([[1, 0, 0]] * 3 + [[0, 0, 1]], (4 / 3) ** 0.75 * 4**0.25),
    ],
)
def test_vendi_by_hand(rows, score):
    rows = np.asarray(rows, np.float64)
    assert vendi(rows @ rows.T) == pytest.approx(score, abs=1e-6)


def test_an_embedder_keeps_the_newest_texts(monkeypatch):
    monkeypatch.setattr(diversity, "MAX_KEPT", 3)
    embed, computed = Embedder(), []
    monkeypatch.setattr(diversity, "ngrams", lambda text: computed.append(text) or ngrams(text))
    np.testing.assert_array_equal(embed(["b", "a", "b"]), [ngrams("b"), ngrams("a"), ngrams("b")])
    embed(["c", "d"])
    assert computed == ["b", "a", "c", "d"]
    embed(["a"])  # kept
    embed(["b"])  # not any more
    assert computed == ["b", "a", "c", "d", "b"]


FAKE = """
import numpy as np
class SentenceTransformer:
    loads = []
    def __init__(self, name, device):
        if name != "tiny":
            raise OSError(f"{name} is neither a folder\\nnor a known model")
        self.loads.append((name, device))
    def encode(self, texts, show_progress_bar):
        return np.array([[3.0, 0.0] if "vault" in text else [0.0, -2.0] for text in texts])
"""


def test_a_sentence_encoder_is_used_where_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "sentence_transformers.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = DiversityConfig(embedding="sentence", encoder="tiny")
    try:
        embed = diversity.embedder(chosen)
        assert embed(["a vault", "a ferry", "a vault"]).tolist() == [[1, 0], [0, -1], [1, 0]]
        assert diversity.embedder(chosen) is embed
        assert sys.modules["sentence_transformers"].SentenceTransformer.loads == [("tiny", "cpu")]
        config = Config(diversity=chosen)
        # two games of a vault are one to this encoder
        near = Likeness.of(config).nearest(VAULT.replace("three", "no"), {"x": RECODED})
        assert near.rules == 1.0 and near.reason.startswith("its texts are those of environment x")
        with pytest.raises(ConfigError, match=r"diversity\.encoder='absent'.*folder nor a known"):
            Embedder("absent")
    finally:
        sys.modules.pop("sentence_transformers", None)
        diversity.embedder.cache_clear()


def test_an_encoder_whose_package_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "sentence_transformers.py").write_text("raise ImportError('No module')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r'"sentence" needs the package sentence-transformers'):
        diversity.embedder(DiversityConfig(embedding="sentence"))


# ---------------------------------------------------------------- likeness


def test_near_duplicates_by_code_and_by_rules():
    assert likeness().nearest(VAULT, {}) == Nearness(0.0, 0.0, "")
    renamed = likeness().nearest(RENAMED, {"other": FERRY, "vault": VAULT})
    assert renamed[:2] == (1.0, 1.0) and "names and numbers aside" in renamed.reason
    recoded = likeness().nearest(RECODED, {"other": FERRY, "vault": VAULT})
    assert recoded.program < 0.3 and recoded.rules > 0.75
    near = likeness(rules=0.7).nearest(RECODED, {"other": FERRY, "vault": VAULT})
    assert near.reason.startswith("its texts are those of environment vault again (cosine 0.")
    apart = likeness().nearest(FERRY, {"vault": VAULT, "recoded": RECODED})
    assert apart.rules < 0.4 and apart.reason == ""


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"rules_similarity": 0.0}, r"diversity\.rules_similarity=0\.0.*above 0, at most 1"),
        ({"window": 1}, r"diversity\.window=1.*at least 2"),
        ({"compared": 0}, r"diversity\.compared=0.*at least 1"),
        ({"encoder": ""}, r"diversity\.encoder=''"),
    ],
)
def test_bad_settings_are_named(values, part):
    with pytest.raises(ConfigError, match=part):
        DiversityConfig(**values)


# ---------------------------------------------------------------- the window


def test_repeats_and_runs_are_counted_by_skill():
    window = Window()
    window.add(
        [
            design(VAULT),
            design(FERRY, skill="Spatial Reasoning"),
            design(RENAMED, gate="duplicate"),  # refused, and still what was written
            design(None),
            design("class (", parsed=False, gate="parse"),
        ],
        likeness(),
        DiversityConfig(),
    )
    window.add(
        [design(FERRY, 1, skill="Spatial Reasoning"), design(RENAMED, 1)],
        likeness(),
        DiversityConfig(),
    )
    window.add([design(FERRY, 2), design(VAULT, 2)], likeness(), DiversityConfig())
    found = [(each.cycle, each.repeats, each.run) for each in window.written]
    assert found == [
        (0, False, 1),
        (0, False, 1),
        (0, True, 2),
        (1, True, 2),  # the second ferry of its skill in a row
        (1, True, 3),
        (2, True, 1),  # a repeat of another skill's: no run
        (2, True, 1),  # the run of vaults was broken
    ]
    assert [each.admitted for each in window.written] == [True, True, False, True, True, True, True]
    assert window.admitted == [VAULT, FERRY, FERRY, RENAMED, FERRY, VAULT]


def test_a_repair_is_no_repetition():
    window = Window()
    first, mended = design(VAULT, gate="random"), replace(design(RENAMED), turn=1)
    window.add([first, mended, design(FERRY)], likeness(), DiversityConfig())
    assert [(each.program, each.repeats) for each in window.written] == [
        (RENAMED, False),
        (FERRY, False),
    ]


def test_the_window_is_bounded_and_survives_json():
    window = Window()
    small = DiversityConfig(window=2, compared=1)
    window.add([design(FERRY), design(VAULT, gate="random"), design(VAULT, 1)], likeness(), small)
    assert [(each.program, each.repeats) for each in window.written] == [
        (VAULT, False),
        (VAULT, True),
    ]
    assert window.admitted == [FERRY, VAULT]
    other = Window.restored(json.loads(json.dumps(window.state())))
    assert other == window
    other.add([design(FERRY, 2)], likeness(), small)
    assert other != window and len(window.written) == 2
    assert other.admitted == [VAULT, FERRY]
    # what is compared with may reach further back than the window
    window.add([design(FERRY, 2)], likeness(), DiversityConfig(window=2, compared=3))
    assert len(window.written) == 2 and window.admitted == [FERRY, VAULT, FERRY]
    assert window.vendi(Embedder(), 2) == Window([], [VAULT, FERRY]).vendi(Embedder(), 2)


def test_vendi_of_a_window_is_of_its_admitted_programs():
    window = Window()
    assert window.vendi(Embedder(), 9) is None
    window.add(
        [design(VAULT), design(RENAMED), design(FERRY, gate="leak")], likeness(), DiversityConfig()
    )
    rules, code = window.vendi(Embedder(), 9)
    assert rules == pytest.approx(1.0, abs=1e-5)  # the same texts twice
    assert code == pytest.approx(1.0, abs=1e-5)  # and the same code but for names
    window.add([design(FERRY)], likeness(), DiversityConfig())
    vault, ferry = shingles(VAULT), shingles(FERRY)
    cosine = len(vault & ferry) / math.sqrt(len(vault) * len(ferry))
    assert 0 < cosine < 0.5
    # K / 3 of two copies and one of that cosine: eigenvalues of [[2, c sqrt 2], [c sqrt 2, 1]] / 3
    root = math.sqrt(1 + 8 * cosine**2)
    values = np.array([3 + root, 3 - root]) / 6
    assert window.vendi(Embedder(), 9)[1] == pytest.approx(
        math.exp(-(values * np.log(values)).sum()), abs=1e-4
    )
