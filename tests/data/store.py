"""An S3 server on this machine, and a front before it that counts requests and answers some of them as bad servers do."""

import http.client
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

KEY, SECRET = "AKIACANARY00000EXAMPLE", "canary/secret+key"

Fault = Callable[["_Handler"], bool]  # answers a request and says True, or leaves it to the server


@dataclass(eq=False)
class Store:
    """A bucket behind the front."""

    bucket: str
    inner: int  # ports
    front: int
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range of each request
    faults: list[Fault | None] = field(default_factory=list)  # of the next requests, in turn; None: the server's own answer
    always: Fault | None = None
    lock: Lock = field(default_factory=Lock)

    @cached_property
    def client(self) -> Any:
        """Past the front."""
        from obstore.store import S3Store

        there: Any = {"endpoint": f"http://127.0.0.1:{self.inner}", "allow_http": "true", "region": "us-east-1"}
        return S3Store(self.bucket, config={"access_key_id": KEY, "secret_access_key": SECRET, **there})

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.front}"

    def put(self, key: str, data: bytes) -> None:
        self.client.put(key, data)

    def put_folder(self, folder: Path, under: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{under}/{path.relative_to(folder)}", path.read_bytes())

    def delete(self, key: str) -> None:
        self.client.delete(key)

    def of(self, name: str, method: str = "GET") -> list[str]:
        """The ranges that were asked for of objects whose names hold this."""
        return [range for how, path, range in self.asked if how == method and name in path and "list-type" not in path]


@contextmanager
def moto() -> Iterator[int]:
    """The port of an S3 server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@contextmanager
def front(inner: int, bucket: str) -> Iterator[Store]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.store = store = Store(bucket, inner, server.server_port)  # type: ignore[attr-defined]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that went away
    made = http.client.HTTPConnection("127.0.0.1", inner)
    made.request("PUT", f"/{bucket}")
    assert made.getresponse().status == 200
    made.close()
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield store
    server.shutdown()
    server.server_close()
    thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        store: Store = self.server.store  # type: ignore[attr-defined]
        self.sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with store.lock:
            store.asked.append((self.command, self.path, self.headers.get("Range", "")))
            fault = store.faults.pop(0) if store.faults else store.always
        if fault is not None and fault(self):
            return
        self.answer(*self.ask())

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def ask(self) -> tuple[int, list[tuple[str, str]], bytes]:
        store: Store = self.server.store  # type: ignore[attr-defined]
        server = http.client.HTTPConnection("127.0.0.1", store.inner)
        headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"} | dict(self.headers)
        server.request(self.command, self.path, self.sent, headers=headers)  # of those who ask as for a public bucket, too
        answer = server.getresponse()
        body = answer.read()
        headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")]
        server.close()
        return answer.status, headers, body

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


# Bad servers


def answers(status: int, code: str = "", **headers: str) -> Fault:
    """Another status, with a body that repeats what it should not."""

    def fault(handler: _Handler) -> bool:
        body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign></Error>".encode()
        body = b"" if handler.command == "HEAD" else body
        handler.answer(status, [("Content-Length", str(len(body))), *headers.items()], body)
        return True

    return fault


def cuts(handler: _Handler) -> bool:
    """Half of the body, and the end."""
    status, headers, body = handler.ask()
    handler.answer(status, headers, body[: len(body) // 2])
    handler.close_connection = True
    return True


def resets(handler: _Handler) -> bool:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True
    return True


def loses_its_answer(handler: _Handler) -> bool:
    """Does what it is asked, and its answer is lost."""
    handler.ask()
    return resets(handler)


def drips(handler: _Handler) -> bool:
    """A byte now and then."""
    status, headers, body = handler.ask()
    handler.answer(status, headers, b"")
    with suppress(OSError):
        for n in range(min(len(body), 100)):
            handler.wfile.write(body[n : n + 1])
            Event().wait(0.05)
    handler.close_connection = True
    return True


def stays_silent(handler: _Handler) -> bool:
    Event().wait(2)
    handler.close_connection = True
    return True


def ignores_ranges(handler: _Handler) -> bool:
    del handler.headers["Range"]
    handler.answer(*handler.ask())
    return True
