"""Folders of other people's JSON, and folders of ours that appear whole."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyeline.core.errors import Refused
from eyeline.core.files import storage_failed, sync_folder
from eyeline.core.log import warn

LARGEST_JSON = 64 * 2**20  # bytes; the largest real ones, tokenizers of 260,000 pieces, have half of it


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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that someone else wrote. Raises Refused, naming the file and the fault."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise Refused(f"{path} has {size:,} bytes; wanted at most {LARGEST_JSON:,}. That is no {path.name} of a real model.")
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


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json. Code that it names (`auto_map`) is never run: Eyeline has its own models, and says so."""
    config = read_object(folder / "config.json")
    if "auto_map" in config:
        warn(f"{folder / 'config.json'} names code of its own (auto_map); it is not run.")
    return config


def read_preprocessor(folder: Path) -> dict[str, Any] | None:
    """How pictures are prepared, if the folder says: preprocessor_config.json, or that part of processor_config.json, where
    transformers 5 puts it when a whole processor is saved."""
    if (folder / "preprocessor_config.json").exists():
        return read_object(folder / "preprocessor_config.json")
    whole = read_object(folder / "processor_config.json") if (folder / "processor_config.json").exists() else {}
    part = whole.get("image_processor")
    return part if isinstance(part, dict) else None
