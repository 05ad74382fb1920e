"""The reader of the data of one stage: opened sources, their indexes, the count of rejects; and what identifies all that, so that a
saved position is never used with other data."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from eyeline.core.batch import Budget
from eyeline.core.cost import Cost
from eyeline.core.errors import Refused
from eyeline.core.files import make_folder, read_json, write_json
from eyeline.core.image_rule import ImageRule
from eyeline.core.world import ALONE, World
from eyeline.data.fetch.fetch import Fetch
from eyeline.data.images.patches import Augment
from eyeline.data.plan import plan as planning
from eyeline.data.plan.blend import VERSION, Pool, Position, Side, pool_of, pools_of
from eyeline.data.plan.index import Index
from eyeline.data.plan.sizing import Sizing
from eyeline.data.prepared.folder import Prepared
from eyeline.data.rejects import Rejects
from eyeline.data.sets import Data, Divided, open_sides
from eyeline.data.sources.sources import Rows
from eyeline.data.text.tokenizer import Encoder

NAMED = 3  # files that a message names of each kind of change
PLAIN = Cost(token=1, pair=0, label=0, patch=1, patch_pair=0)


@dataclass(frozen=True, eq=False)
class Reader:
    """The data of one stage, opened. Rows are read when the window that needs them is planned."""

    data: Data
    encoder: Encoder
    rule: ImageRule | None
    seed: int  # of the sampling order and of augmentation
    longest: int  # tokens that a document may have: the model's positions, or data.max_length
    cost: Cost
    world: World  # the ranks that have packs of their own
    group: World  # the ranks that share these packs: the first of them fetches
    notify: Callable[[str], None] | None  # is told how far indexing is, in place of a bar
    rejects: Rejects
    records: Path | None  # where the files of the sources are on record, by name
    prepared: Prepared | None
    training: Side
    validation: Side
    validates: bool  # whether there is anything to validate on
    likely: bool = False  # whether training batches have the likeliest tokens of the teachers that wrote the answers
    sizings: dict[tuple[bool, Budget], Sizing] = field(default_factory=dict, repr=False)
    fetches: dict[tuple[bool, Budget | None], Fetch] = field(default_factory=dict, repr=False)


def reader_of(
    data: Data,
    encoder: Encoder,
    rule: ImageRule | None,
    seed: int,
    folder: Path | None = None,
    longest: int = 2**31 - 1,
    cost: Cost = PLAIN,
    world: World = ALONE,
    found: Divided | None = None,
    notify: Callable[[str], None] | None = None,
    group: World = ALONE,
    likely: bool = False,
) -> Reader:
    """List the shards of `data`. Rejects are written into `folder` when there is one, and indexes unless `data.cache` names another.
    `found` is `data` opened, where that was done already. Refused for unusable sources."""
    rejects = Rejects(folder, data.max_reject_rate, writes=world.first and group.first)
    found = found or open_sides(data)
    cache = Path(data.cache).expanduser() if data.cache else folder / "index" if folder else None
    shelf = found.prepared.shelf if found.prepared is not None else None
    index = Index(found.sources, encoder, rule, cache, shelf)
    own = bool(data.validation)
    return Reader(
        data=data,
        encoder=encoder,
        rule=rule,
        seed=seed,
        longest=longest if data.max_length is None else min(longest, data.max_length),
        cost=cost,
        world=world,
        group=group,
        notify=notify,
        rejects=rejects,
        records=folder / "sources" if folder else None,
        prepared=found.prepared,
        training=Side(index, data.validation_fraction, held_out=False),
        validation=Side(
            Index(found.validation, encoder, rule, cache, shelf) if own else index,
            0.0 if own else data.validation_fraction,
            held_out=not own,
        ),
        validates=bool(found.validation),
        likely=likely,
    )


def sizing_of(reader: Reader, budget: Budget, validation: bool = False) -> Sizing:
    """The sizing of the training rows, or of the validation rows. It caches, so there is one for each. Refused for prepared data
    that were planned for something else."""
    if (validation, budget) not in reader.sizings:
        if reader.prepared is not None:
            reader.prepared.refuse_other(identity_of_plan(reader, budget), reader.prepared.manifest.identity)
        index = (reader.validation if validation else reader.training).index
        longest = min(budget.tokens, reader.longest)
        reader.sizings[validation, budget] = Sizing(index, budget, longest, reader.data.overlong, reader.cost)
    return reader.sizings[validation, budget]


def fetch_of(reader: Reader, validation: bool, budget: Budget | None, augment: Augment | None) -> Fetch:
    """The fetcher that makes batches of planned packs. It caches decoded images, so there is one per budget."""
    key = (validation, budget)
    if key not in reader.fetches:
        sources = (reader.validation if validation else reader.training).index.sources
        reader.fetches[key] = Fetch(
            *(sources, reader.encoder, reader.rule, budget, reader.seed, augment, reader.data.read_retries),
            likely=reader.likely and not validation,
        )
    return reader.fetches[key]


def training_pools(reader: Reader) -> tuple[Pool, ...]:
    """The pools that training rows come from: one of everything, or one per source."""
    if reader.data.mix == "concat":
        return (pool_of(reader.training, reader.data.max_samples_per_image, reader.seed),)
    return pools_of(reader.training, reader.data.max_samples_per_image, reader.seed)


# What a saved position belongs to: the content of the sources and the settings of the plan


def identity_of_plan(reader: Reader, budget: Budget) -> dict[str, Any]:
    """All that the plan depends on, except files of images, by name: what a state must not be used without."""
    data, training, validation = reader.data, reader.training.index.sources, validation_sources(reader)
    choice = [[s.categories, s.repeat, s.limit, s.weight, *([] if s.where is None else [s.where])] for s in data.sources]
    order = [reader.seed, data.mix, data.max_samples_per_image, data.validation_fraction, choice]
    chosen = [[rows.chosen.text, rows.chosen.digest] if rows.chosen else None for rows in (*training, *validation)]
    own = any(rows.layout.code for rows in validation)  # a file of the user's may change under its name; other layouts are settings
    return {
        "data": [digest_of(rows) for rows in training],
        "validation": [digest_of(rows) for rows in validation],
        "layout": [rows.layout.identity for rows in training],
        "order (seed, mix, max_samples_per_image, validation_fraction, sources)": short_hash(order),
        "budget (tokens, patches, longest, overlong)": [budget.tokens, budget.patches, reader.longest, data.overlong],
        "tokenizer": reader.encoder.identity,
        "image rule": short_hash(reader.rule),
        "plan version": planning.VERSION,
        **({"where, and signals": chosen} if any(chosen) else {}),
    } | ({"layout of validation": [rows.layout.identity for rows in validation]} if own else {})


def validation_sources(reader: Reader) -> tuple[Rows, ...]:
    """Those of its own to validate on; none where a part of the training data is."""
    return reader.validation.index.sources if reader.data.validation else ()


def record_sources(reader: Reader) -> None:
    """Write down the files of all sources, unless they are on record."""
    if reader.records is None or not (reader.world.first and reader.group.first):
        return
    for rows in (*reader.training.index.sources, *validation_sources(reader)):
        record_source(reader.records, rows)


def changes(reader: Reader, budget: Budget, state: Mapping[str, Any], records: Path | None = None) -> list[tuple[str, str]]:
    """In what data and settings differ from a state's: a name, and how, in words. `records` is where a run wrote file names down,
    by default the reader's own folder. Refused for a state of another version."""
    if state.get("version") != VERSION:
        raise Refused(
            f"the data position has format version {state.get('version')}; this Eyeline reads {VERSION}. Start a new "
            "run from its checkpoint (model.path), or use the version of Eyeline that wrote it"
        )
    saved, now, found = state["identity"], identity_of_plan(reader, budget), list[tuple[str, str]]()
    sources = {"data": reader.training.index.sources, "validation": validation_sources(reader)}
    for what, rows in sources.items():
        for before, one in zip_longest(saved.get(what, ()), rows):
            if one is None or before != digest_of(one):
                found.append((what, source_changes(records or reader.records, before, one)))
    others = [name for name in (now | saved) if name not in sources and saved.get(name) != now.get(name)]
    return found + [(name, f"{saved.get(name)} → {now.get(name)}") for name in others]


