"""Locations of data: a local path, or a key of an object store. Nothing here looks at either."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

Stamp = tuple[int, int]  # size, and the time of the last change or the version: other ones mean other content


def is_url(path: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


@dataclass(frozen=True)
class Remote:
    """An object of a store, or a folder there, which is all objects whose keys begin with its own. Has of `Path` what takes no look."""

    store: str  # "s3://bucket"
    key: str = ""  # no slash at its ends; of a whole bucket: empty
    about: Stamp | None = field(
        default=None, compare=False, repr=False
    )  # of an object that was looked at or listed; None: not so, or a folder

    def __str__(self) -> str:
        return f"{self.store}/{self.key}" if self.key else self.store

    def __truediv__(self, name: str) -> "Remote":
        return Remote(self.store, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.key).suffixes

    @property
    def stem(self) -> str:
        return PurePosixPath(self.key).stem

    @property
    def parent(self) -> "Remote":
        return Remote(self.store, self.key.rpartition("/")[0])


Location = Path | Remote


def location(written: str) -> Location:
    """The location that `str` turned into this text."""
    scheme, found, rest = written.partition("://")
    if not found or "/" in scheme:
        return Path(written)
    store, _, key = rest.partition("/")
    return Remote(f"{scheme}://{store}", key)


def below(folder: Location, found: Location) -> str:
    """The name from a folder on, with slashes. Empty for a location outside of it."""
    base = str(folder) if str(folder).endswith("/") else f"{folder}/"
    return str(found)[len(base) :] if str(found).startswith(base) else ""


def inside(root: Location, name: str) -> Location | None:
    """The location that a name in the data stands for, relative to `root`. None for what leads out of it."""
    if isinstance(root, Path):
        found = Path(os.path.normpath(os.path.join(root, name)))
    else:
        full = name.startswith(f"{root.store}/")  # rows may name the whole URL
        key = os.path.normpath(name[len(root.store) + 1 :] if full else os.path.join(root.key, name))
        if key in (".", "..") or key.startswith(("/", "../")):
            return None
        found = Remote(root.store, key)
    return found if below(root, found) else None
