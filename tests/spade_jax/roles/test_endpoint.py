"""The endpoint's client against a server in a thread: what is asked, and what comes of every kind
of reply.
"""

import asyncio
import logging
import time

import pytest
from endpoint_stand_in import Reply, failed, said, serving

from spade_jax.config import Config, DesignerConfig, EndpointConfig
from spade_jax.errors import ConfigError, EndpointError
from spade_jax.recipes import change
from spade_jax.roles.endpoint import (
    MAX_REPLY_BYTES,
    Conversation,
    Endpoint,
    Unanswered,
    open_endpoint,
)
from spade_jax.roles.prompts import Prompt

KEY = "sk-very-secret-0123456789"


def ask(stand_in, *, key="", samples=None, times=1, **settings):
    """What `times` requests at once come to, and the client's count."""
    settings = {"retries": 2, "backoff_s": 0.0, "timeout_s": 5.0} | settings
    config = EndpointConfig(url=stand_in.url, model="other-1", **settings)

    async def work():
        endpoint = Endpoint(config, key)
        try:
            requests = [
                endpoint.complete([{"role": "user", "content": "Write."}], samples or {}, 99)
                for _ in range(times)
            ]
            found = await asyncio.gather(*requests, return_exceptions=True)
        finally:
            await endpoint.close()
        return found, endpoint.stats()

    return asyncio.run(work())


def test_a_request_is_what_the_interface_asks_for():
    with serving([said("A program.")]) as server:
        (text,), stats = ask(server, key=KEY, samples={"temperature": 0.6, "seed": 3})
    assert text == "A program."
    assert server.paths == ["/v1/chat/completions"]
    assert server.asked == [
        {
            "model": "other-1",
            "messages": [{"role": "user", "content": "Write."}],
            "max_completion_tokens": 99,
            "temperature": 0.6,
            "seed": 3,
        }
    ]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert (stats.requests, stats.repeated, stats.unanswered) == (1, 0, 0)
    assert (stats.prompt_tokens, stats.completion_tokens) == (100, 7)


def test_other_interfaces_are_a_setting_away():
    with serving([said("A.")]) as server:
        ask(
            server,
            samples={"temperature": 0.6},
            length_name="max_tokens",
            sampling=False,
            reasoning_effort="low",
        )
    assert "authorization" not in server.headers[0]
    assert server.asked[0] == {
        "model": "other-1",
        "messages": [{"role": "user", "content": "Write."}],
        "max_tokens": 99,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    "first",
    [
        failed(429, "slow down", retry_after="0"),
        failed(500),
        failed(503, "busy"),
        Reply(drop=True),
        Reply(b'{"choices": ['),
        Reply(b"<html>a proxy's page</html>"),
        Reply(b"\xff\xfe"),
        Reply(b'{"choices": []}'),
        Reply(b"[]"),
        said(["no", "text"]),
        Reply(b"[" * 100_000),
        Reply(b"x" * (MAX_REPLY_BYTES + 1)),
    ],
)
def test_what_may_come_right_is_asked_again(first):
    with serving([first, said("At last.")]) as server:
        (text,), stats = ask(server)
    assert text == "At last."
    assert (stats.requests, stats.repeated, stats.unanswered) == (2, 1, 0)


def test_repeats_are_bounded():
    with serving([failed(500, "broken")]) as server:
        (error,), stats = ask(server, retries=3)
    assert isinstance(error, Unanswered)
    assert str(error) == "HTTP 500: broken, 4 times"
    assert len(server.asked) == 4
    assert (stats.repeated, stats.unanswered) == (3, 1)


def test_waits_double_and_heed_the_server(monkeypatch):
    waits = []

    async def note(seconds):
        waits.append(seconds)

    with serving([failed(500), failed(500), failed(500), failed(429, retry_after="17"),
                  failed(429, retry_after="9999"), failed(500)]) as server:  # fmt: skip
        monkeypatch.setattr(asyncio, "sleep", note)
        ask(server, retries=6, backoff_s=2.0)
    # 2, 4, 8 and, at the last, 64 cut to a minute, of each at most a half by chance
    for wait, longest in zip((*waits[:3], waits[5]), (2, 4, 8, 60), strict=True):
        assert longest / 2 <= wait <= longest
    assert waits[3:5] == [17.0, 60.0]  # what it asks for, but never more than a minute


@pytest.mark.parametrize("slow", [Reply(hold=True), Reply(said("x" * 200).body, trickle_s=0.05)])
def test_a_reply_that_takes_too_long_is_given_up(slow):
    started = time.monotonic()
    with serving([slow]) as server:
        (error,), _ = ask(server, retries=1, timeout_s=0.3)
        assert time.monotonic() - started < 5
    assert isinstance(error, Unanswered)
    assert str(error) == "no answer within 0.3 s, 2 times"


def test_no_server_is_a_failure_like_any_other():
    with serving([said("A.")]) as server:
        pass
    (error,), stats = ask(server)
    assert isinstance(error, Unanswered)
    assert "ConnectError" in str(error) and stats.requests == 3


