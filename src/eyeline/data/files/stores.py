"""Objects of S3, Google Cloud Storage and Azure: read by range, and created, listed and deleted. The one file that imports obstore.

Credentials, region and endpoint come from the environment, where obstore looks for them; none is in a recipe, a pickle or a message.
Of what a store answers only the status and its short code are repeated: the rest may spell out keys and signed requests.

Nothing is retried here: callers use `containers.persistent` for temporary failures.
"""

import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.locations import Remote, Stamp
from eyeline.core.recent import Recent

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

PIECE = 8 << 20  # bytes of one request at most: a slow line gets them within the timeout, and a fast one is kept busy
AHEAD = 64 << 10  # bytes that are read on at first where something is read in order; four times more each time
GAP = 1 << 20  # bytes that may be read unused: reading them costs less than a request of its own
KEPT, KEPT_BYTES = 256, 32 << 20  # objects of which a process remembers what it read last, and how much of them together
HEAD_BYTES = 16 << 10  # of an image: most say their size there
TIMEOUT_S = 30.0  # for one request with its whole answer
CONNECT_TIMEOUT_S = 5.0
MOST_LISTED = 200_000  # objects of one folder

VARIABLES = {  # scheme -> where its credentials are looked for
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with AWS_SESSION_TOKEN), or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true for a public container",
}
ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "adl": "az", "wasb": "az", "wasbs": "az"}
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # statuses that may be others the next time

T = TypeVar("T")


# URLs


def without_secrets(url: str) -> str:
    """A URL without what may be secret in it: a user with a password, and a query."""
    return re.sub(r"(?<=://)[^/]*@", "…@", re.sub(r"[?#].*", "?…", url, flags=re.DOTALL)[:300])


