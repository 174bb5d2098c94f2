"""A text tells an answer when a player need only read it off; words in common are no leak."""

import random

import pytest

from spade_jax.envs import leaks
from spade_jax.envs.tool_task import ToolTask

call, answer = ToolTask.call, ToolTask.answer
SHUFFLED = [["amber", "basalt", "cobalt", "dolmen", "ember"] for _ in range(10)]
for _seed, _words in enumerate(SHUFFLED):
    random.Random(_seed).shuffle(_words)


def told(shown: list[str], solutions: list[list[str]]) -> tuple[float, str]:
    return leaks.told_frac(dict(enumerate(shown)), dict(enumerate(solutions)))


def test_a_long_answer_is_told_wherever_it_stands():
    codes = [[str(seed + 10), str(seed + 40), str(seed + 70)] for seed in range(10)]
    shown = [f"{'Well. ' * seed}({a}, {b}, {c}) is it." for seed, (a, b, c) in enumerate(codes)]
    assert told(shown, codes) == (1.0, "word for word")
    assert told([*shown[:3], *["Hm."] * 7], codes)[0] == pytest.approx(0.3)


def test_a_long_answer_with_words_between_is_told_where_these_are_the_same():
    codes = [[str(seed + 10), str(seed + 40), str(seed + 70)] for seed in range(10)]
    shown = [f"A is {a}, B is {b}, C is {c}." for a, b, c in codes]
    assert told(shown, codes) == (1.0, "its first word as word 3")
    assert told([*shown[:8], "Hm.", "Hm."], codes)[0] == 0.0
    wandering = [
        f"{'hm ' * n}{a} {'so ' * n}{b} {'and ' * n}{c}" for n, (a, b, c) in enumerate(codes)
    ]
    assert told(wandering[1:], codes[1:])[0] == 0.0
    again = [[a, a, b] for a, b, _ in codes]  # how often each is said is left to be found
    assert told([f"Heat {a}, then {b}." for a, b, _ in codes], again)[0] == 0.0


@pytest.mark.parametrize("form", ["{0}{1}{2}", "x{0}{1}{2}x", "{0}/{1}{2}"])
def test_an_answer_in_other_words_of_the_same_letters_is_told(form: str):
    codes = [[str(seed + 10), str(seed + 40), str(seed + 70)] for seed in range(10)]
    shown = [("hm " * seed) + form.format(*code) for seed, code in enumerate(codes)]
    assert told(shown, codes) == (1.0, "letter for letter")
    spelt = [[f"cobalt{n}"] for n in range(10)]
    assert told([f"{'hm ' * n}c-o-b-a-l-t-{n}" for n in range(10)], spelt)[0] == 1.0
    assert told(["c o b a l t"] * 10, spelt)[0] == 0.0


def test_what_all_solutions_have_in_common_is_not_the_answer():
    solutions = [[f"set red {n}", f"set blue {n + 20}", f"set green {n + 40}"] for n in range(10)]
    assert told([f"{n} {n + 20} {n + 40}" for n in range(10)], solutions)[0] == 1.0
    assert told(["set red, set blue, set green"] * 10, solutions)[0] == 0.0


def test_an_order_that_the_text_shows_by_chance_is_no_leak():
    assert told(["Order amber, basalt, cobalt, dolmen, ember."] * 10, SHUFFLED)[0] == 0.0
    same = SHUFFLED[0]
    assert told([f"Order {', '.join(same)}."] * 10, [same, same, *SHUFFLED[:8]])[0] == 0.0
    assert told([f"Order {', '.join(order)}." for order in SHUFFLED], SHUFFLED)[0] == 1.0


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{} it is, said {noise}", "as word 1"),
        ("{noise}, so {}", "as word 1 from the end"),
        ("{noise}. The code is {}, {noise}", "after 'code is'"),
    ],
)
def test_a_short_answer_is_told_at_a_fixed_place(text: str, place: str):
    shown = [text.format(n * 7, noise="hm " * n) for n in range(1, 11)]
    assert told(shown, [[str(n * 7)] for n in range(1, 11)]) == (1.0, place)


def test_one_of_many_options_is_no_leak():
    rng = random.Random(0)
    options = [f"word{index}" for index in range(30)]
    shown = [f"Which is odd? {' '.join(rng.sample(options, 20))}" for _ in range(12)]
    answers = [[rng.choice(text.split()[3:])] for text in shown]
    assert told(shown, answers)[0] == 0.0


def test_solutions_of_other_lengths_or_without_a_word_can_be_judged():
    solutions = [["go"] * (n + 3) for n in range(5)] + [["→", "+"]]
    assert told(["go " * 3] * 6, solutions)[0] == 0.0
    assert told(["x", "y"], [["+"], ["-"]])[0] == 0.0


