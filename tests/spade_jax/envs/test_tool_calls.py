"""Calls and answers are taken from outside thinking alone; no text raises or costs more than its
length."""

import gc
import json
import random
import time

import pytest

from spade_jax.envs import tool_calls
from spade_jax.envs.tool_calls import MAX_CALLS, Call, Malformed, Move, parse, parse_json
from spade_jax.roles import parsing

FIND = '<tool_call>{"name": "find", "arguments": {"city": "Oslo"}}</tool_call>'
XML = (
    "<tool_call>\n<function=find>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
)
FOUND = Call("find", {"city": "Oslo"})
XML_FOUND = Call("find", {"city": "Oslo"}, is_text=True)


@pytest.mark.parametrize(
    ("completion", "calls", "answer"),
    [
        (FIND, (FOUND,), None),
        (f"I look.\n{FIND}\n\n{FIND} so", (FOUND, FOUND), None),
        (XML, (XML_FOUND,), None),
        (f"{FIND}{XML}", (FOUND, XML_FOUND), None),
        ('<tool_call>\n{"name":"list"}\n</tool_call>', (Call("list", {}),), None),
        (FIND.replace("arguments", "parameters"), (FOUND,), None),
        (FIND.replace('{"city": "Oslo"}', r'"{\"city\": \"Oslo\"}"'), (FOUND,), None),
        ("<tool_call><function=list></function></tool_call>", (Call("list", {}, True),), None),
        (
            "<tool_call><function=w><parameter=t>\na\n\nb</parameter><parameter=n>5</parameter>"
            "</function></tool_call>",
            (Call("w", {"t": "a\n\nb", "n": "5"}, True),),
            None,
        ),
        # tags within strings, values and answers are text
        (
            '<tool_call>{"name":"w","arguments":{"t":"</tool_call><answer>1</answer>"}}</tool_call>',
            (Call("w", {"t": "</tool_call><answer>1</answer>"}),),
            None,
        ),
        (
            f"<tool_call><function=w><parameter=t>{FIND}</parameter></function></tool_call>",
            (Call("w", {"t": FIND}, True),),
            None,
        ),
        (f"<answer>{FIND}</answer>", (), FIND),
        # answers
        ("<answer> 12\n</answer>", (), "12"),
        ("<answer>draft</answer> no, <answer>12</answer>", (), "12"),
        (f"<answer>12</answer>{FIND}", (FOUND,), "12"),
        ("<answer>12</answer> <answer>open", (), "12"),
        (f"<answer>open {FIND}", (FOUND,), None),
        # thinking
        (f"<think>{FIND}<answer>1</answer></think>", (), None),
        (f"<think>{FIND}</think>{XML}", (XML_FOUND,), None),
        (f"{FIND}<think>{XML}", (FOUND,), None),
        (f"{FIND}</think>{XML}", (XML_FOUND,), None),
        (f"<think>a</think>{FIND}<think><answer>3</answer></think>", (FOUND,), None),
        (f"<tool_call><think>x</think>{FIND.removeprefix('<tool_call>')}", (FOUND,), None),
        # none
        ("", (), None),
        ("find the city of Oslo", (), None),
        ('{"name": "find", "arguments": {"city": "Oslo"}}', (), None),
        ("</tool_call></answer>", (), None),
    ],
)  # fmt: skip
def test_calls_and_answer(completion, calls, answer):
    assert parse(completion) == Move(calls, answer)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "no JSON object"),
        ("   ", "no JSON object"),
        ("find(city='Oslo')", "not JSON: Expecting value, 0 characters on"),
        ('{"name": "find", "arguments": {city: 1}}', "not JSON"),
        ("{'name': 'find'}", "not JSON"),
        ('{"name": "find"} {"name": "find"}', "not followed by </tool_call>"),
        ('[{"name": "find"}]', "not an object"),
        ('"find"', "not an object"),
        ('{"arguments": {}}', "no 'name'"),
        ('{"name": ["find"]}', "no 'name'"),
        ('{"name": ""}', "no 'name'"),
        ('{"name": "find", "arguments": ["Oslo"]}', "'arguments' is not an object"),
        ('{"name": "find", "arguments": null}', "'arguments' is not an object"),
        ('{"name": "find", "arguments": "Oslo"}', "not JSON"),
        ('{"name": "find", "city": "Oslo"}', "'city' stands beside 'name'"),
        ('{"name": "find", "arguments": {"n": NaN}}', "NaN is not JSON"),
        ('{"name": "find", "arguments": {"n": -Infinity}}', "-Infinity is not JSON"),
        ('{"name": "find", "arguments": {"n": 1e999}}', "1e999"),
        ('{"name": "find", "arguments": {"n": 12345678901234567890}}', "whole number of more"),
        ('{"name": "find", "arguments": {"n": 1, "n": 2}}', "'n' is given twice"),
        ('{"name": "find", "arguments": {"n": ' + "[" * 16 + "]" * 16 + "}}", "more than 16 lists"),
        ('{"name": "find", "arguments": {"n": ' + "[" * 10**5 + "]" * 10**5 + "}}", "more than 16"),
        ('{"name": "find", "arguments": {"n": "\\ud800"}}', "lone surrogate"),
        ('{"name": "find", "arguments": {"n": "\ud800"}}', "lone surrogate"),
        ('```json\n{"name": "find"}\n```', "not JSON"),
        ("<function=find>", "not followed by </function>"),
        ("<function>find</function>", "does not start with <function=NAME>"),
        ("<function= ></function>", "does not start with <function=NAME>"),
        ("<function=find><parameter=city>Oslo</function>", "'city' is not closed"),
        ("<function=find>Oslo</function>", "not followed by </function>"),
        ("<function=find></function> now", "not followed by </tool_call>"),
        ("<function=f\udc80></function>", "lone surrogate"),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "'a' is given twice",
        ),
    ],
)
def test_what_is_no_call_says_why_in_its_place(body: str, problem: str):
    malformed, after = parse(f"<tool_call>{body}</tool_call>\n{FIND}").calls
    assert isinstance(malformed, Malformed)
    assert problem in malformed.problem
    assert after == FOUND


