"""Names of files that belong to no data set: what systems, editors and notebooks leave between data. They are skipped, and reported."""

import re
from collections.abc import Sequence

_FOLDERS = re.compile(r"\..+|__MACOSX|__pycache__|PaxHeaders?(\.\d+)?|@eaDir|\$RECYCLE\.BIN|System Volume Information|lost\+found")
_FILES = re.compile(r"\..*|.*~|#.*#|~\$.*|Thumbs\.db|desktop\.ini|Icon\r", re.IGNORECASE)
KEPT = (".nv-meta",)  # hidden, and read: what Megatron-Energon says of a set


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