def test_contains_wants_all_actions_in_a_row():
    actions = ["fire cheby", "ripple", "lock"]
    assert leaks.contains("First fire Cheby. RIPPLE, lock!", actions)
    assert not leaks.contains("fire cheby, then ripple, then lock", actions)
    assert not leaks.contains("misfire cheby ripple locks", actions)
    assert not leaks.contains("anything", ["+"])


def test_names_in_order_allows_words_between():
    actions = ["fire cheby", "ripple", "ripple"]
    assert leaks.names_in_order("fire cheby, then ripple and again ripple", actions)
    assert leaks.names_in_order("fire cheby ripple ripple", actions)
    assert not leaks.names_in_order("fire cheby, then ripple", actions)
    assert not leaks.names_in_order("ripple, ripple, fire cheby", actions)
    assert not leaks.names_in_order("fire the cheby, ripple, ripple", actions)
    assert not leaks.names_in_order("anything", [])


def test_named_takes_the_longest_action_at_each_word():
    actions = ["go", "go north", "take key", "+"]
    text = "Go north first; then take key, take a rest, and GO."
    assert leaks.named(text, actions) == ["go north", "take key", "go"]
    assert leaks.named(text, []) == []


LENT = [call("lend", item="T19", to="Jun") + call("note", what=["late", 7]), answer(771)]


def test_of_a_call_only_what_is_filled_in_is_said():
    assert leaks.values(LENT[0]) == ["T19", "Jun", "late", "7"]
    assert leaks.said(LENT) == ["t19", "jun", "late", "7", "771"]
    assert leaks.values("lend T19 to Jun") is None
    assert leaks.values("<answer>") is None
    assert leaks.contains("Say T19, Jun, late, 7 and 771".replace("and ", ""), LENT)
    assert leaks.named(
        "pull T5 for Jun, and T7", [call("pull", item=f"T{n}") for n in range(9)]
    ) == [
        call("pull", item="T5"),
        call("pull", item="T7"),
    ]


def test_a_text_fills_calls_in_if_it_holds_what_is_not_public():
    text = "First 771; the thing is T19, which is late by 7."
    assert leaks.fills_in(text, LENT, ["jun"])
    assert not leaks.fills_in(text, LENT, [])
    assert not leaks.fills_in(text.replace("771", "77"), LENT, ["jun"])
    assert not leaks.fills_in(text, LENT, leaks.said(LENT))  # nothing is hidden
    assert not leaks.fills_in("pull amber", ["pull amber"], [])  # no call


def test_an_observation_tells_what_calls_need_however_many_they_are():
    def needed(n: int) -> list[str]:
        calls = [call("open", box=f"K{n}{letter}") for letter in "ABC"]
        return [*calls[: 2 + n % 2], answer(f"{n + 500}")]

    solutions = [needed(n) for n in range(10)]
    shown = [f"{'hm ' * n}Open {' '.join(leaks.said(each))}." for n, each in enumerate(solutions)]
    assert told(shown, solutions) == (1.0, "word for word")
    assert told(["Open the boxes."] * 10, solutions)[0] == 0.0


def test_what_a_text_hands_over_of_the_actions():
    actions = ["say Mellon42", "go", call("open", box="K7")]
    assert leaks.handed_over("go: m.e.l.l.o.n, k, 42 and 7", actions) == [
        "mellon",
        "42",
        "go",
        "k",
        "7",
    ]
    assert leaks.handed_over("sayings of a melon, 427, open the box", actions) == []


def test_a_text_shows_a_piece_with_any_ending():
    assert leaks.shows("Pulled at last.", "pull") and leaks.shows("K42", "42")
    assert not leaks.shows("They pass by.", "ass") and not leaks.shows("Gone.", "go")


def test_a_text_joins_actions_that_it_cuts_into_other_words():
    digits = ["5", "2", "6"]
    assert leaks.joins("The code is 526, one digit a turn.", digits)
    assert leaks.joins("52-6", digits) and leaks.joins("fifty-two, six", digits)
    assert not leaks.joins("526", digits[:2]) and not leaks.joins("5 and 2 and 6", digits)
    assert leaks.joins("Press abed.", ["a", "b", "e", "d"])
    assert not leaks.joins("A bed.", ["a", "b", "e", "d"])  # four letters stand in any text
    assert leaks.joins("am berr-ed", ["amber", "red"])


@pytest.mark.parametrize("form", ["Code {0}{1}{2}{3}.", "It is {4}, {5}, {6} and {7}."])
def test_a_code_of_digits_is_told_in_one_number_or_in_words(form: str):
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    codes = [list(str(4321 + 577 * n)) for n in range(9)]
    shown = [
        "hm " * n + form.format(*code, *(names[int(digit)] for digit in code))
        for n, code in enumerate(codes)
    ]
    assert told(shown, codes)[0] == 1.0
