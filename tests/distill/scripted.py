"""A chat server on this machine that answers by a script, and keeps what it was asked."""

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

Fault = Callable[["Handler"], bool]  # answers a request and says True, or leaves it to the script


@dataclass(eq=False)
class Scripted:
    """A server, what it says to each request, and what it has received."""

    say: Callable[[dict[str, Any]], Any]  # a request's body -> the text of the answer, or a whole answer
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    faults: list[Fault | None] = field(default_factory=list)  # of the next requests, in turn; None: the script's own answer
    always: Fault | None = None
    lock: Lock = field(default_factory=Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Scripted
    body: dict[str, Any]

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        script: Scripted = self.server.script  # type: ignore[attr-defined]
        body = self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with script.lock:
            script.asked.append(body)
            script.headers.append(dict(self.headers))
            fault = script.faults.pop(0) if script.faults else None
        fault = fault or script.always
        if fault is None or not fault(self):
            found = script.say(body)
            self.answer(200, found if isinstance(found, dict) else completion(found))

    def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)


def completion(text: str, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """An answer as the API has it."""
    message = {"role": "assistant", "content": text, **more}
    usage = {"prompt_tokens": 100, "completion_tokens": len(text.split())}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


def status(code: int, value: Any = None, **headers: str) -> Fault:
    def fault(handler: Handler) -> bool:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        handler.answer(code, value if value is not None else {"error": {"message": f"status {code}"}}, named)
        return True

    return fault


def drops(handler: Handler) -> bool:
    """Resets the connection."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.connection.close()
    return True


def cuts(handler: Handler) -> bool:
    """Ends in the middle of an answer."""
    data = json.dumps(completion("cut")).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[:20])
    handler.close_connection = True
    return True


def slow(seconds: float) -> Fault:
    def fault(handler: Handler) -> bool:
        time.sleep(seconds)
        return False

    return fault


@contextmanager
def scripted(say: Callable[[dict[str, Any]], Any]) -> Iterator[Scripted]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    script = server.script = Scripted(say, server.server_port)  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
