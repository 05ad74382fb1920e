"""What the data of one stage are read with: opened sources, their indexes, the count of rejects, and all that a plan depends on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyeline.core.batch import Budget
from eyeline.core.facts import Cost
from eyeline.core.image_rule import ImageRule
from eyeline.data.fetch.fetch import Fetch
from eyeline.data.identity import plan_identity
from eyeline.data.images.patches import Augment
from eyeline.data.plan.blend import Pool, Side, pool_of, pools_of
from eyeline.data.plan.index import Index
from eyeline.data.plan.order import Longs
from eyeline.data.plan.position import WindowAddress
from eyeline.data.plan.sizing import Sizing
from eyeline.data.prepared.packed import Prepared
from eyeline.data.rejects import Rejects
from eyeline.data.sets import Data, Divided, open_sides
from eyeline.data.text.tokenizer import Encoder

PLAIN = Cost(token=1, pair=0, label=0, patch=1, patch_pair=0)

Gather = Callable[[Any], Sequence[Any]]  # a plain value of each rank -> those of all ranks, in their order


def alone(value: Any) -> Sequence[Any]:
    return [value]


@dataclass(frozen=True, eq=False)
class Reader:
    """The data of one stage, opened. Rows are read when the window that needs them is planned."""

    data: Data
    encoder: Encoder
    rule: ImageRule | None
    seed: int  # of the sampling order and of augmentation
    longest: int  # tokens that a document may have: the model's positions, or data.max_length
    cost: Cost
    gather: Gather
    notify: Callable[[str], None] | None  # is told how far indexing is, in place of a bar
    rejects: Rejects
    records: Path | None  # where the files of the sources are on record, by name
    prepared: Prepared | None
    training: Side
    validation: Side
    validates: bool  # whether there is anything to validate on
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
    gather: Gather = alone,
    found: Divided | None = None,
    notify: Callable[[str], None] | None = None,
) -> Reader:
    """List the shards of `data`. Rejects are written into `folder` when there is one, and indexes unless `data.cache` names another.
    `found` is `data` opened, where that was done already. Refused for unusable sources."""
    rejects = Rejects(folder, data.max_reject_rate)
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
        gather=gather,
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
    )


def identity_of_plan(reader: Reader, budget: Budget) -> dict[str, Any]:
    """All that the plan depends on, except files of images, by name: what a state must not be used without."""
    validation = reader.validation.index.sources if reader.data.validation else ()
    about = (reader.seed, reader.longest, reader.encoder, reader.rule)
    return plan_identity(reader.data, reader.training.index.sources, validation, budget, *about)


def sizing_of(reader: Reader, budget: Budget, validation: bool = False) -> Sizing:
    """What measures the training rows, or the validation rows; it remembers, so there is one for each. Refused for prepared data
    that were planned for something else."""
    if (validation, budget) not in reader.sizings:
        if reader.prepared is not None:
            reader.prepared.refuse_other(identity_of_plan(reader, budget), reader.prepared.manifest.identity)
        index = (reader.validation if validation else reader.training).index
        longest = min(budget.tokens, reader.longest)
        reader.sizings[validation, budget] = Sizing(index, budget, longest, reader.data.overlong, reader.cost)
    return reader.sizings[validation, budget]


def fetch_of(reader: Reader, validation: bool, budget: Budget | None, augment: Augment | None) -> Fetch:
    """What makes batches of planned packs; it remembers decoded images, so there is one for each budget."""
    key = (validation, budget)
    if key not in reader.fetches:
        sources = (reader.validation if validation else reader.training).index.sources
        reader.fetches[key] = Fetch(sources, reader.encoder, reader.rule, budget, reader.seed, augment, reader.data.read_retries)
    return reader.fetches[key]


def training_pools(reader: Reader) -> tuple[Pool, ...]:
    """What the training rows are drawn from: one pool of everything, or one of each source."""
    if reader.data.mix == "concat":
        return (pool_of(reader.training, reader.data.max_samples_per_image, reader.seed),)
    return pools_of(reader.training, reader.data.max_samples_per_image, reader.seed)


def rows_in_order(reader: Reader, address: WindowAddress) -> Longs:
    """The rows of a window of a pool, as they come: what a state with many carried rows is read with."""
    number, epoch, window = address
    pool = training_pools(reader)[number]
    cursor = pool.at(epoch, window)
    pool.make_indexes(cursor)
    return pool.window(cursor).row_R3