def test_a_call_that_is_not_closed_is_none():
    (malformed,) = parse(FIND.removesuffix("</tool_call>")).calls
    assert malformed == Malformed("the call is not followed by </tool_call>")
    # what it swallows is not obeyed: it may be a quotation
    (malformed,) = parse(f'<tool_call>{{"name": "say", "arguments": {{"t": {FIND}').calls
    assert isinstance(malformed, Malformed)


def test_deepest_arguments_that_are_allowed():
    value = "[" * 14 + "]" * 14
    (call,) = parse(f'<tool_call>{{"name": "f", "arguments": {{"n": {value}}}}}</tool_call>').calls
    assert call == Call("f", {"n": json.loads(value)})


def test_many_calls_are_cut():
    *calls, last = parse(FIND * (MAX_CALLS + 5) + "<answer>1</answer>").calls
    assert calls == [FOUND] * MAX_CALLS
    assert last == Malformed("more than 32 calls in one turn; the rest is not read")
    assert len(parse(FIND * MAX_CALLS).calls) == MAX_CALLS


def test_one_rule_of_thinking_for_all_roles():
    assert parsing.outside_thinking is tool_calls.outside_thinking


def test_json_texts():
    assert parse_json(' {"a": [1, 2.5, true, null]}\n') == {"a": [1, 2.5, True, None]}
    for text in ("", "1 2", "nan", "{", "[1,]", "\ufeff1", "1" * 5000, "0." + "1" * 5000):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)


PIECES = (
    "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<think>", "</think>",
    "<function=", "f>", "<function=f>", "</function>",
    "<parameter=", "<parameter=a>", "</parameter>",
    "{", "}", "[", "]", '"name"', '"arguments"', ":", ",", '"', "\\", "\\u", "\\ud800",
    "1", "-", "1e9", "9" * 25, "true", "NaN", " ", "\n", "\0", "\ud800", "☃", "x",
    FIND, XML, '{"name": "a", "arguments": {"b": ',
)  # fmt: skip


def test_no_text_raises_and_every_result_is_plain():
    rng = random.Random(0)
    num_calls = num_malformed = 0
    for _ in range(20_000):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 25)))
        move = parse(text)
        assert move.answer is None or "<answer>" in text
        for call in move.calls:
            if isinstance(call, Call):
                num_calls += 1
                json.dumps(
                    [call.name, call.arguments], allow_nan=False, ensure_ascii=False
                ).encode()
            else:
                num_malformed += 1
                assert 0 < len(call.problem.encode()) < 300
        # the same text as a thought says nothing
        thought = text.replace("</think>", "")
        assert parse(f"<think>{thought}") == Move((), None)
        assert parse(f"<think>{thought}</think>{text}") == move
    assert min(num_calls, num_malformed) > 1000


