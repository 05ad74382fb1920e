"""What a reader of signals sees."""

import hashlib
from pathlib import Path

from eyeline.data.signals.columns import MANIFEST


def files_of(folder: Path) -> dict[str, str]:
    """The digest of each file, by name."""
    there = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] in (MANIFEST, "columns")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in there}
