"""Resolve a recipe's path to a file or a folder, local or in a store, and list the files of a folder or pattern."""

import errno
import fnmatch
import glob
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from eyeline.core.errors import Refused, StorageFailed, nearest
from eyeline.core.locations import Location, Remote, below, is_url
from eyeline.data.containers.container import PASSING, number_of, persistent
from eyeline.data.files import stores
from eyeline.data.files.names import is_skipped, is_skipped_file, is_skipped_folder, no_folder, skipped_phrase

T = TypeVar("T")


def resolve_location(path: str, retries: int) -> Location:
    """The file or folder that a recipe names: a path, `package:NAME/...`, or a URL. Refused when there is none."""
    if is_url(path):
        return _located_remotely(stores.remote(path), path.endswith("/"), retries)
    if path.startswith("package:"):
        return _in_package(path)
    found = Path(os.path.abspath(os.path.expanduser(path)))
    try:
        if not os.path.lexists(found):
            raise Refused(f"{found} does not exist{_instead(found)}")
        mode = os.stat(found).st_mode
    except (OSError, ValueError) as error:  # ValueError: half a surrogate pair, or NUL
        raise Refused(f"{str(found)[:300]} cannot be opened: {getattr(error, 'strerror', None) or error}. Give another path") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait forever
        raise Refused(f"{found} is neither a file nor a folder. Give the path of a regular file or a folder")
    return found


def _instead(path: Path) -> str:
    """A suggestion for a path that does not exist, as the end of a sentence."""
    if "{" in path.name:
        return f". A range in braces is not supported: write {re.sub(r'{[^{}]*}', '*', path.name)} for all files of such names"
    if not os.path.isdir(path.parent):
        return no_folder(path.parent)
    return f".{nearest(path.name, sorted(os.listdir(path.parent)))}"


def _in_package(path: str) -> Path:
    package, _, inside = path.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(package) if re.fullmatch(r"[A-Za-z_]\w*", package) else None
    except ValueError:  # of a module without a spec, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise Refused(f"the Python package {package!r}, which {path} names, is not installed. Try: pip install {package.replace('_', '-')}")
    base = Path(next(iter(spec.submodule_search_locations)))
    found = Path(os.path.normpath(base / inside))
    if not found.is_relative_to(base) or not os.path.exists(found):
        raise Refused(f"{path}: there is no {inside} inside {base}")
    return found


def parse_location(path: str) -> Location:
    """A path or URL as it is, there or not."""
    return stores.remote(path) if is_url(path) else Path(os.path.abspath(os.path.expanduser(path)))


def is_folder(found: Location) -> bool:
    """Return whether a location that was resolved or listed is a folder."""
    return found.about is None if isinstance(found, Remote) else os.path.isdir(found)


def image_folder(images: str, retries: int) -> Location:
    """The folder that `images` of a source names. Refused when there is none."""
    if is_url(images):
        folder = _located_remotely(stores.remote(images), True, retries)
    else:
        folder = Path(os.path.abspath(os.path.expanduser(images)))
    if not is_folder(folder):
        raise Refused(f"the folder of the images, {folder}, does not exist. Set images: to the folder that image paths start from")
    return folder


LEFT_OUT = ("hidden, backup or system file or folder", "hidden, backup or system files or folders")


class Below(NamedTuple):
    """The files in a folder and its subfolders."""

    files: list[Location]  # in order
    skipped: str  # what was left out, as a part of a sentence; empty for nothing


def files_below(folder: Location, retries: int) -> list[Location]:
    """The files of `listed_below`."""
    return listed_below(folder, retries).files


def listed_below(folder: Location, retries: int) -> Below:
    """All files of a folder and of those in it. Linked folders are followed; what is hidden, a backup or a system's own is left out, and
    so is a folder that was read already by another name, or that holds this one."""
    if isinstance(folder, Remote):
        found = _ask(partial(stores.list_objects, folder), retries)
        names = {below(folder, file): file for file in found}
        left_out = [name for name in sorted(names) if is_skipped(name)]
        kept = sorted((name for name in names if not is_skipped(name)), key=lambda name: name.split("/"))
        return Below([names[name] for name in kept], skipped_phrase(left_out, *LEFT_OUT))
    walk = _Walk(folder)
    return Below([folder / name for name in sorted(walk.files, key=lambda name: name.split("/"))], walk.skipped())


