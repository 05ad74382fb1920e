"""Folders of other people's JSON, and folders of ours that appear whole."""

import grp
import hashlib
import os
import pwd
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyeline.checkpoint.tensors import refuse_other_formats
from eyeline.core.errors import Refused
from eyeline.core.files import read_object, storage_failed, sync_folder
from eyeline.core.log import warn
from eyeline.models.hf.config_json import refuse_quantised

ENDS = 1 << 20  # bytes at each end of a large file that its digest covers


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder next to `target` to write into. It becomes `target` when the block ends well, and is removed when it does not.

    Raises Refused if `target` exists and is not an empty folder, before the block; StorageFailed for an OSError inside it.
    """
    _refuse_occupied(target)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            _flush(path)
        _flush(temporary)
        if target.exists():
            target.rmdir()
        os.rename(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise storage_failed("write", target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already, unless something above failed


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


def warn_of_others(run: Path) -> None:
    """Warn of a run folder whose files others may have changed, before they are read: another owner's, or writable by others."""
    mine = os.geteuid()
    stats: list[tuple[Path, os.stat_result]] = []
    for path in _files_that_are_read(run):
        with suppress(FileNotFoundError):  # a run that trains removes old checkpoints meanwhile
            stats.append((path, path.lstat()))
    foreign = [path for path, found in stats if found.st_uid != mine]
    writable = [path for path, found in stats if _others_may_write(found)]
    if foreign:
        warn(
            f"{foreign[0]} belongs to another user ({_owner(foreign[0])}){_and_more(foreign)}: resume and export only what you trust. "
            f"To make it yours, copy the run: cp -r {run} NEW."
        )
    if writable:
        warn(
            f"{writable[0]} can be written by other users{_and_more(writable)}: they can change the run. "
            f"To keep them out: chmod -R go-w {run}"
        )


def _files_that_are_read(run: Path) -> Iterator[Path]:
    """The run folder, and the files in it, in its model and in its checkpoints. A folder that is deleted meanwhile is left out."""
    yield run
    for folder, inner, files in os.walk(run):
        depth = Path(folder).relative_to(run).parts
        yield from (Path(folder, name) for name in (*inner, *files))
        if not depth:
            inner[:] = [name for name in inner if name in ("model", "checkpoints")]
        elif depth[0] == "model" or len(depth) == 2:
            inner.clear()


def _and_more(paths: list[Path]) -> str:
    return f", and so {'does' if len(paths) == 2 else 'do'} {len(paths) - 1} more" if len(paths) > 1 else ""


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # an id without a name, as in containers
        return str(path.lstat().st_uid)


def _others_may_write(found: os.stat_result) -> bool:
    """Links always look writable, and a group of one's own, whose name is the user's, has no one else in it."""
    if stat.S_ISLNK(found.st_mode):
        return False
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _of_one(found.st_gid)


def _of_one(group: int) -> bool:
    try:
        known = grp.getgrgid(group)
        return known.gr_mem == [] and known.gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


@contextmanager
def about(folder: Path) -> Iterator[None]:
    """A refusal inside names the folder whose files it is about."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{folder}: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json. Code that it names (`auto_map`) is never run: Eyeline has its own models, and says so. Refused for a folder
    that holds something else than a model whose weights are numbers: an adapter, a quantised checkpoint, a GGUF file."""
    refuse_other_formats(folder)
    config = read_object(folder / "config.json")
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):  # of GPTQ, AWQ and ModelOpt, in older folders
        if (folder / name).exists():
            method = {"q": "GPTQ or AWQ", "h": "ModelOpt"}[name[0]]
            refuse_quantised(str(folder / name), {"quantization_config": {"quant_method": method, **read_object(folder / name)}})
    if "auto_map" in config:
        warn(f"{folder / 'config.json'} names code of its own (auto_map); it is not run.")
    return config


def read_preprocessor(folder: Path) -> dict[str, Any] | None:
    """The image preprocessing that the folder states, if any: preprocessor_config.json, or that part of processor_config.json, where
    transformers 5 puts it when a whole processor is saved."""
    return _processor(folder, "preprocessor_config.json", "image_processor")


def read_video_preprocessor(folder: Path) -> dict[str, Any] | None:
    """The video preprocessing that the folder states, if any."""
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


def digest_of_files(folder: Path) -> str:
    """A digest of the weights and settings in a folder: of names, sizes, and contents; of large files of both ends."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in (".safetensors", ".json")):
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(ENDS)
            file.seek(max(size - ENDS, len(head)))
            digest.update(repr((str(path.relative_to(folder)), size, hashlib.sha256(head + file.read(ENDS)).hexdigest())).encode())
    return digest.hexdigest()[:16]
