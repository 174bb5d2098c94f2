"""What a terminal would obey is shown instead."""

import unicodedata

import pytest

from spade_jax.terminal import visible, visible_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode ☃ 漢字 \u3000", "plain, ünïcode ☃ 漢字 \u3000"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x1b]52;c;cm0=\x07", r"\x1b]52;c;cm0=\x07"),
        ("\x9b31m", r"\x9b31m"),  # the one-byte form of escape and bracket
        ("a\rb\x08c\x7f\x00", r"a\rb\x08c\x7f\x00"),
        ("\u202eevil\u2066\u200b\u200d", r"\u202eevil\u2066\u200b\u200d"),
        ("\u2028\u2029\ufeff\U000e0041", r"\u2028\u2029\ufeff\U000e0041"),
        ("\ud800", r"\ud800"),
        ("a\nb\tc", r"a\nb\tc"),
    ],
)
def test_a_line_holds_nothing_a_terminal_obeys(text: str, shown: str):
    assert visible(text) == shown


def test_lines_keep_line_breaks_and_tabs_only():
    assert visible_lines("a\tb\r\nc\x0bd\x85e\n") == ["a\tb", r"c\x0bd\x85e", ""]


def test_no_character_at_all_gets_through():
    everything = "".join(map(chr, range(0x110000)))
    for line in visible_lines(everything):
        kinds = {unicodedata.category(character) for character in line if character != "\t"}
        assert not kinds & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
