"""Names of files: those that belong to no data set, which are skipped, and suggestions for one that does not exist."""

import os
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

from eyeline.core.errors import closest

# What systems, editors and notebooks leave between data
_FOLDERS = re.compile(r"\..+|__MACOSX|__pycache__|PaxHeaders?(\.\d+)?|@eaDir|\$RECYCLE\.BIN|System Volume Information|lost\+found")
_FILES = re.compile(r"\..*|.*~|#.*#|~\$.*|Thumbs\.db|desktop\.ini|Icon\r", re.IGNORECASE)
KEPT = (".nv-meta",)  # hidden, and read: what Megatron-Energon says of a set

MANY_NAMES = 100_000  # of a folder are looked at
ENDS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


def is_skipped_folder(name: str) -> bool:
    """Return whether a folder of this name is hidden, or a system's own."""
    return name not in KEPT and name != ".." and _FOLDERS.fullmatch(name) is not None


def is_skipped_file(name: str) -> bool:
    """Return whether a file of this name is hidden (`._a.jpg` and `.DS_Store` of macOS among them), a backup, or a system's own."""
    return _FILES.fullmatch(name) is not None


def is_skipped(path: str) -> bool:
    """The same of a path with slashes."""
    *folders, name = path.split("/")
    return is_skipped_file(name) or any(map(is_skipped_folder, folders))


def skipped_phrase(names: Sequence[str], one: str, many: str) -> str:
    """The number of these, and the first of them; empty for none."""
    some = ", ".join(name[:100] for name in names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names):,} {one if len(names) == 1 else many} ({some})" if names else ""


# Suggestions


@lru_cache(maxsize=64)  # a folder that is missing is missing for all its images
def no_folder(folder: Path) -> str:
    """The end of a sentence about a folder that does not exist: the first missing piece of its path, and a suggestion."""
    while not os.path.isdir(folder.parent):
        folder = folder.parent
    try:
        siblings = [entry.name for entry in islice(os.scandir(folder.parent), 1_000) if entry.is_dir()]
    except OSError:  # not ours to read
        siblings = []
    lowered = {name.lower(): name for name in siblings}
    guess = closest(folder.name.lower(), list(lowered))
    return f", nor does the folder {folder}" + (f" (did you mean {lowered[guess]!r}?)" if guess else "")


def near_name(path: Path) -> str:
    """A suggestion, as the end of a sentence: in another case, with another extension, a prefix or none, or a folder more
    or less. Empty where nothing is like it."""
    for name in dict.fromkeys((path.name, unquote(path.name), path.name.strip())):
        found = _like(path.parent, name)
        if found is not None:
            return f" (did you mean {found!r}?)"
    outer = path.parent.parent / path.name
    if os.path.isfile(outer):
        return f" (did you mean {str(outer)!r}, without the folder {path.parent.name!r}?)"
    inner = next((f"{folder}/{path.name}" for folder in _names(path.parent)[2] if os.path.isfile(path.parent / folder / path.name)), None)
    return f" (did you mean {inner!r}?)" if inner else ""


def _like(folder: Path, name: str) -> str | None:
    whole, stems, _ = _names(folder)
    stem, end = os.path.splitext(_plain(name))
    found = whole.get(_plain(name)) or (stems.get(stem) if end in ENDS else stems.get(_plain(name)))
    if found is None and len(stem) > 4:  # COCO_train2014_000000000009.jpg, or only its number
        found = stems.get(stem.rpartition("_")[2]) or next((have for known, have in stems.items() if known.endswith(f"_{stem}")), None)
    return found


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


@lru_cache(maxsize=64)  # a name that is wrong in one row is wrong in many
def _names(folder: Path) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """The images of a folder by their plain names, and without extensions; and the folders in it."""
    whole: dict[str, str] = {}
    stems: dict[str, str] = {}
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, MANY_NAMES):
                plain = _plain(entry.name)
                stem, end = os.path.splitext(plain)
                if end in ENDS:
                    whole[plain] = entry.name
                    stems.setdefault(stem, entry.name)
                elif len(folders) < 100 and entry.is_dir():
                    folders.append(entry.name)
    except OSError:  # not ours to read
        pass
    return whole, stems, tuple(sorted(folders))
