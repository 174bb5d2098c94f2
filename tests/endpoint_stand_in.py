"""A stand-in for a server of chat completions, in a thread: it answers each request with the next
of its replies, the last one over and over, and keeps what it was asked.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One reply; `trickle_s` between its bytes, `hold` until the server goes."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    trickle_s: float = 0.0
    hold: bool = False
    drop: bool = False  # the connection, without a reply


def said(text: Any, **more: Any) -> Reply:
    """A chat completion."""
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    message = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
    return Reply(json.dumps(message | more).encode())


def failed(status: int, why: str = "no", **headers: str) -> Reply:
    return Reply(json.dumps({"error": {"message": why}}).encode(), status, headers)


class StandIn:
    """What the server was asked, and what it will answer."""

    def __init__(self, replies: Sequence[Reply] | Callable[[dict], Reply]) -> None:
        self.replies = replies if callable(replies) else list(replies)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.going = threading.Event()
        self.at_once = self.most_at_once = 0
        self.url = ""
        self._lock = threading.Lock()

    def next(self, handler: BaseHTTPRequestHandler) -> Reply:
        size = int(handler.headers["content-length"])
        body = json.loads(handler.rfile.read(size))
        with self._lock:
            self.asked.append(body)
            self.headers.append({k.lower(): v for k, v in handler.headers.items()})
            self.paths.append(handler.path)
            if callable(self.replies):
                return self.replies(body)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        yield
        with self._lock:
            self.at_once -= 1


@contextlib.contextmanager
def serving(replies: Sequence[Reply] | Callable[[dict], Reply]) -> Iterator[StandIn]:
    """The stand-in at work; all its threads have ended on the way out."""
    stand_in = StandIn(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with stand_in.counted():
                reply = stand_in.next(self)
                if reply.hold:
                    stand_in.going.wait(30)
                    return
                if reply.drop:
                    return
                time.sleep(0.02)  # so that what comes together is here together
                with contextlib.suppress(OSError):  # the other side has gone
                    self._answer(reply)

        def _answer(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            if not reply.trickle_s:
                self.wfile.write(reply.body)
                return
            for byte in reply.body:
                self.wfile.write(bytes([byte]))
                if stand_in.going.wait(reply.trickle_s):
                    return

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # closing waits for them
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield stand_in
    finally:
        stand_in.going.set()
        server.shutdown()
        thread.join()
        server.server_close()
