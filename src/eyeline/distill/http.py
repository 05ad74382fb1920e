"""Requests to servers that may be slow, busy or gone: several in flight, spread over the servers, tried again with waits.

Of the standard library alone: a request takes seconds, so connections need not be kept. Redirects are not followed, since they would carry
the key to another host.
"""

import email.utils
import http.client
import json
import random
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from eyeline.core.errors import Refused, TeacherFailed

MOST_BYTES = 64 << 20  # of an answer
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
MOST_TOLD_S = 600.0  # that a server may tell a client to wait
BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 507, 529)  # may be gone the next time
DEFECT = 500  # may also be the answer to this request alone, each time: an image that crashes the server's processor
NO_ENTRY = (401, 403, 404, 405)  # of the key, the URL or the model: the same for every request
SHOWN = 300  # characters of a server's message

T = TypeVar("T")


class Denied(Exception):
    """A server refuses one request, and would refuse it again."""


class _Again(Exception):
    """A failure that may be gone the next time; `wait_s` is what the server told."""

    def __init__(self, message: str, wait_s: float | None = None, status: int | None = None):
        super().__init__(message)
        self.wait_s, self.status = wait_s, status


class _Answered(NamedTuple):
    """The requests that were answered: how many, and the last one."""

    count: int = 0
    path: str = ""
    data: bytes = b""


@dataclass(eq=False)
class _Server:
    url: str
    in_flight: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0
    last: str = ""  # what went wrong last