def remote(url: str) -> Remote:
    """The object or folder that a URL names, which may be a pattern. Refused for what is not a store's."""
    scheme, _, rest = url.partition("://")
    scheme, (store, _, key) = scheme.lower(), rest.partition("/")
    if "@" in store or re.search(r"\?[\w.-]*=", url):  # the variables come from the environment, where no copy of a recipe has them
        raise Refused(
            f"{without_secrets(url)} has credentials in it. A recipe is copied into the run folder, so none may be in it. Leave them "
            f"out, and set {VARIABLES.get(scheme, 'them')} in the environment"
        )
    if scheme in _OTHER_NAMES:
        raise Refused(f"{without_secrets(url)}: write {_OTHER_NAMES[scheme]}:// instead of {scheme}://")
    if scheme not in VARIABLES:
        raise Refused(
            f"{without_secrets(url)} is not read: {_instead(scheme)}. Wanted: a path, or a URL that starts with s3://, gs:// or az://"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{1,221}", store):
        raise Refused(f"{without_secrets(url)} does not name a valid bucket. Write {scheme}://BUCKET/KEY")
    key = key.removesuffix("/")
    if (any(piece in ("", ".", "..") for piece in key.split("/")) and key) or any(ord(letter) < 32 for letter in key):
        raise Refused(
            f"{without_secrets(url)}: a key has no empty pieces, no . or .. and no control characters here. Write the key as the "
            f"store lists it"
        )
    return Remote(f"{scheme}://{store}", key)


def _instead(scheme: str) -> str:
    match scheme:
        case "http" | "https" | "ftp":
            return "nothing is fetched from the web. Download it first"
        case "hf":
            return "download it first, with: hf download --repo-type dataset NAME --local-dir FOLDER"
        case "file":
            return "give the path itself"
        case _:
            return f"{scheme}:// is not a known kind of store"


# Asking


@dataclass(frozen=True)
class _Piece:
    """The piece of an object that was read last."""

    start: int
    end: int
    data: bytes  # from `start` on; empty where it was no part of reading on
    step: int  # bytes that were asked for beyond need


@dataclass(frozen=True, eq=False)
class _Process:
    """The connections of one process to stores. Never pickled, and useless after a fork, which does not copy their threads."""

    number: int = field(default_factory=os.getpid)
    clients: dict[str, "ObjectStore"] = field(default_factory=dict)
    recent: Recent[tuple[Remote, Stamp], _Piece] = field(default_factory=Recent)
    lock: threading.Lock = field(default_factory=threading.Lock)


@lru_cache(maxsize=1)
def _process() -> _Process:
    return _Process()


def _client(store: str) -> "ObjectStore":
    process = _process()
    assert process.number == os.getpid(), "a process that has read from a store was forked; a child would wait forever"
    with process.lock:
        if store not in process.clients:
            process.clients[store] = _open_store(store)
        return process.clients[store]


def _open_store(store: str) -> "ObjectStore":
    try:
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError as error:
        raise Refused(
            f"{store} is an object store, and the package that reads it, obstore, is not installed. Try: pip install 'eyeline[stores]'"
        ) from error
    scheme, _, bucket = store.partition("://")
    kind = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    # as `config` and not as client_options, which would undo what the environment says of the client (AWS_ALLOW_HTTP)
    limits: Any = {"timeout": f"{TIMEOUT_S}s", "connect_timeout": f"{CONNECT_TIMEOUT_S}s"}
    return kind(bucket, config=limits, retry_config={"max_retries": 0})


def _ask(location: Remote, question: Callable[["ObjectStore"], T], verb: str = "read") -> T:
    """The answer of a store. StorageFailed, with an OSError as its cause: ENOENT where there is no such object."""
    try:
        return question(_client(location.store))
    except (Refused, StorageFailed):
        raise
    except BaseException as error:
        failed = _error_of(location, error)
        if failed is None:
            raise
    if verb != "read":
        cause = failed.__cause__
        failed = StorageFailed(str(failed).replace("could not read", f"could not {verb}", 1))
        failed.__cause__ = cause
    raise failed  # out here, so that it does not carry what the store said


def _error_of(location: Remote, error: BaseException) -> StorageFailed | None:
    """The failure with its remedy. None for an error that does not come from a store."""
    from obstore.exceptions import BaseError

    if type(error).__name__ == "PanicException":  # of obstore, where it did not foresee something: an endpoint that is no URL
        return _storage_error(location, "the settings in the environment cannot be used", errno.EINVAL, f"Check {_settings(location)}")
    if not isinstance(error, BaseError | FileNotFoundError | ValueError):
        return None
    text, scheme = str(error), location.store.partition("://")[0]
    found = re.search(r"status code: (\d{3})", text)
    status = int(found[1]) if found else None
    found = re.search(r"<Code>(\w{1,60})</Code>", text)
    code = found[1] if found else ""
    answer = f"the store answered {status}{' ' + code if code else ''}"
    found = re.search(r"Error performing \w+ (\S+) in", text)
    asked = urlsplit(found[1]) if found else None
    if status in _PASSING or code in ("SlowDown", "RequestTimeout", "InternalError", "ServerBusy"):
        return _storage_error(location, answer, errno.EIO, "Check the store, then start again")
    if "token request" in text or (asked is not None and _METADATA.search(asked.geturl())):
        return _storage_error(location, "no credentials were found", errno.EACCES, f"Set {VARIABLES[scheme]}")
    if code == "NoSuchBucket":
        return _storage_error(location, f"there is no bucket {location.store}", errno.ENOENT, "Check its name, region and endpoint")
    if isinstance(error, FileNotFoundError):
        return _storage_error(location, "there is no such object", errno.ENOENT, "Put it back, or give another URL")
    if status == 416:
        return _storage_error(
            location, "it ends before", errno.EINVAL, "It has changed. Put it back as it was, or start a new run with the new data"
        )
    if "redirect" in text or code in ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"):
        return _storage_error(location, "the bucket is in another region", errno.EINVAL, "Set AWS_REGION to its region")
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthenticationFailed") or status == 401:
        return _storage_error(location, f"the credentials are not accepted ({answer})", errno.EACCES, f"Renew {VARIABLES[scheme]}")
    if status == 403:
        hint = "S3 says so of absent objects, too, where listing is not allowed. Allow reading and listing, or set other credentials"
        return _storage_error(location, f"access is denied ({answer})", errno.EACCES, hint)
    if status is not None:
        return _storage_error(location, answer, errno.EINVAL, f"Check {_settings(location)}")
    if "BadScheme" in text:
        allow = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}[scheme]
        return _storage_error(location, "its endpoint is http:// and not https://", errno.EINVAL, f"Set {allow}=true if that is intended")
    found = re.search(r"kind: (Connect|Request|Timeout|Interrupted|Decode|Unknown)\b", text)
    match found[1] if found else None:
        case "Timeout":
            return _storage_error(
                location, f"no complete answer arrived within {TIMEOUT_S:g} s", errno.ETIMEDOUT, "Check the store and the connection to it"
            )
        case "Connect":
            where = f"{asked.scheme}://{asked.hostname}{f':{asked.port}' if asked.port else ''}" if asked else "its endpoint"
            what = f"cannot connect to {where}"
            return _storage_error(location, what, errno.EHOSTUNREACH, f"Check the network, and {ENDPOINTS[scheme]} if it is set")
        case "Request" | "Interrupted" | "Decode" | "Unknown":
            return _storage_error(location, "its answer was cut off or empty", errno.ECONNRESET, "Check the store and the connection to it")
        case _:
            what = "the settings of the store in the environment cannot be used"
            return _storage_error(location, what, errno.EINVAL, f"Check {_settings(location)}")


