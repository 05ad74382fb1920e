"""Files appear whole: a temporary file is written, flushed to disk and renamed. A reader never meets half a file."""

import errno
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from eyeline.core.errors import Refused, StorageFailed

LARGEST_JSON = 64 * 2**20  # bytes that `read_object` reads; the largest real ones, tokenizers of 260,000 pieces, have half of it


def write_atomically(path: Path, data: bytes | str, durable: bool = True) -> None:
    """Replace `path` by `data`: there is the old file or the new one, never a part of either. After a crash of the machine, too,
    unless it need not be `durable`: that is for what can be made again and is known to be whole by a digest of its own.

    Raises StorageFailed, with the path, the bytes needed and the bytes free, and leaves nothing behind.
    """
    data = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_failed("write", path, error, len(data)) from error


@contextmanager
def claimed(path: Path, wait: bool) -> Iterator[bool]:
    """Return whether this process is the one to make `path` now. While another one is, it waits, or is told no.

    The system frees the claim when its process ends, however that ends. Where a file system has no locks every process is told yes, so
    what is made must stand being made twice.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise storage_failed("write", lock, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        mine = True
    except OSError as error:
        mine = error.errno in _NO_LOCKS
        if not mine and not isinstance(error, BlockingIOError):
            os.close(handle)
            raise storage_failed("lock", lock, error) from error
    try:
        yield mine
    finally:
        if mine:
            with suppress(OSError):  # one that is left there does no harm
                lock.unlink()
        os.close(handle)


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of readable JSON. NaN and infinities are refused: JSON has none."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in `path`. OSError and ValueError reach the caller, which knows the purpose of the file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that someone else wrote. Raises Refused, naming the file and the fault."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise Refused(f"{path} has {size:,} bytes; wanted at most {LARGEST_JSON:,}. The {path.name} of a real model is smaller.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Refused(f"{path} is missing. Download the model again, or give another folder.") from error
    except OSError as error:
        raise storage_failed("read", path, error) from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise Refused(f"{path} holds a {type(value).__name__}, wanted a JSON object. Download it again.")
    return value


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line. What a kill or a full disk left of the last one is cut first: no other may be joined to it."""
    line = json.dumps(value, allow_nan=False) + "\n"
    try:
        with open(path, "ab+") as file:
            if not _ends_a_line(file):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())
    except OSError as error:
        raise storage_failed("append to", path, error, len(line)) from error


def _ends_a_line(file: BinaryIO) -> bool:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    return file.read() in (b"", b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of `path`, without a torn last one. Refused, with its number, for a line of another program."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut by a kill, or is empty
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_failed("read", path, error) from error
    values: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Refused(f"line {number} of {path} is not a JSON object. Another program has written there: delete that line")
        values.append(value)
    return values


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless it is there. Raises StorageFailed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_failed("create", folder, error) from error


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storage_failed(verb: str, path: Path, error: OSError, needed: int | None = None) -> StorageFailed:
    """A StorageFailed that says which file, why, how much room is left where the disk is full, and what to do."""
    room = ""
    if verb != "read" and error.errno in _FULL:
        try:
            stat = os.statvfs(path.parent)
            room = f"; {stat.f_bavail * stat.f_frsize:,} bytes are free there"
        except OSError:
            room = "; its folder cannot be examined either"
    need = f" ({needed:,} bytes)" if needed is not None else ""
    return StorageFailed(f"could not {verb} {path}{need}: {error.strerror or error}{room}. {_remedy(verb, error.errno)}")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)  # None: a library that tells the reason in words alone


def _remedy(verb: str, number: int | None) -> str:
    match number:
        case errno.EMFILE | errno.ENFILE:
            return "Allow more open files: ulimit -n 4096."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "Give the user who runs this permission to use it, or choose another folder."
        case errno.ENOENT | errno.ENOTDIR if verb == "read":
            return "Put it back, or give another path."
        case _ if verb == "read":
            return "Check its store, then start again."
        case _ if number in _FULL:
            return "Make room or choose another folder."
        case _:
            return "Choose another folder."