@dataclass(eq=False)
class Servers:
    """Several servers with the same model. Threads share it."""

    urls: tuple[str, ...]
    key: str | None
    timeout_s: float
    retries: int
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    stopped: threading.Event = field(default_factory=threading.Event)  # no request is begun any more
    limit_name: str = "max_tokens"  # how they call the most tokens of an answer
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._servers = [_Server(url) for url in self.urls]
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._answered = _Answered()

    def post(self, path: str, body: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """What `read` makes of the JSON object that a server answers with; ValueError for one that is not an answer. Denied where a server
        refuses this request; Refused where it would refuse any; TeacherFailed where none has answered after all retries."""
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        failures, before = list[_Again](), self._answered.count
        for _ in range(self.retries + 1):
            with self._free_server() as server:
                try:
                    found = self._tried(f"{server.url}/{path}", data, server, read)
                except _Again as again:
                    failures.append(again)
                    self._rest(server, again)
                    continue
                with self._lock:
                    server.failures = 0
                    self._answered = _Answered(self._answered.count + 1, path, data)
                return found
        fails = all(one.status == DEFECT for one in failures)
        if len(failures) > 1 and fails and self._others_are_answered(before):
            raise Denied(f"{failures[-1]}, at each of {len(failures)} attempts, while other requests were answered")
        last = "; ".join(f"{server.url}: {server.last}" for server in self._servers if server.last)
        why = "The server's log says why; a wrong distill.teacher.model, too, where it loads models by name. " if fails else ""
        raise TeacherFailed(
            f"the teacher did not answer a request after {self.retries + 1} attempts ({last}). {why}distill.teacher.retries and timeout "
            "say how often and how long it is asked"
        )

    def _others_are_answered(self, before: int) -> bool:
        """Return whether a request was answered since `before` were, or the last one that was would be again."""
        known = self._answered
        if known.count > before or known.count == 0:
            return known.count > before
        with self._free_server() as server:
            try:
                self._tried(f"{server.url}/{known.path}", known.data, server, lambda answer: answer)
            except (_Again, Denied):
                return False
        return True

    @contextmanager
    def _free_server(self) -> Iterator[_Server]:
        """The server with the fewest requests of those that do not rest; where all do, the first one that is done resting."""
        while True:
            if self.stopped.is_set():
                raise TeacherFailed("the job has ended")
            with self._lock:
                now = self.clock()
                server = min(self._servers, key=lambda one: (one.rests_until > now, max(one.rests_until - now, 0.0), one.in_flight))
                wait = server.rests_until - now
                if wait <= 0:
                    server.in_flight += 1
                    break
            self.sleep(min(wait, FIRST_WAIT_S))
        try:
            yield server
        finally:
            with self._lock:
                server.in_flight -= 1

    def _rest(self, server: _Server, again: _Again) -> None:
        with self._lock:
            server.last = str(again)
            if again.wait_s is None and server.rests_until > self.clock():
                return  # another request has failed at the same time, and is counted
            server.failures += 1
            wait = again.wait_s
            if wait is None:  # with a random part: clients that failed together must not come back together
                wait = min(FIRST_WAIT_S * 2 ** (server.failures - 1), LONGEST_WAIT_S) * random.uniform(0.75, 1.25)
            server.rests_until = max(server.rests_until, self.clock() + min(wait, MOST_TOLD_S))

    def _tried(self, url: str, data: bytes, server: _Server, read: Callable[[dict[str, Any]], T]) -> T:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "eyeline"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(url, data, headers)
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                found, said = self._body(answer), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                raise self._failure(error, url) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise Refused(
                    f"{url}: {error.reason.verify_message}. The server's certificate is not trusted here: install its authority's, or name "
                    "a file with it in the environment variable SSL_CERT_FILE"
                ) from error
            raise _Again(_reason(error, self.timeout_s)) from error
        except (OSError, http.client.HTTPException) as error:  # timeouts, refused and dropped connections, names that do not resolve
            raise _Again(_reason(error, self.timeout_s)) from error
        self._heed_limits(server, said)
        try:
            return read(found)
        except ValueError as error:
            raise _Again(self._without_key(str(error))) from error

    def _body(self, answer: Any) -> dict[str, Any]:
        """The JSON object of an answer, within the time of a request: a server may send a byte from time to time."""
        until, pieces, size = self.clock() + self.timeout_s, [], 0
        while piece := answer.read1(1 << 16):
            size += len(piece)
            pieces.append(piece)
            if size > MOST_BYTES:
                raise _Again(f"an answer of more than {MOST_BYTES:,} bytes")
            if self.clock() > until:
                raise _Again(f"no whole answer within {self.timeout_s:g} s")
        try:
            value = json.loads(b"".join(pieces))
        except (ValueError, RecursionError) as error:
            raise _Again(f"an answer that is not JSON: {b''.join(pieces)[:80]!r}") from error
        if not isinstance(value, dict):
            raise _Again(f"an answer that is not a JSON object: {str(value)[:80]!r}")
        return value

    def _failure(self, error: urllib.error.HTTPError, url: str) -> Exception:
        said = self._without_key(_message_of(error))
        what = f"HTTP {error.code}{f': {said}' if said else ''}"
        if error.code in BUSY:
            return _Again(what, told_wait_s(error.headers), error.code)  # pyright: ignore[reportArgumentType]: a Message is a mapping
        if 300 <= error.code < 400:
            return Refused(f"{url} redirects elsewhere ({what}), and the key is not sent to other hosts. Give the URL that it redirects to")
        if error.code in NO_ENTRY:
            about = {404: "Look at distill.teacher.urls (they end in /v1, as a rule) and model", 405: "Look at distill.teacher.urls"}
            remedy = about.get(error.code, "Look at the key in the environment variable that distill.teacher.key_env names")
            return Refused(f"{url}: {what}. {remedy}")
        return Denied(what)

    def _without_key(self, text: str) -> str:
        """A server's message, without the key, should it repeat it."""
        return text.replace(self.key, "[key]") if self.key else text

    def _heed_limits(self, server: _Server, headers: Mapping[str, str]) -> None:
        """Rest where the server says that no request or token is left until a time."""
        for what in ("requests", "tokens"):
            left, reset = headers.get(f"x-ratelimit-remaining-{what}"), headers.get(f"x-ratelimit-reset-{what}")
            wait = seconds_in(reset) if reset is not None else None
            if left is not None and left.strip() == "0" and wait:
                with self._lock:
                    server.rests_until = max(server.rests_until, self.clock() + min(wait, MOST_TOLD_S))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **named: Any) -> None:  # noqa: ARG002 - as the base class calls it
        return None


def told_wait_s(headers: Mapping[str, str]) -> float | None:
    """The seconds that a server says to wait: Retry-After in seconds or as a date, or the reset of a limit."""
    after = headers.get("Retry-After")
    if after is not None:
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", after):
            return float(after)
        try:
            return max(email.utils.parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
        except (TypeError, ValueError):
            return None
    found = [wait for what in ("requests", "tokens") if (wait := seconds_in(headers.get(f"x-ratelimit-reset-{what}") or ""))]
    return max(found, default=None)


def seconds_in(text: str) -> float | None:
    """The seconds in `1.5`, `20ms`, `1m30s` or `2h`. None for other texts."""
    if re.fullmatch(r"\d+(\.\d+)?", text.strip()):
        return float(text)
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    found = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text.strip())
    return sum(float(number) * units[unit] for number, unit in found) if found else None


def _message_of(error: urllib.error.HTTPError) -> str:
    """What a server says of a failure, as far as it can be read."""
    try:
        data = error.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return ""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace").strip()[:SHOWN]
    for key in ("error", "message", "detail"):
        value = value.get(key, value) if isinstance(value, dict) else value
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:SHOWN]


def _reason(error: Exception, timeout_s: float) -> str:
    inner = getattr(error, "reason", error)
    if isinstance(inner, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return f"{type(inner).__name__}: {inner}" if isinstance(inner, Exception) else str(inner)
