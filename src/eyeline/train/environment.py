"""The environment of a run: stamped on its numbers, written to env.json, printed by `eyeline env`."""

import hashlib
import os
import platform
import subprocess
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyeline import __version__
from eyeline.parallel.launch import Machine

PACKAGES = (
    *("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pillow", "pydantic", "peft"),
    *("triton", "flash-linear-attention", "fla-core"),  # kernels on a GPU
)


def environment(here: Machine) -> dict[str, Any]:
    """Versions, hardware and the commit, as plain JSON."""
    return {
        "eyeline": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": packages(),
        "system": platform.platform(),
        "device": here.device.type,
        "hardware": here.name,
        "threads": here.threads,
        **here.stamps(),
    }


def versions() -> dict[str, str]:
    """What must be equal on all ranks of a run, by name. The digest of the code tells apart what two changed checkouts have."""
    code = {"eyeline": __version__, "commit of eyeline": commit() or "", "code of eyeline": code_digest()}
    return code | {"Python": platform.python_version(), **packages()}


@cache
def code_digest() -> str:
    """A digest of Eyeline's source files."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def packages() -> dict[str, str]:
    """The versions of the packages that compute, by name."""
    return {name: found for name in PACKAGES if (found := _version(name))}


def process_started() -> float | None:
    """What the monotonic clock showed when this process started, as Linux tells it; None elsewhere."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    ticks = int(stat.rpartition(")")[2].split()[19])  # field 22: since the machine was started
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


@cache  # a process runs the code that was there when it started
def commit() -> str | None:
    """The commit of Eyeline's code, with `+changes` when files differ from it; None when it is installed, not checked out."""
    folder = Path(__file__).parent
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None or not (Path(root) / "src" / "eyeline").is_dir():
        return None  # an installed copy may be inside the checkout of another project
    head, changes = _git(folder, "rev-parse", "--short=12", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+changes' if changes else ''}" if head else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