# where a machine in a cloud asks for its credentials: what is left to try where the environment has none
_METADATA = re.compile(r"//169\.254\.|//metadata|/latest/(api/token|meta-data)")


def _settings(location: Remote) -> str:
    scheme = location.store.partition("://")[0]
    return f"{ENDPOINTS[scheme]} if it is set, and {VARIABLES[scheme]}"


def _storage_error(location: Remote, what: str, number: int, remedy: str) -> StorageFailed:
    failed = StorageFailed(f"could not read {location}: {what}. {remedy}.")
    failed.__cause__ = OSError(number, what)
    return failed


# Answers


def _stamp(about: "ObjectMeta") -> Stamp:
    """Size, and a number of the e-tag; of the time of the last change in a store that gives none. Listings quote e-tags in other ways."""
    tag = (about["e_tag"] or str(int(about["last_modified"].timestamp()))).removeprefix("W/").strip('"')
    return about["size"], int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=7).digest(), "big")


def stamp_of(location: Remote) -> Stamp:
    """The stamp of an object: one request."""
    return _ask(location, lambda client: _stamp(client.head(location.key)))


def look(location: Remote, length: int) -> tuple[Stamp, bytes]:
    """The stamp of an object and its first bytes, as many as it has of `length`. One request; further reads continue from there."""
    try:
        stamp, data = _get(location, 0, length, None)
        _remember(location, stamp, _Piece(0, len(data), data if len(data) <= AHEAD else b"", 0))
        return stamp, data
    except StorageFailed as failed:
        if not (isinstance(failed.__cause__, OSError) and failed.__cause__.errno == errno.EINVAL):
            raise
        stamp = stamp_of(location)  # of an empty object no range can be had
        if stamp[0]:
            raise
        return stamp, b""


def _get(location: Remote, start: int, length: int, stamp: Stamp | None) -> tuple[Stamp, bytes]:
    """A range of an object, if it is the one that is known. One request."""

    def get(client: "ObjectStore") -> tuple[Stamp, bytes]:
        answer = client.get(location.key, options={"range": (start, start + length)})
        found = _stamp(answer.meta)
        if stamp not in (None, found):
            raise changed_error(location)
        data = bytes(answer.bytes())
        if len(data) < min(length, found[0] - start):
            raise _storage_error(
                location, f"{len(data):,} bytes arrived of {length:,}", errno.ECONNRESET, "Check the store and the connection to it"
            )
        return found, data

    return _ask(location, get)


