"""Where a job keeps its plan, its manifests and its files: a folder here, or one in an object store.

Keys are names with slashes, counted from that folder. All that the rest relies on is `create`: of all that create a key, one succeeds,
and every reader of the key reads what that one wrote, whole.
"""

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.files import make_folder, storage_failed, sync_folder
from eyeline.core.locations import Location, Remote
from eyeline.data.containers.container import RETRIES, persistent
from eyeline.data.files import stores

T = TypeVar("T")


class Store(Protocol):
    """A folder of keys. Pickles. Every method raises StorageFailed."""

    def create(self, key: str, data: bytes) -> bool: ...  # False: the key exists, and stays as it is

    def read(self, key: str) -> bytes | None: ...  # None: no such key

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]: ...  # keys below a folder with their bytes, about a thousand per request

    def remove(self, key: str) -> None: ...  # also when there is no such key

    def move(self, key: str, to: str) -> None: ...  # replaces what is there

    def scratch(self, folder: str) -> AbstractContextManager[Path]: ...  # an empty folder here, to write files into

    def put(self, path: Path, key: str) -> None: ...  # a file of a scratch folder, which is `key` from then on, durably


def put_all(store: Store, here: Path, folder: str) -> None:
    """Put all files of a scratch folder into the store."""
    for path in sorted(here.iterdir()):
        store.put(path, f"{folder}/{path.name}")


@dataclass(frozen=True)
class LocalStore:
    """A folder of a file system with hard links, which may be shared by machines."""

    folder: Path

    def create(self, key: str, data: bytes) -> bool:
        path = self.folder / key
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)  # unlike a rename, it fails where the name exists
        except FileExistsError:
            return False
        except OSError as error:
            raise storage_failed("write", path, error, len(data)) from error
        finally:
            temporary.unlink(missing_ok=True)
        _sync(path.parent)
        return True

    def read(self, key: str) -> bytes | None:
        path = self.folder / key
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_failed("read", path, error) from error

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        for parent, folders, names in os.walk(self.folder / folder):  # which passes over folders that have just been deleted
            folders.sort()
            for name in sorted(names):
                path = Path(parent, name)
                if not name.startswith("."):
                    with suppress(FileNotFoundError):  # it was deleted meanwhile
                        yield str(path.relative_to(self.folder)), path.stat().st_size

    def remove(self, key: str) -> None:
        path = self.folder / key
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_failed("delete", path, error) from error
        if key.startswith("files/"):  # the folder of an attempt, into which no other attempt writes
            with suppress(OSError):
                path.parent.rmdir()

    def move(self, key: str, to: str) -> None:
        path = self.folder / to
        make_folder(path.parent)
        try:
            os.replace(self.folder / key, path)
            sync_folder(path.parent)
        except OSError as error:
            raise storage_failed("write", path, error) from error

    @contextmanager
    def scratch(self, folder: str) -> Iterator[Path]:
        path = self.folder / folder
        make_folder(path)
        try:
            yield path
        except OSError as error:  # of whatever writes there
            if error.errno not in _NO_ROOM:
                raise
            raise storage_failed("write", path, error) from error

    def put(self, path: Path, key: str) -> None:  # noqa: ARG002 - it is there
        try:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_failed("write", path, error) from error
        _sync(path.parent)
        _sync(path.parent.parent)


def _sync(folder: Path) -> None:
    try:
        sync_folder(folder)
    except OSError as error:
        raise storage_failed("write", folder, error) from error


@dataclass(frozen=True)
class RemoteStore:
    """A folder of S3, Google Cloud Storage or Azure."""

    folder: Remote

    def create(self, key: str, data: bytes) -> bool:
        return stores.create_object(self.folder / key, data)

    def read(self, key: str) -> bytes | None:
        return stores.whole_object(self.folder / key)

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        cut = len(self.folder.key) + 1 if self.folder.key else 0
        for found in stores.each_object(self.folder / folder):
            assert found.about is not None, "what was listed has a size"
            yield found.key[cut:], found.about[0]

    def remove(self, key: str) -> None:
        stores.remove_object(self.folder / key)

    def move(self, key: str, to: str) -> None:
        stores.move_object(self.folder / key, self.folder / to)

    @contextmanager
    def scratch(self, folder: str) -> Iterator[Path]:  # noqa: ARG002 - it is uploaded there when it is kept
        path = Path(tempfile.mkdtemp(prefix="eyeline-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def put(self, path: Path, key: str) -> None:
        stores.put_object(self.folder / key, path)


@dataclass(frozen=True)
class Retried:
    """A store whose failures that may be temporary are tried again.

    An answer that was lost is such a failure, so `create` may say that a key exists which the same call created: read the key to know.
    """

    store: Store
    retries: int = RETRIES

    def _again(self, ask: Callable[[], T]) -> T:
        return persistent(ask, self.retries)

    def create(self, key: str, data: bytes) -> bool:
        return self._again(partial(self.store.create, key, data))

    def read(self, key: str) -> bytes | None:
        return self._again(partial(self.store.read, key))

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        yield from self._again(lambda: list(self.store.sizes(folder)))

    def remove(self, key: str) -> None:
        self._again(partial(self.store.remove, key))

    def move(self, key: str, to: str) -> None:
        self._again(partial(self.store.move, key, to))

    def scratch(self, folder: str) -> AbstractContextManager[Path]:
        return self.store.scratch(folder)

    def put(self, path: Path, key: str) -> None:
        self._again(partial(self.store.put, path, key))


def store_at(folder: Location) -> Store:
    """The store of a folder. Refused when it cannot create a key conditionally: then nothing would be committed once."""
    store: Store = LocalStore(folder) if isinstance(folder, Path) else Retried(RemoteStore(folder))
    refuse_unconditional(store, str(folder))
    return store


def refuse_unconditional(store: Store, name: str) -> None:
    """Refused when a key can be created twice."""
    key = f"probe-{uuid.uuid4().hex}"
    try:
        store.create(key, b"first")
        second = store.create(key, b"second")
    except StorageFailed as failed:
        cause = failed.__cause__
        if not (isinstance(store, LocalStore) and isinstance(cause, OSError) and cause.errno in _NO_LINKS):
            raise
        second = True
    if second or store.read(key) != b"first":
        raise Refused(
            f"{name} cannot create a file only where there is none (on a file system: hard links; of S3: If-None-Match), so two workers "
            "could both commit the same partition. Use another file system or store"
        )
    store.remove(key)


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, None}  # None: as numpy raises it, which says how much it has written
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
