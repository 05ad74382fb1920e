"""Folders that Megatron-Energon has prepared: archives, and in `.nv-meta` which of them count and what their members are."""

import re
from typing import Any

import yaml

from eyeline.core.errors import Refused
from eyeline.core.locations import Location, below, inside
from eyeline.data.containers.container import File


def energon_shards(folder: Location, there: list[Location], retries: int) -> list[Location] | None:
    """The training archives of a folder that Energon has prepared, of all files in it; None for any other folder. Refused when some
    are missing."""
    about = folder / ".nv-meta"
    if not any(below(about, file) for file in there):
        return None
    files = {str(file): file for file in there}
    found = files.get(str(about / "split.yaml"), files.get(str(about / "split.json")))
    try:
        if found is None:
            raise TypeError("it does not exist")
        file = File.of(found, retries)
        split = yaml.safe_load(file.read(0, file.size))
        listed = split["split_parts"]["train"]
        if not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
            raise TypeError("split_parts.train is not a list of names")
        listed = [name for pattern in listed for name in expand_braces(pattern)]
        excluded = {name for pattern in split.get("exclude") or () for name in expand_braces(pattern)}
        if not excluded <= set(listed):
            raise TypeError("exclude names files that split_parts does not list")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise Refused(
            f"{about / 'split.yaml'} does not list the archives to train on ({error}). Run `energon prepare` again, or give a pattern"
        ) from error
    wanted = {name: files.get(str(inside(folder, name))) for name in listed if name not in excluded}
    bad = [name for name, file in wanted.items() if file is None]
    if bad:
        raise Refused(
            f"{about / 'split.yaml'} lists {len(bad)} archives that do not exist, such as {folder / bad[0]}. Restore them, or prepare it "
            "again"
        )
    return [file for file in wanted.values() if file is not None]


MOST_NAMES = 1_000_000  # of a pattern
_BRACES = re.compile(r"(.*?)\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}(.*)", re.DOTALL)


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for: `shard_{000..011}.tar`, `{a,b}.tar`. ValueError for an implausible number."""
    found = _BRACES.fullmatch(pattern)
    if found is None:
        return [pattern]
    before, first, last, choice, after = found.groups()
    if choice is None and abs(int(last) - int(first)) >= MOST_NAMES:
        raise ValueError(f"{pattern[:100]} expands to over {MOST_NAMES:,} names")
    step = 1 if choice is not None or int(first) <= int(last) else -1
    width = len(first) if choice is None and len(first) == len(last) else 0
    inner = choice.split(",") if choice is not None else [f"{n:0{width}}" for n in range(int(first), int(last) + step, step)]
    rest = expand_braces(after)
    if len(inner) * len(rest) > MOST_NAMES:
        raise ValueError(f"{pattern[:100]} expands to over {MOST_NAMES:,} names")
    return [f"{before}{one}{end}" for one in inner for end in rest]


OURS = {"image": "image", "caption": "caption", "context": "question", "answers": "answers"}  # fields of its samples
_ACCESS = re.compile(r"[^,\[\]]+(\[[^,\[\]]+\])*")  # json[text]


def energon_columns(about: Location, retries: int) -> tuple[dict[str, str], str]:
    """The contents of its `dataset.yaml`: the columns that a plain field_map gives, as a source's `columns` has them; and what of the
    file is
    not obeyed, in words. Refused when it cannot be read."""
    file = File.of(about, retries)
    try:
        said = yaml.safe_load(file.read(0, file.size))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise Refused(f"{about} is not YAML: {str(error)[:200]}. Fix it, or give the archives by a pattern") from error
    said = said if isinstance(said, dict) else {}
    if said.get("sample_loader") is not None:
        return {}, "the sample_loader of its dataset.yaml is not run"
    fields: Any = said.get("field_map") or {}
    columns: dict[str, str] = {}
    for field, access in fields.items() if isinstance(fields, dict) else ():
        if field == "answer_weights":  # the most frequent answer is supervised
            continue
        if field not in OURS or not isinstance(access, str) or not _ACCESS.fullmatch(access):
            return {}, f"the field_map of its dataset.yaml is not used, since {field}: {access} has no counterpart here"
        part, *keys = access.replace("]", "").split("[")
        columns[OURS[field]] = ".".join([part.lower(), *keys])
    return columns, ""
