"""A stand-in for a cloud's metadata server, which says whether the machine is about to be taken."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata:
    """What the server says next, and how often it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.status, self.text = 200, "FALSE"
        self.asked = 0


@contextlib.contextmanager
def metadata_server() -> Iterator[Metadata]:
    """A server of this machine; it answers as Google's does, and only to who says so."""
    told = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            told.asked += 1
            right = self.headers["Metadata-Flavor"] == "Google" and self.path == "/preempted"
            self.send_response(told.status if right else 403)
            self.end_headers()
            self.wfile.write(told.text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}/preempted"
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
