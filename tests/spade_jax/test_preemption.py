"""Notice of a preemption, which a stand-in for a cloud's metadata server gives."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from metadata_stand_in import Metadata, metadata_server

from spade_jax import preemption
from spade_jax.config import RunConfig
from spade_jax.errors import ConfigError
from spade_jax.stopping import Stopped, Watch

DEADLINE_S = 30


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    monkeypatch.setattr(preemption, "ASK_S", 0.01)
    with metadata_server() as told:
        yield told


def wait_for(sign: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not sign():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_notice_asks_to_stop_and_nothing_else_does(metadata, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # has no part in it
    watch = Watch(1, 0)
    with watch.listening(metadata.url):
        wait_for(lambda: metadata.asked > 2)
        assert not watch.must_stop()
        metadata.text = "TRUE"
        wait_for(watch.must_stop)
    asked = metadata.asked
    time.sleep(0.1)
    assert metadata.asked == asked  # nobody asks on


def test_a_notice_stops_a_run_that_starts_at_once(metadata):
    watch = Watch(1, 0)
    metadata.text = "TRUE"
    with watch.listening(metadata.url), pytest.raises(Stopped), watch.starting():
        wait_for(lambda: False)


@pytest.mark.parametrize(("status", "text"), [(503, "TRUE"), (200, "<html>sign in</html>")])
def test_a_server_that_fails_is_told_of_once_and_asked_on(metadata, caplog, status, text):
    metadata.status, metadata.text = status, text
    watch = Watch(1, 0)
    with watch.listening(metadata.url):
        wait_for(lambda: metadata.asked > 3)
        assert not watch.must_stop()
        assert caplog.text.count(f"no notice of a preemption can be had from {metadata.url}") == 1
        metadata.status, metadata.text = 200, "TRUE\n"
        wait_for(watch.must_stop)


def test_a_notice_after_the_end_does_nothing(metadata):
    watch = Watch(1, 0)
    with watch.listening():
        pass
    metadata.text = "TRUE"
    preemption._ask(metadata.url, threading.Event())
    assert not watch.must_stop()


def test_no_address_asks_nobody():
    before = threading.active_count()
    with Watch(1, 0).listening():
        assert threading.active_count() == before


def test_what_is_no_address_is_refused():
    with pytest.raises(ConfigError, match=r"run\.preemption_url='metadata\.google\.internal'"):
        RunConfig(preemption_url="metadata.google.internal")