@pytest.mark.parametrize("status", [401, 403, 404, 405, 302])
def test_what_nothing_can_mend_ends_the_run_in_one_line_without_the_key(status, caplog):
    caplog.set_level(logging.DEBUG)
    reply = failed(status, f"Bad key {KEY}\nin line 2 \x1b[31m", location="http://127.0.0.1:9/v1")
    with serving([reply]) as server:
        (error,), stats = ask(server, key=KEY, key_env="SOME_KEY")
    assert isinstance(error, EndpointError)
    line = str(error)
    assert f"HTTP {status}" in line and "other-1" in line and "SOME_KEY" in line
    assert "\n" not in line and "\x1b" not in line
    assert KEY not in line and KEY not in caplog.text
    assert stats.requests == 1 == len(server.paths)  # a redirect is not followed


def test_a_refused_request_is_not_repeated_and_fails_alone():
    with serving([failed(400, "context length exceeded")]) as server:
        (error,), stats = ask(server)
    assert isinstance(error, Unanswered)
    assert str(error) == "HTTP 400: context length exceeded"
    assert (stats.requests, stats.unanswered) == (1, 1)


def test_an_empty_answer_and_halves_of_letters_are_text():
    with serving([said(None), Reply(b'{"choices": [{"message": {"content": "a\\ud800b"}}]}')]) as s:
        first, _ = ask(s)
        second, stats = ask(s)
    assert first == [""] and second == ["a?b"]
    assert stats.prompt_tokens == 0  # this reply counts none


def test_only_so_many_requests_are_under_way():
    with serving([said("A.")]) as server:
        found, _ = ask(server, times=9, concurrency=3)
    assert found == ["A."] * 9
    assert server.most_at_once == 3


def test_a_conversation_is_said_again_as_a_whole():
    with serving([said("First."), said("Second."), said("")]) as server:
        config = EndpointConfig(url=server.url, model="other-1")
        designer = DesignerConfig(
            source="endpoint", train=False, temperature=0.7, top_p=0.9, top_k=5, max_tokens=50
        )

        async def talk():
            endpoint = Endpoint(config)
            try:
                talk = Conversation(endpoint, designer, Prompt("Write.", "You write."), 11)
                answers = [await talk.answer()]
                for message in ("Mend it.", "Again."):
                    assert talk.refuse(message)
                    answers.append(await talk.answer())
                assert not talk.refuse("Once more.")  # an empty answer cannot be said again
                return answers
            finally:
                await endpoint.close()

        answers = asyncio.run(talk())
    assert [answer.text for answer in answers] == ["First.", "Second.", ""]
    assert not any(answer.trajectory.loss_mask.size for answer in answers)
    last = server.asked[-1]
    assert [(each["role"], each["content"]) for each in last["messages"]] == [
        ("system", "You write."),
        ("user", "Write."),
        ("assistant", "First."),
        ("user", "Mend it."),
        ("assistant", "Second."),
        ("user", "Again."),
    ]
    sampling = {k: v for k, v in last.items() if k not in ("messages", "model")}
    assert sampling == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 11,
        "max_completion_tokens": 50,
    }


def test_the_key_comes_from_the_environment(monkeypatch):
    config = EndpointConfig(url="http://localhost:1/v1", model="m", key_env="SOME_KEY")
    designer = DesignerConfig(source="endpoint", train=False)
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"SOME_KEY.*is not set"):
        open_endpoint(designer, config)
    monkeypatch.setenv("SOME_KEY", "sk-tele\nphone")
    with pytest.raises(ConfigError, match="cannot be a key") as caught:
        open_endpoint(designer, config)
    assert "tele" not in str(caught.value)
    assert open_endpoint(DesignerConfig(), EndpointConfig()) is None


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ({"url": ""}, "endpoint.url"),
        ({"model": ""}, "endpoint.model"),
        ({"url": "ftp://host/v1"}, "endpoint.url"),
        ({"url": "http://[::1/v1"}, "endpoint.url cannot be read"),
        ({"url": "https://user:hunter2@host/v1"}, "user, a query"),
        ({"url": "https://host/v1?key=hunter2"}, "user, a query"),
        ({"key_env": "sk-hunter2"}, "in capitals"),
        ({"timeout_s": 0.0}, "endpoint.timeout_s"),
        ({"retries": -1}, "endpoint.retries"),
        ({"concurrency": 0}, "endpoint.concurrency"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line_without_secrets(endpoint, message):
    whole = {"url": "https://host/v1", "model": "m"}
    with pytest.raises(ConfigError, match=message) as caught:
        change(
            Config(),
            designer={"source": "endpoint", "train": False},
            endpoint=whole | endpoint,
        )
    assert "\n" not in str(caught.value) and "hunter2" not in str(caught.value)


def test_an_endpoint_that_nobody_asks_is_refused():
    with pytest.raises(ConfigError, match=r"endpoint\.url"):
        change(Config(), endpoint={"url": "https://host/v1"})
    with pytest.raises(ConfigError, match=r"designer\.train"):
        change(Config(), designer={"source": "endpoint"})