def changed_error(location: object) -> StorageFailed:
    return StorageFailed(f"{location} has changed since it was opened. Put it back as it was, or start a new run with the new data")


def piece(location: Remote, stamp: Stamp, start: int, wanted: int) -> bytes:
    """Some bytes from `start` on, at least one and at most `wanted`, which the object has.

    What is read in order, as archives are to find their members, is read ahead in growing pieces; anything else costs what it has.
    """
    process, key = _process(), (location, stamp)
    with process.lock:
        known = process.recent.get(key)
    if known is not None and known.start <= start < known.start + len(known.data):
        return known.data[start - known.start : start - known.start + wanted]
    goes_on = known is not None and known.end <= start <= known.end + GAP
    step = min(max(known.step * 4, AHEAD), PIECE) if goes_on and known is not None else 0
    _, data = _get(location, start, min(max(wanted, step), PIECE, stamp[0] - start), stamp)
    _remember(location, stamp, _Piece(start, start + len(data), data if step or len(data) <= AHEAD else b"", step))
    return data[:wanted]


def _remember(location: Remote, stamp: Stamp, piece: _Piece) -> None:
    process = _process()
    with process.lock:
        process.recent.keep((location, stamp), piece, KEPT, len(piece.data), KEPT_BYTES)


def list_objects(folder: Remote) -> list[Remote]:
    """Every object below a folder, each with its stamp. One request for about a thousand."""

    def pages(client: "ObjectStore") -> list[Remote]:
        found: list[Remote] = []
        for page in client.list(folder.key or None, chunk_size=1000):
            found += [Remote(folder.store, about["path"], _stamp(about)) for about in page]
            if len(found) > MOST_LISTED:
                raise Refused(
                    f"{folder} holds more than {MOST_LISTED:,} objects. Name a folder of fewer, or a pattern that starts with one"
                )
        return found

    return _ask(folder, pages)


def has_any(folder: Remote) -> bool:
    """Return whether there is any object below. One request."""
    return _ask(folder, lambda client: any(True for page in client.list(folder.key or None, chunk_size=1) if page))


# Whole objects, as a job's plan, manifests and files are


def create_object(location: Remote, data: bytes) -> bool:
    """Create an object if there is none, in one request. Return whether it was created; if not, what exists stays."""

    def create(client: "ObjectStore") -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            client.put(location.key, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    return _ask(location, create, "create")


def put_object(location: Remote, path: Path) -> None:
    """Upload a file, in parts where it is large."""
    _ask(location, lambda client: client.put(location.key, path), "write")


def whole_object(location: Remote) -> bytes | None:
    """The content of an object; None where there is none."""

    def get(client: "ObjectStore") -> bytes | None:
        try:
            return bytes(client.get(location.key).bytes())
        except FileNotFoundError:
            return None

    return _ask(location, get)


def each_object(folder: Remote) -> Iterator[Remote]:
    """Every object below a folder, each with its stamp, in the order of their keys. A request per thousand, as they are reached."""
    pages = _ask(folder, lambda client: client.list(folder.key or None, chunk_size=1000))
    while page := _ask(folder, lambda _: next(pages, None)):
        yield from (Remote(folder.store, about["path"], _stamp(about)) for about in page)


def remove_object(location: Remote) -> None:
    """Delete an object, if there is one."""

    def delete(client: "ObjectStore") -> None:
        with suppress(FileNotFoundError):
            client.delete(location.key)

    _ask(location, delete, "delete")


def move_object(location: Remote, to: Remote) -> None:
    """Rename an object; what has the other name is replaced."""
    _ask(location, lambda client: client.rename(location.key, to.key), "move")
