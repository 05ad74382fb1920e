"""The batches that a stage is validated on."""

from collections.abc import Iterator

from eyeline.core.batch import Batch, Budget
from eyeline.core.errors import Refused
from eyeline.data.fetch.fetch import GroupToRead, fetched_in_order
from eyeline.data.index_progress import make_indexes
from eyeline.data.loader import group_to_read
from eyeline.data.plan.blend import Cursor, pool_of, window_of
from eyeline.data.plan.plan import ImageGroup, closing_plan, plan
from eyeline.data.plan.sizing import Sizing
from eyeline.data.reader import Reader, fetch_of, sizing_of
from eyeline.data.rejects import Reject


def validation_batches(reader: Reader, budget: Budget, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """Every usable validation sample once, in the same order each time, as it is: no augmentation, no padding.

    Of several ranks, each has every `ranks`-th pack.
    """
    if not reader.validates:
        return
    sizing, rejected = sizing_of(reader, budget, validation=True), list[Reject]()
    make_indexes(reader, reader.validation.index, sorted(set(pool_of(reader.validation, 1, None, repeated=False).entries)))
    usable = False
    asked = _packs_of_rank(reader, sizing, rank, ranks, rejected)
    for _, fetched in fetched_in_order(asked, fetch_of(reader, True, None, None), reader.data.fetching, reader.rejects.verdicts):
        rejected += (lost.reject for lost in fetched.lost)
        if fetched.batch.counts.supervised:
            usable = True
            yield fetched.batch
    for reject in rejected:
        reader.rejects.note(reject)
    if not any(reader.gather(usable)):
        raise Refused("no validation sample can be used: all were rejected. `eyeline check` says why")


def _packs_of_rank(
    reader: Reader, sizing: Sizing, rank: int, ranks: int, rejected: list[Reject]
) -> Iterator[tuple[None, tuple[GroupToRead, ...]]]:
    for number, pack in enumerate(validation_packs(reader, sizing, rejected)):
        if number % ranks == rank:
            yield None, tuple(group_to_read(group, sizing) for group in pack)


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
