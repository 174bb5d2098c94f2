"""Where a request ends, by what only the host can see."""

import numpy as np
import pytest

from helpers import ByteTokenizer
from spade_jax.rollout.requests import Request
from spade_jax.types import SamplingParams, Stop, Thinking

BYTES = ByteTokenizer()
OPEN, CLOSE = 300, 301
BLOCK = Thinking(OPEN, CLOSE, (3 + 10, CLOSE, 3 + 10))


def request(text: str = "ab", max_tokens: int = 50, context: int = 100, **options) -> Request:
    params = SamplingParams(1.0, max_tokens, (2,), **options)
    return Request(BYTES.encode(text), params, np.zeros(2, np.uint32), context, BYTES.decode)


def absorb(into: Request, tokens: list[int]) -> int:
    return into.absorb(tokens, [-0.5] * len(tokens), [-0.75] * len(tokens))


def test_plain_ends():
    stopped = request()
    assert absorb(stopped, [10, 11]) == 2 and not stopped.ended
    assert absorb(stopped, [12, 2]) == 2 and stopped.stop is Stop.STOP_ID
    assert stopped.tokens[2:] == [10, 11, 12, 2]
    assert stopped.logprobs == [-0.5] * 4 and stopped.untruncated == [-0.75] * 4
    full = request(max_tokens=2)
    absorb(full, [10, 11])
    assert full.stop is Stop.MAX_TOKENS
    long = request(context=4)
    assert long.most == 4
    absorb(long, [10, 11])
    assert long.stop is Stop.CONTEXT


def test_scores_that_were_no_numbers():
    failed = request()
    absorb(failed, [10])
    assert absorb(failed, [11, -1]) == 0
    assert failed.ended and failed.stop is None
    assert "position 4" in failed.error and "2 tokens, 1 sampled" in failed.error


@pytest.mark.parametrize("cut", range(1, 9))
def test_the_token_that_completes_a_stop_string_is_the_last(cut):
    """However the text is cut into rounds, and whatever was sampled beyond."""
    text = BYTES.encode("say </end> and more")
    stopping = request(stop_strings=("never", "</end>"))
    for start in range(0, len(text), cut):
        absorb(stopping, text[start : start + cut])
        if stopping.ended:
            break
    assert stopping.stop is Stop.STOP_STRING
    assert BYTES.decode(stopping.tokens[2:]) == "say </end>"
    assert len(stopping.logprobs) == len(stopping.forced) == stopping.num_sampled == 10


def test_a_stop_string_of_the_prompt_does_not_count():
    asked = request("stop </end", stop_strings=("</end>", "stop"))
    absorb(asked, BYTES.encode("> go on"))
    assert not asked.ended
    absorb(asked, BYTES.encode(" and stop"))
    assert asked.stop is Stop.STOP_STRING


def test_a_stop_string_of_many_bytes_a_character():
    wide = request(stop_strings=("终止",))
    for token in BYTES.encode("说 终止 了"):
        absorb(wide, [token])
        if wide.ended:
            break
    assert BYTES.decode(wide.tokens[2:]) == "说 终止"


def test_the_earlier_of_two_ends_counts():
    both = request(stop_strings=("b",), max_tokens=4)
    absorb(both, BYTES.encode("abcd"))
    assert both.stop is Stop.STOP_STRING and both.num_sampled == 2


def thinking(tokens: int, **options) -> Request:
    return request(thinking_tokens=tokens, thinking=BLOCK, **options)


@pytest.mark.parametrize("cut", [1, 2, 5, 7])
def test_a_spent_budget_closes_the_block_however_rounds_fall(cut):
    sampled = [OPEN, 10, 11, 12, 13, 14, 15]
    asked = thinking(3)
    for start in range(0, len(sampled), cut):
        absorb(asked, sampled[start : start + cut])
        if asked.close_thinking:
            break
    assert asked.tokens[2:] == [OPEN, 10, 11, 12]
    asked.force_closing()
    assert asked.tokens[2:] == [OPEN, 10, 11, 12, *BLOCK.closing]
    assert asked.forced == [False] * 4 + [True] * 3
    assert asked.logprobs[4:] == [0.0] * 3 and not asked.ended
    absorb(asked, [OPEN, 10, 10, 10, 10])  # what it opens now is its own affair
    assert not asked.close_thinking and asked.limit() == asked.most - 1


def test_a_block_that_the_prompt_opened_counts_what_was_sampled():
    asked = thinking(3)
    asked.tokens.append(OPEN)
    asked.num_prompt += 1
    assert asked.limit() == asked.num_prompt + 2
    absorb(asked, [10, 11])
    assert not asked.close_thinking
    absorb(asked, [12])
    assert asked.close_thinking


def test_a_block_closed_in_time_needs_nothing():
    asked = thinking(3)
    absorb(asked, [OPEN, 10, CLOSE, 11, 12, 13, 14])
    assert not asked.close_thinking and asked.limit() == asked.most - 1
    absorb(asked, [OPEN, 10])
    assert asked.limit() == len(asked.tokens) - 1 + 2


def test_opening_a_block_again_gains_nothing():
    asked = thinking(4)
    absorb(asked, [OPEN, 10, OPEN])
    absorb(asked, [10, OPEN, 10, 11])
    assert asked.close_thinking and asked.tokens[2:] == [OPEN, 10, OPEN, 10, OPEN]


def test_a_block_left_open_in_an_earlier_turn_charges_none_later():
    """The turn before was ended inside its block, by a stop id; what came after it is text."""
    asked = thinking(3)
    asked.tokens += [OPEN, 10, 11, 2, 12]
    asked.num_prompt += 5
    assert asked.limit() == asked.most - 1
    absorb(asked, [10, 11, 12, 13, 14])
    assert not asked.close_thinking and asked.num_sampled == 5
    absorb(asked, [OPEN, 10, 11, 12])
    assert asked.close_thinking


@pytest.mark.parametrize("end", ["\n", "\n\n"])
def test_the_closing_of_a_block_is_no_stop_string(end):
    line = BYTES.encode("\n")
    block = Thinking(0, 1, (*line, 1, *line))  # its ids have no text
    asked = request(stop_strings=(end,), thinking_tokens=1, thinking=block)
    absorb(asked, [block.open_id, 20])
    asked.force_closing()
    assert BYTES.decode(asked.tokens[4:]) == "\n\n"
    absorb(asked, [30])
    absorb(asked, [31])
    assert not asked.ended
    absorb(asked, [32, *BYTES.encode(end), 33])
    assert asked.stop is Stop.STOP_STRING and asked.tokens[-2 - len(end) : -len(end)] == [31, 32]


def test_closing_ids_keep_to_the_room_there_is():
    asked = thinking(2, max_tokens=4)
    absorb(asked, [OPEN, 10, 11])
    asked.force_closing()
    assert asked.tokens[2:] == [OPEN, 10, 11, BLOCK.closing[0]] and asked.stop is Stop.MAX_TOKENS


def test_rewinding_forgets_the_last_tokens():
    asked = request()
    absorb(asked, [10, 11, 12])
    asked.rewind(1)
    assert asked.tokens[2:] == [10] and len(asked.logprobs) == len(asked.forced) == 1
