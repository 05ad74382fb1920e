"""What a saved data position belongs to: the content of its sources and the settings of its plan; and in what two of these differ.

The files of a source, by name, are on record in the run folder, so that a run which is resumed on other data can say what has changed.
A record is named by the digest that the state of a run knows a source by, so it is written once, whatever happens to the data later.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.files import make_folder, read_json, write_json
from eyeline.core.image_rule import ImageRule
from eyeline.data.plan import plan as planning
from eyeline.data.plan.position import VERSION
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Rows
from eyeline.data.text.tokenizer import Encoder

NAMED = 3  # files that a message names of each kind of change


def digest_of(rows: Rows) -> str:
    """What the content of a source is; never where it is stored."""
    return hashlib.sha256(repr([shard.fingerprint for shard in rows.shards]).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def record(folder: Path, rows: Rows) -> None:
    """Write down the files of a source, unless they are on record."""
    path = folder / f"{digest_of(rows)}.json"
    if not path.exists():
        make_folder(folder)
        write_json(path, {"path": str(rows.path), "files": _files(rows)})


def changes(folder: Path | None, before: str | None, rows: Rows | None) -> str:
    """What is different about a source of the given digest, in words; `rows` is what it is now, None where there is no such source."""
    old = _recorded(folder, before)
    if rows is None:
        return f"{old['path'] if old else 'a source'} is no longer among the sources"
    if before is None:
        return f"{rows.path} was not among the sources"
    if old is None:
        return f"{rows.path} has changed"
    files, now = old["files"], _files(rows)
    said = {
        "changed": [name for name in files.keys() & now.keys() if files[name] != now[name]],
        "is missing": [name for name in files if name not in now],
        "is new": [name for name in now if name not in files],
    }
    if len(files) == len(now) == 1:
        return f"{rows.path} has changed"
    listed = [f"{_named(names)} {what}" for what, names in said.items() if names]
    return f"of {rows.path}, {' and '.join(listed) or 'the order of the files changed'}"


def _files(rows: Rows) -> dict[str, str]:
    """A digest of each file, from those of its shards."""
    found: dict[str, Any] = {}
    for shard in rows.shards:
        name = shard.name.partition("#")[0].partition("@")[0]
        found.setdefault(name, hashlib.sha256()).update(shard.fingerprint.encode("utf-8", "surrogatepass"))
    return {name: digest.hexdigest()[:16] for name, digest in found.items()}


def _recorded(folder: Path | None, digest: str | None) -> dict[str, Any] | None:
    """A record; None where there is none that can be read: a run of an earlier version has none."""
    if folder is None or digest is None:
        return None
    try:
        found = read_json(folder / f"{digest}.json")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) and isinstance(found.get("path"), str) else None


def _named(names: list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def plan_identity(
    data: Data,
    training: Sequence[Rows],
    validation: Sequence[Rows],
    budget: Budget,
    seed: int,
    longest: int,
    encoder: Encoder,
    rule: ImageRule | None,
) -> dict[str, Any]:
    """All that a plan depends on, except files of images, by name; `validation` are sources of their own."""
    choice = [[s.categories, s.repeat, s.limit, s.weight] for s in data.sources]
    order = [seed, data.mix, data.max_samples_per_image, data.validation_fraction, choice]
    own = any(rows.layout.code for rows in validation)  # a file of the user's may change under its name; other layouts are settings
    return {
        "data": [digest_of(rows) for rows in training],
        "validation": [digest_of(rows) for rows in validation],
        "layout": [rows.layout.identity for rows in training],
        "order (seed, mix, max_samples_per_image, validation_fraction, sources)": short_hash(order),
        "budget (tokens, patches, longest, overlong)": [budget.tokens, budget.patches, longest, data.overlong],
        "tokenizer": encoder.identity,
        "image rule": short_hash(rule),
        "plan version": planning.VERSION,
    } | ({"layout of validation": [rows.layout.identity for rows in validation]} if own else {})


def state_changes(
    state: Mapping[str, Any], now: Mapping[str, Any], sources: Mapping[str, Sequence[Rows]], records: Path | None
) -> list[tuple[str, str]]:
    """In what the identity `now` differs from a state's: a name, and how, in words. `sources` are those of "data" and of "validation",
    `records` is where a run wrote the names of its files down. Refused for a state of another version."""
    if state.get("version") != VERSION:
        raise Refused(
            f"the data position has format version {state.get('version')}; this Eyeline reads {VERSION}. Start a new "
            "run from its checkpoint (model.path), or use the version of Eyeline that wrote it"
        )
    saved, found = state["identity"], list[tuple[str, str]]()
    for what, rows in sources.items():
        for before, one in zip_longest(saved.get(what, ()), rows):
            if one is None or before != digest_of(one):
                found.append((what, changes(records, before, one)))
    others = [name for name in now if name not in sources and saved.get(name) != now[name]]
    return found + [(name, f"{saved.get(name)} → {now[name]}") for name in others]


def refuse_changes(found: Sequence[tuple[str, str]]) -> None:
    """Raise Refused, naming what differs, when a state belongs to other data or settings."""
    if found:
        listed = "; ".join(f"{what} ({how})" for what, how in found)
        raise Refused(f"the data position was saved for other data or settings. These differ: {listed}. Restore them, or start a new run")


def short_hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]