def changed_window(reader: Reader, at: Position, ordered: planning.Ordered, made: planning.Plan) -> Refused:
    """The error that names the files of a window that is not planned as it was."""
    shards = np.unique(ordered.row_R5[:, 2:4], axis=0).tolist()
    files = sorted({str(reader.training.index.sources[source].file_of(shard).path) for source, shard in shards})
    more = f" and {len(files) - NAMED} more files" if len(files) > NAMED else ""
    return Refused(
        f"the rows of window {at.number} are no longer those that were planned (plan {made.digest}, saved with {at.digest}): "
        f"images that rows of {', '.join(files[:NAMED])}{more} show have changed. Restore them, or start a new run"
    )


def refuse_changes(found: Sequence[tuple[str, str]]) -> None:
    """Raise Refused, naming what differs, when a state belongs to other data or settings."""
    if found:
        listed = "; ".join(f"{what} ({how})" for what, how in found)
        raise Refused(f"the data position was saved for other data or settings. These differ: {listed}. Restore them, or start a new run")


def short_hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# The files of a source, by name, are on record in the run folder, so that a run which is resumed on other data can say what has changed.
# A record is named by the digest that the state of a run knows a source by, so it is written once, whatever happens to the data later


def digest_of(rows: Rows) -> str:
    """What the content of a source is; never where it is stored."""
    return hashlib.sha256(repr([shard.fingerprint for shard in rows.shards]).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def record_source(folder: Path, rows: Rows) -> None:
    """Write down the files of a source, unless they are on record."""
    path = folder / f"{digest_of(rows)}.json"
    if not path.exists():
        make_folder(folder)
        write_json(path, {"path": str(rows.path), "files": _files(rows)})


def source_changes(folder: Path | None, before: str | None, rows: Rows | None) -> str:
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
    listed = [f"{_name_list(names)} {what}" for what, names in said.items() if names]
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


def _name_list(names: list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