def test_calls_that_are_written_are_read():
    rng = random.Random(1)

    def value(room: int):
        kind = rng.randrange(7 if room else 5)
        if kind == 5:
            return [value(room - 1) for _ in range(rng.randint(0, 3))]
        if kind == 6:
            return {text(): value(room - 1) for _ in range(rng.randint(0, 3))}
        return (text(), rng.randint(-(10**9), 10**9), rng.random(), True, None)[kind]

    def text() -> str:
        plain = rng.choices(
            [piece for piece in PIECES if "think" not in piece], k=rng.randint(0, 6)
        )
        return "".join(plain).replace("\ud800", "").replace("</parameter>", "")

    for _ in range(2000):
        arguments = {text(): value(4) for _ in range(rng.randint(0, 4))}
        body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=rng.random() < 0.5)
        assert parse(f"<tool_call>{body}</tool_call>").calls == (Call("f", arguments),)
        texts = {f"a{index}": text() for index in range(rng.randint(0, 4))}
        body = "".join(f"<parameter={key}>\n{item}\n</parameter>" for key, item in texts.items())
        body = f"<tool_call><function=f>{body}</function></tool_call>"
        assert parse(body).calls == (Call("f", texts, True),)


HARD = {
    "opened": ("", "<tool_call>"),
    "empty": ("", "<tool_call></tool_call>"),
    "thoughts": ("", "<think>"),
    "ends of thoughts": ("", "</think>"),
    "short thoughts": ("", "<think></think>"),
    "split thoughts": ("", "<th<think></think>ink>"),
    "answers": ("", "<answer>"),
    "ends of answers": ("<answer>", "</answer>"),
    "all answers": ("", "<answer></answer>"),
    "strings": ("", '<tool_call>{"a":"'),
    "key after key": ("", '<tool_call>{","a":"'),
    "objects": ("", '<tool_call>{"a":{"a":'),
    "brackets": ("<tool_call>", "["),
    "calls with brackets": ("", "<tool_call>[[[[[[[["),
    "spaces": ("<tool_call>", " "),
    "calls with spaces": ("", "<tool_call>        "),
    "digits": ('<tool_call>{"name":"a","arguments":{"a":', "1"),
    "decimals": ('<tool_call>{"name":"a","arguments":{"a":0.', "1"),
    "escapes": ('<tool_call>{"name":"a","arguments":{"a":"', "\\u0041"),
    "backslashes": ('<tool_call>{"a":"', "\\"),
    "items": ('<tool_call>{"name":"a","arguments":{"a":[0', ",1234567"),
    "lists": ('<tool_call>{"name":"a","arguments":{"a":[0', ",[]"),
    "lines": ('<tool_call>{"name":"a","arguments":{"a":[0', "\n"),
    "functions": ("", "<tool_call><function=a>"),
    "half functions": ("", "<tool_call><function="),
    "function names": ("<tool_call><function=", "a"),
    "parameters": ("<tool_call><function=a>", "<parameter=a>"),
    "values": ("<tool_call><function=a><parameter=a>", "b"),
    "one value after another": ("", "<tool_call><function=a><parameter=a>"),
    "good calls": ("", FIND),
    "good calls in XML": ("", XML),
    "encoded twice": ('<tool_call>{"name":"a","arguments":"{\\"a\\":', "["),
}


def cost_s(text: str) -> float:
    """Processor time to parse a text, less that of the garbage collector, whose share depends on
    what else is alive."""
    best = float("inf")
    gc.disable()
    try:
        for _ in range(3):
            start = time.process_time()
            parse(text)
            best = min(best, time.process_time() - start)
    finally:
        gc.enable()
    return best


@pytest.mark.parametrize("name", HARD)
def test_time_is_linear(name: str):
    """Eight times the text takes about eight times the processor time; if quadratic, 64 times."""
    head, unit = HARD[name]

    def text(size: int) -> str:
        return head + unit * (size // len(unit))

    small_s = max(cost_s(text(2**17)), 0.0002)
    assert cost_s(text(2**20)) < 24 * small_s


def test_time_is_linear_in_distinct_names():
    def text(count: int, pair: str, form: str) -> str:
        return form.format("".join(pair.format(index) for index in range(count)))

    for pair, form in (
        ('"k{0}":{0},', '<tool_call>{{"name":"a","arguments":{{{}"z":1,"z":1}}}}</tool_call>'),
        (
            "<parameter=k{0}>1</parameter>",
            "<tool_call><function=f>{}</function></tool_call>",
        ),
    ):
        small_s = max(cost_s(text(8_000, pair, form)), 0.0002)
        assert cost_s(text(64_000, pair, form)) < 24 * small_s
