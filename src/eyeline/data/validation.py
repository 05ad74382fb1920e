"""The batches that a stage is validated on."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from eyeline.core.batch import Batch, Budget, Sample
from eyeline.core.errors import Refused
from eyeline.data.fetch.fetch import GroupToRead, fetched_in_order
from eyeline.data.index_progress import make_indexes
from eyeline.data.loader import group_to_read
from eyeline.data.plan.blend import Cursor, pool_of, window_of
from eyeline.data.plan.plan import ImageGroup, closing_plan, plan
from eyeline.data.plan.sizing import Sizing
from eyeline.data.reader import Reader, fetch_of, sizing_of
from eyeline.data.rejects import Reject
from eyeline.data.sources.sources import Place, Rows


def validation_batches(reader: Reader, budget: Budget) -> Iterator[Batch]:
    """Every usable validation sample once, in the same order each time, as it is: no augmentation, no padding.

    Of several ranks, each has every `ranks`-th pack, and all have as many batches: the last may be empty.
    """
    if not reader.validates:
        return
    sizing, rejected = sizing_of(reader, budget, validation=True), list[Reject]()
    make_indexes(reader, reader.validation.index, sorted(set(pool_of(reader.validation, 1, None, repeated=False).entries)))
    usable = False
    asked = _packs_of_rank(reader, sizing, reader.world.rank, reader.world.size, rejected)
    fetch, group = fetch_of(reader, True, None, None), reader.group
    for has_images, fetched in fetched_in_order(asked, fetch, reader.data.fetching, reader.rejects.verdicts, group):
        rejected += (lost.reject for lost in fetched.lost)
        usable = usable or fetched.batch.counts.supervised > 0
        yield replace(fetched.batch, has_images=has_images)
    for reject in rejected:
        reader.rejects.note(reject)
    if not any(reader.world.gather(usable)):
        raise Refused("no validation sample can be used: all were rejected. `eyeline check` says why")


def _packs_of_rank(
    reader: Reader, sizing: Sizing, rank: int, ranks: int, rejected: list[Reject]
) -> Iterator[tuple[bool, tuple[GroupToRead, ...]]]:
    """What this rank reads, pack by pack, and whether it or the pack that another rank reads then has images."""
    packs = validation_packs(reader, sizing, rejected)
    while slot := list(islice(packs, ranks)):
        has_images = any(sizing(source, shard).patches_R[row] for pack in slot for group in pack for source, shard, row in group.rows)
        mine = slot[rank] if rank < len(slot) else []
        yield has_images, tuple(group_to_read(group, sizing) for group in mine)


def validation_packs(reader: Reader, sizing: Sizing, rejected: list[Reject]) -> Iterator[list[ImageGroup]]:
    """The packs of validation; rows that cannot be used are added to `rejected`."""
    pool = pool_of(reader.validation, reader.data.max_samples_per_image, None, repeated=False)
    cursor, bins = Cursor(), ()
    while cursor.epoch == 0:
        ordered, cursor = window_of(pool, cursor)
        made = plan(ordered, bins, sizing)
        rejected += [reject for _, reject in made.rejects]
        bins = tuple(map(tuple, made.bins))
        yield from (made.pack(n).groups for n in range(len(made.packs)))
    rest = closing_plan(bins, sizing, "")
    yield from (rest.pack(n).groups for n in range(len(rest.packs)))


def validation_samples(reader: Reader, budget: Budget, count: int) -> list[tuple[Rows, Place, Sample]]:
    """The first samples of validation that are usable, with where their rows are. Prepared data cannot be asked: their sources are not
    read."""
    sizing, found = sizing_of(reader, budget, validation=True), list[tuple[Rows, Place, Sample]]()
    rows_of_packs = (row for pack in validation_packs(reader, sizing, []) for group in pack for row in group.rows)
    for source, shard, row in islice(rows_of_packs, count):
        rows = reader.validation.index.sources[source]
        place = reader.validation.index.shard(source, shard).place(shard, row)
        found.append((rows, place, rows.read(place)))
    return found
