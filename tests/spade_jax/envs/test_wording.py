"""What says the same reads the same, whatever it is written with."""

import pytest

from spade_jax.envs.wording import words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Say 'Fire Cheby', then; K42!", ["say", "fire", "cheby", "then", "k42"]),
        ("c-o-b (a_1)", ["c", "o", "b", "a_1"]),
        ("Five, two-SIX and zero", ["5", "2", "6", "and", "0"]),
        ("twenty-five, thirty, forty ten", ["25", "30", "40", "10"]),
        ("two hundred and five; one hundred", ["205", "100"]),
        ("nine hundred ninety nine hundred", ["999", "hundred"]),
        ("one hundred and north, a hundred", ["100", "and", "north", "a", "hundred"]),
        ("５２ ٥٢ 五二零", ["52", "52", "5", "2", "0"]),
        ("先按5再按2。", ["先", "按", "5", "再", "按", "2"]),
        ("カギ、열쇠", ["カ", "ギ", "열", "쇠"]),
        ("→→ a+b", ["→", "→", "a", "+", "b"]),
        ("`x` | ~ ... *** —", ["x"]),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]):
    assert words(text) == expected
