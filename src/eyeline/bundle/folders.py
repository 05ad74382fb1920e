"""Folders of other people's JSON, and folders of ours that appear whole."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyeline.core.errors import Refused
from eyeline.core.files import read_object, storage_failed, sync_folder
from eyeline.core.log import warn


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into. It becomes `target` when the block ends well, and is removed when it does not.

    Raises Refused if `target` exists and is not an empty folder, before the block; StorageFailed for an OSError inside it.
    """
    _refuse_occupied(target)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        beside.mkdir(parents=True)
        yield beside
        for path in beside.rglob("*"):
            _flush(path)
        _flush(beside)
        if target.exists():
            target.rmdir()
        os.rename(beside, target)
        sync_folder(target.parent)
    except OSError as error:
        raise storage_failed("write", target, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already, unless something above failed


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_occupied(target: Path) -> None:
    """Raise Refused unless `target` is free to be written: nothing is ever written over."""
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise Refused(f"{target} exists already and is not an empty folder. Choose another one, or remove it.")


@contextmanager
def about(folder: Path) -> Iterator[None]:
    """A refusal inside names the folder whose files it is about."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{folder}: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json. Code that it names (`auto_map`) is never run: Eyeline has its own models, and says so."""
    config = read_object(folder / "config.json")
    if "auto_map" in config:
        warn(f"{folder / 'config.json'} names code of its own (auto_map); it is not run.")
    return config


def read_preprocessor(folder: Path) -> dict[str, Any] | None:
    """How pictures are prepared, if the folder says: preprocessor_config.json, or that part of processor_config.json, where
    transformers 5 puts it when a whole processor is saved."""
    return _processor(folder, "preprocessor_config.json", "image_processor")


def read_video_preprocessor(folder: Path) -> dict[str, Any] | None:
    """The same of films."""
    return _processor(folder, "video_preprocessor_config.json", "video_processor")


def _processor(folder: Path, name: str, part: str) -> dict[str, Any] | None:
    if (folder / name).exists():
        return read_object(folder / name)
    whole = read_object(folder / "processor_config.json") if (folder / "processor_config.json").exists() else {}
    found = whole.get(part)
    return found if isinstance(found, dict) else None
