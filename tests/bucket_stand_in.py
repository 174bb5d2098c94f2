"""A stand-in for Google Cloud Storage: one dictionary of objects behind both of the ways in which a
run reaches a bucket, fsspec (the run folder) and tensorstore's HTTP client (arrays).

As in the real one, objects appear whole, there are no folders, and what is written carries a
generation number. There is no authentication, and nothing ever fails by itself. The process that
made it has it in memory (`bucket_store`); those that it starts share it (`shared_bucket_store`).
"""

import contextlib
import http.client
import io
import json
import os
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pytest
from etils.epath import backend
from orbax.checkpoint._src.path import gcs_utils


class Store:
    """Objects by "bucket/name"; `deny` makes every write fail, `unreachable` whatever fsspec does
    with a name that has this in it.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.lock = threading.Lock()
        self.generation = 0
        self.deny = ""
        self.unreachable = ""
        self.writes: list[str] = []

    def put(self, name: str, data: bytes, wanted: int | None = None) -> int | None:
        """The new generation; None if the object is not at the wanted one."""
        with self.lock:
            if wanted is not None and self.objects.get(name, (b"", 0))[1] != wanted:
                return None
            self.generation += 1
            self.objects[name] = (data, self.generation)
            self.writes.append(name)
            return self.generation

    def names(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        with self.lock:
            found = sorted(name for name in self.objects if name.startswith(prefix))
            return {name: len(self.objects[name][0]) for name in found}

    def read(self, name: str) -> bytes | None:
        with self.lock:
            return self.objects[name][0] if name in self.objects else None

    def remove(self, name: str) -> bool:
        with self.lock:
            return self.objects.pop(name, None) is not None


class SharedStore:
    """The store of another process, through its HTTP server."""

    unreachable = ""

    def __init__(self, url: str) -> None:
        self._host = urllib.parse.urlsplit(url).netloc

    def put(self, name: str, data: bytes) -> None:
        bucket, _, rest = name.partition("/")
        query = urllib.parse.urlencode({"uploadType": "media", "name": rest})
        status, told = self._ask("POST", f"/upload/storage/v1/b/{bucket}/o?{query}", data)
        if status != 200:
            raise PermissionError(told.decode())

    def sizes(self, prefix: str) -> dict[str, int]:
        bucket, _, rest = prefix.partition("/")
        query = urllib.parse.urlencode({"prefix": rest})
        _, told = self._ask("GET", f"/storage/v1/b/{bucket}/o?{query}")
        return {f"{bucket}/{i['name']}": int(i["size"]) for i in json.loads(told)["items"]}

    def read(self, name: str) -> bytes | None:
        status, data = self._ask("GET", f"{self._path(name)}?alt=media")
        return data if status == 200 else None

    def remove(self, name: str) -> bool:
        return self._ask("DELETE", self._path(name))[0] == 204

    def _path(self, name: str) -> str:
        bucket, _, rest = name.partition("/")
        return f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(rest, safe='')}"

    def _ask(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, timeout=60)
        try:
            connection.request(method, path, data)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class _Upload(io.BytesIO):
    """An object that is there once it is closed."""

    def __init__(self, store: Store | SharedStore, name: str) -> None:
        super().__init__()
        self._store, self._name = store, name

    def close(self) -> None:
        if not self.closed:
            self._store.put(self._name, self.getvalue())
        super().close()


class BucketFileSystem(fsspec.AbstractFileSystem):
    """fsspec's view of a store."""

    protocol = ("gs", "gcs")
    cachable = False
    store: Store | SharedStore  # set on a subclass

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("gs://").removeprefix("gcs://").rstrip("/")

    def _reach(self, path: str) -> None:
        if self.store.unreachable and self.store.unreachable in path:
            raise ConnectionError("the network is unreachable")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        self._reach(path)
        found: dict[str, dict[str, Any]] = {}
        for name, size in self.store.sizes(f"{path}/").items():
            rest = name[len(path) + 1 :].split("/")
            full = f"{path}/{rest[0]}"
            kind = {"type": "directory", "size": 0} if rest[1:] else {"type": "file", "size": size}
            found[full] = {"name": full, **kind}
        if not found:
            size = self.store.sizes(path).get(path)
            if size is None:
                raise FileNotFoundError(path)
            found[path] = {"name": path, "type": "file", "size": size}
        return list(found.values()) if detail else list(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._reach(self._strip_protocol(path))
        return super().info(path)

    def exists(self, path: str, **_: Any) -> bool:
        """As in the real one, only what is absent is not there; `isdir` is less strict."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        path, store = self._strip_protocol(path), self.store
        self._reach(path)
        if "r" in mode:
            data = store.read(path)
            if data is None:
                raise FileNotFoundError(path)
            return io.BytesIO(data)
        if isinstance(store, Store) and store.deny:
            raise PermissionError(store.deny)
        return _Upload(store, path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        removed = [self.store.remove(path)]
        if recursive:
            removed += map(self.store.remove, self.store.sizes(f"{path}/"))
        if not any(removed):
            raise FileNotFoundError(path)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Nothing: a bucket has no folders."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: a bucket has no folders."""


class _Handler(BaseHTTPRequestHandler):
    """The few calls of the JSON API that tensorstore makes."""

    protocol_version = "HTTP/1.1"
    store: Store  # set on a subclass

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        bucket, name, query = self._parse()
        if name is None:
            return self._list(bucket, query)
        found = self.store.objects.get(f"{bucket}/{name}")
        if found is None:
            return self._answer(404, b"{}")
        data, generation = found
        headers = {"x-goog-generation": str(generation)}
        if query.get("alt") != "media":
            return self._answer(200, json.dumps(self._about(bucket, name)).encode())
        status, span = 200, self.headers.get("Range")
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            status, size = 206, len(data)
            start = int(first) if first else size - int(last)
            end = int(last) + 1 if first and last else size
            data = data[start:end]
            headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{size}"
        return self._answer(status, data, headers)

    def do_POST(self) -> None:
        bucket, _, query = self._parse()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.store.deny:
            return self._answer(403, self.store.deny.encode())
        wanted = query.get("ifGenerationMatch")
        name = query["name"]
        put = self.store.put(f"{bucket}/{name}", data, None if wanted is None else int(wanted))
        if put is None:
            return self._answer(412, b"{}")
        return self._answer(200, json.dumps(self._about(bucket, name)).encode())

    def do_DELETE(self) -> None:
        bucket, name, _ = self._parse()
        return self._answer(204 if self.store.remove(f"{bucket}/{name}") else 404, b"")

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        names = self.store.names(f"{bucket}/{query.get('prefix', '')}")
        items = [self._about(bucket, name.removeprefix(f"{bucket}/")) for name in names]
        start, end = query.get("startOffset", ""), query.get("endOffset")
        kept = [i for i in items if i["name"] >= start and (not end or i["name"] < end)]
        return self._answer(200, json.dumps({"items": kept}).encode())

    def _about(self, bucket: str, name: str) -> dict[str, str]:
        data, generation = self.store.objects[f"{bucket}/{name}"]
        return {"name": name, "generation": str(generation), "size": str(len(data))}

    def _parse(self) -> tuple[str, str | None, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        words = url.path.split("/b/", 1)[1].split("/", 2)  # BUCKET/o or BUCKET/o/NAME
        name = urllib.parse.unquote(words[2]) if len(words) > 2 else None
        query = urllib.parse.parse_qs(url.query, keep_blank_values=True)
        return words[0], name, {key: values[0] for key, values in query.items()}

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def bucket_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """While in the block, `gs://` means a new store."""
    store = Store()
    handler = type("Handler", (_Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    _reach(monkeypatch, store)
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def shared_bucket_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `gs://` mean the store of the process that started this one."""
    _reach(monkeypatch, SharedStore(os.environ["TENSORSTORE_GCS_HTTP_URL"]))


def _reach(monkeypatch: pytest.MonkeyPatch, store: Store | SharedStore) -> None:
    system = type("System", (BucketFileSystem,), {"store": store})
    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: system())
    monkeypatch.setattr(gcs_utils, "get_bucket", lambda name: object())  # no hierarchical folders