class _Walk:
    """The files below a folder, by their names from there on."""

    def __init__(self, folder: Path):
        real = Path(os.path.realpath(folder))
        self.folder = folder
        self.files: list[str] = []
        self.left_out: list[str] = []
        self.again: list[str] = []
        self.dangling: list[str] = []
        self._seen = {_identity(above) for above in real.parents}
        links = sorted(self._entered(""))
        while links:  # folders themselves come first: a link to one of them is left out, and not the folder
            links = sorted(inner for link in links for inner in self._entered(link))

    def _entered(self, start: str) -> list[str]:
        """Read a folder and all below it. The linked folders that were met."""
        links: list[str] = []
        waiting = [start]
        while waiting:
            name = waiting.pop()
            identity = _identity(self.folder / name)
            if identity in self._seen:
                self.again.append(name)
                continue
            self._seen.add(identity)
            for entry in _entries(self.folder / name):
                inner = f"{name}/{entry.name}" if name else entry.name
                if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry)):
                    if is_skipped_folder(entry.name):
                        self.left_out.append(inner)
                    else:
                        (links if entry.is_symlink() else waiting).append(inner)
                elif is_skipped_file(entry.name):
                    self.left_out.append(inner)
                elif os.path.isfile(entry):
                    self.files.append(inner)
                elif entry.is_symlink() and not os.path.exists(entry):
                    self.dangling.append(inner)
        return links

    def skipped(self) -> str:
        """The files that were skipped, as a part of a sentence."""
        parts = [
            skipped_phrase(sorted(self.left_out), *LEFT_OUT),
            skipped_phrase(sorted(self.again), "link to a folder that is already read", "links to folders that are read already"),
            skipped_phrase(sorted(self.dangling), "link to a file that does not exist", "links to files that do not exist"),
        ]
        return ", ".join(part for part in parts if part)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        raise Refused(f"{folder} cannot be read: {error.strerror or error}. Give another path, or a pattern") from error


def _identity(folder: Path) -> tuple[int, int]:
    """Equal for two names of one folder."""
    try:
        about = os.stat(folder)
    except OSError as error:
        raise Refused(f"{folder} cannot be read: {error.strerror or error}. Give another path, or a pattern") from error
    return about.st_dev, about.st_ino


def common_folder(files: Sequence[Location]) -> Location:
    """The innermost folder that all of them are in."""
    first = files[0]
    if isinstance(first, Remote):
        root = Remote(first.store)
        return Remote(first.store, os.path.commonpath([below(root, file.parent) for file in files]))
    return Path(os.path.commonpath([str(file.parent) for file in files]))


def matching(pattern: str, retries: int) -> list[Location] | None:
    """The files that a pattern (`*`, `?`, `[...]`, and `**` for any folders) stands for, in order. None for what is not a pattern."""
    if is_url(pattern):
        return _matching_remotely(pattern, retries) if any(letter in pattern for letter in "*?[") else None
    if not any(letter in pattern for letter in "*?[") or os.path.lexists(os.path.expanduser(pattern)):
        return None
    names = sorted(glob.glob(os.path.abspath(os.path.expanduser(pattern)), recursive=True))
    found: dict[str, str] = {}  # a linked folder that holds itself would give its files again and again
    for name in sorted(names, key=lambda name: (name.count("/"), name)):
        if os.path.isfile(name):
            found.setdefault(f"{os.path.realpath(os.path.dirname(name))}/{os.path.basename(name)}", name)
    return [Path(name) for name in sorted(found.values())]


def no_match_hint(pattern: str) -> str:
    """The reason why no file matches a pattern, or a remedy, as the end of a sentence."""
    if "{" in pattern:
        return ". A range in braces is not supported: write * in its place"
    folder = Path(re.split(r"[*?\[]", os.path.abspath(os.path.expanduser(pattern)))[0] + "x").parent  # the part without a wildcard
    if is_url(pattern) or os.path.isdir(folder):
        return ". Give another path"
    return f": {folder} does not exist{_instead(folder)}"


# Of a store


def _located_remotely(location: Remote, folder: bool, retries: int) -> Remote:
    if location.key and not folder:
        try:
            return Remote(location.store, location.key, persistent(partial(stores.stamp_of, location), retries))
        except StorageFailed as failed:
            if number_of(failed) != errno.ENOENT:
                raise at_the_start(failed) from failed
    if _ask(partial(stores.has_any, location), retries):
        return location
    raise Refused(f"{location} does not exist: no object has this key or starts with it. Give another URL")


def _matching_remotely(pattern: str, retries: int) -> list[Location] | None:
    whole = stores.remote(pattern)
    pieces = whole.key.split("/")
    first = next((n for n, piece in enumerate(pieces) if any(letter in piece for letter in "*?[")), len(pieces))
    found = _ask(partial(stores.list_objects, Remote(whole.store, "/".join(pieces[:first]))), retries)
    if whole in found:  # an object that is called so
        return None
    return sorted((file for file in found if _fits(file.key.split("/")[first:], pieces[first:])), key=str)


def _fits(names: list[str], pattern: list[str]) -> bool:
    """Match as `glob` does: a wildcard stays within a name, and meets no hidden one."""
    if not pattern or not names:
        return not pattern and not names
    hidden = names[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        return (not hidden and ((len(pattern) == 1 and len(names) == 1) or _fits(names[1:], pattern))) or _fits(names, pattern[1:])
    return not hidden and fnmatch.fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def _ask(question: Callable[[], T], retries: int) -> T:
    try:
        return persistent(question, retries)
    except StorageFailed as failed:
        raise at_the_start(failed) from failed


def at_the_start(failed: StorageFailed) -> Refused | StorageFailed:
    """What will be the same the next time is a setting, a name or a right that is wrong."""
    return failed if number_of(failed) in PASSING else Refused(str(failed))
