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


def chat_templates(of_tokenizer: Any, folder: Path) -> dict[str, str]:
    """The chat templates of a model by name, the default first: the tokenizer's (`of_tokenizer`, which transformers reads from
    tokenizer_config.json, chat_template.jinja and additional_chat_templates/), else those of the processor's files. Raises Refused."""
    found = _by_name(of_tokenizer, folder / "tokenizer_config.json")
    for name in ("chat_template.json", "processor_config.json"):
        if (folder / name).exists():
            here = _by_name(read_object(folder / name).get("chat_template"), folder / name)
            found |= {f"{key} of {name}" if key in found else key: jinja for key, jinja in here.items() if jinja not in found.values()}
    return dict(sorted(found.items(), key=lambda item: item[0] != "default"))


def _by_name(value: Any, path: Path) -> dict[str, str]:
    """One template, or several by name: a mapping, or a list of {name, template}."""
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        value = {one.get("name"): one.get("template") for one in value}
    named = {"default": value} if isinstance(value, str) else value or {}
    if not isinstance(named, dict) or not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise Refused(f"{path} has chat_template={value!r:.200}; wanted a text, or texts by name. Is the file damaged?")
    return named


def _processor(folder: Path, name: str, part: str) -> dict[str, Any] | None:
    if (folder / name).exists():
        return read_object(folder / name)
    whole = read_object(folder / "processor_config.json") if (folder / "processor_config.json").exists() else {}
    found = whole.get(part)
    return found if isinstance(found, dict) else None
