"""From a recipe's `data` to batches: plan, then fetch. Read this file first; it reads in call order.

    reader_of        a recipe's data -> opened sources: shards of rows, an index of each             reader.py, sets.py, sources/
    planned_windows  shards -> windows of rows in an order -> packs within the budget                plan/
    planned_steps    packs -> steps
    packs_to_read    the packs of a step -> those of this rank, with all that reading them needs     plan/plan.py
    fetched_steps    packs -> batches; what is rejected is counted where its step is given           fetch/

The plan never depends on the process that fetches it, so any number of ranks and workers gives the same steps, and the state is where the
plan stands: a window, how many of its packs were given, and the bins that were open where it starts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from typing import Any

from eyeline.core.batch import Batch, Budget, Counts
from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.step import Step, step_of
from eyeline.data.fetch.fetch import Fetched, GroupToRead, Lost, RowToRead, fetched_in_order
from eyeline.data.fetch_thread import FetchThread
from eyeline.data.plan.blend import VERSION, Cursor, OpenBins, Pool, Position, blended_window, cursors_of, window_of
from eyeline.data.plan.index import Ahead, Entry
from eyeline.data.plan.plan import ImageGroup, Ordered, Pack, Plan, RowOf, RowsMet, closing_plan, cost_of, deal, plan
from eyeline.data.plan.sizing import Sizing
from eyeline.data.reader import (
    Reader,
    changed_window,
    changes,
    fetch_of,
    identity_of_plan,
    record_sources,
    refuse_changes,
    sizing_of,
    training_pools,
)


def training_steps(
    reader: Reader,
    budget: Budget,
    micro_batches: int,
    epochs: int | None,
    state: dict[str, Any] | None = None,
    balance_images: bool = False,
    thread: FetchThread | None = None,
) -> Iterator[Step]:
    """Steps of `micro_batches` packs over all ranks of the reader; endless unless `epochs` is given.

    Every rank has as many batches in a step as any other; where the ranks do not divide the packs, some are empty. With `epochs`, the last
    step may have fewer packs. `balance_images`: images are dealt over ranks on their own. A `thread` plans and fetches a step while the
    one before it is computed with. Refused when `state` belongs to other data. Raises TooManyRejects in the step where the rate is
    exceeded, on all ranks.
    """
    if state is not None:
        refuse_changes(changes(reader, budget, state))
    record_sources(reader)
    reader.rejects.restore(state["rejects"] if state else {"seen": 0, "counts": {}})
    sizing, start = sizing_of(reader, budget), start_of(reader, state)
    with closing(Ahead.of(reader.training.index, reader.data.fetching)) as ahead:
        ahead.start(entries_of(training_pools(reader), start.cursors))
        steps = planned_steps(planned_windows(reader, sizing, epochs, start), micro_batches, ahead)
        yield from fetched_steps(reader, steps, sizing, identity_of_plan(reader, budget), balance_images, thread)


def start_of(reader: Reader, state: dict[str, Any] | None) -> Position:
    """The position at which a plan resumes after a state, or starts."""
    return Position.of(state) if state else Position(tuple(Cursor() for _ in training_pools(reader)))


# Plan


@dataclass(frozen=True, eq=False)
class PlannedWindow:
    """The packs of a window, and where the plan stands after each. The last one of all has the bins that are still open then."""

    number: int
    plan: Plan
    done: int  # packs that were given before
    after: Callable[[int], Position]  # after this many of its packs
    end: Position  # behind it
    coming: Sequence[Entry]  # shards of the next window
    epoch_ended: bool
    epochs: float | None  # that the rows up to its end make, by shards; None where each source has epochs of its own
    group_share: float  # of an epoch, that each of its image groups is

    @property
    def packs(self) -> Iterator[Pack]:
        """The packs that were not given before."""
        return map(self.plan.pack, range(self.done, len(self.plan.packs)))

    def epoch(self, packs: int) -> float | None:
        """Epochs done after `packs` packs: image groups that are not in a pack yet are not done."""
        return None if self.epochs is None else self.epochs - self.group_share * self.plan.groups_behind(packs)


def planned_windows(reader: Reader, sizing: Sizing, epochs: int | None, start: Position | None = None) -> Iterator[PlannedWindow]:
    """The plan from a position on."""
    pools = training_pools(reader)
    at = start or start_of(reader, None)
    digest = ""
    while epochs is None or at.cursors[0].epoch < epochs:
        ordered, after = rows_of_window(reader, pools, at, sizing)
        made = plan(ordered, at.bins.bins, sizing)
        if at.digest not in (None, made.digest):
            raise changed_window(reader, at, ordered, made)
        if reader.prepared is not None:
            reader.prepared.refuse_other_plan(at.number, made.digest)
        digest = made.digest
        share = at.group_share_behind(pools[0].epochs_done(after[0]) - pools[0].epochs_done(at.cursors[0]), made.groups_behind(0))
        here, end = replace(at, digest=digest), Position(after, at.number + 1, 0, OpenBins(tuple(map(tuple, made.bins))), group_share=share)
        yield PlannedWindow(
            at.number,
            made,
            at.done,
            lambda packs, here=here: replace(here, done=packs),
            end,
            entries_of(pools, after),
            reader.data.mix == "concat" and after[0].epoch > at.cursors[0].epoch,
            None if reader.data.mix == "interleave" else pools[0].epochs_done(after[0]),
            share,
        )
        at = end
    rest, last = closing_plan(at.bins.bins, sizing, digest), at
    yield PlannedWindow(
        max(at.number - 1, 0),
        rest,
        0,
        lambda packs: replace(last, bins=last.bins.without(packs)),
        replace(last, bins=last.bins.without(len(rest.packs))),
        (),
        False,
        None if reader.data.mix == "interleave" else pools[0].epochs_done(at.cursors[0]),
        at.group_share,
    )


def rows_of_window(reader: Reader, pools: tuple[Pool, ...], at: Position, sizing: Sizing) -> tuple[Ordered, tuple[Cursor, ...]]:
    """The rows of the window at a position, in their order, and the cursors behind it."""
    if reader.data.mix == "concat":
        ordered, after = window_of(pools[0], at.cursors[0])
        return ordered, (after,)
    return blended_window(pools, [source.weight for source in reader.data.sources], at.cursors, at.number, sizing)


def entries_of(pools: Sequence[Pool], cursors: Sequence[Cursor]) -> list[Entry]:
    """All shards of the windows at these cursors."""
    return [entry for pool, cursor in zip(pools, cursors, strict=True) for entry in pool.shards(cursor)]


@dataclass(frozen=True)
class PlannedStep:
    """The packs of a step, over all ranks, and the rows that were met for them. Where a window ends, its last rows are reported at once
    and without packs: so a stream of unusable rows is noticed."""

    packs: tuple[Pack, ...]
    met: tuple[RowsMet, ...]
    after: Position
    digests: tuple[str, ...]  # of the windows that it takes from
    epoch: float | None


def planned_steps(windows: Iterator[PlannedWindow], packs: int, ahead: Ahead) -> Iterator[PlannedStep]:
    """Steps of `micro_batches` packs. While packs are taken, `ahead` makes the indexes of the next window."""
    waiting: list[Pack] = []
    met: list[RowsMet] = []
    digests: dict[str, None] = {}
    after, epoch = None, None

    def step(given: Sequence[Pack], after: Position, epoch: float | None) -> PlannedStep:
        out = PlannedStep(tuple(given), tuple(met), after, tuple(digests), epoch)
        met.clear()
        digests.clear()
        return out

    for window in windows:
        if window.coming:
            ahead.start(window.coming)
        parts = len(window.plan.packs) + 1
        for n, pack in enumerate(window.packs, window.done):
            ahead.share(window.coming, n, parts)
            after, epoch = window.after(n + 1), window.epoch(n + 1)
            waiting.append(pack)
            met.append(pack.met)
            digests[window.plan.digest] = None
            if len(waiting) == packs:
                yield step(waiting, after, epoch)
                waiting.clear()
        if window.plan.closing:
            break
        ahead.share(window.coming, parts - 1, parts)
        after, epoch = window.end, window.epoch(parts)
        met.append(window.plan.rest)
        digests[window.plan.digest] = None
        yield step((), after, epoch)
    if waiting and after is not None:
        yield step(waiting, after, epoch)


# Fetch


def fetched_steps(
    reader: Reader,
    steps: Iterator[PlannedStep],
    sizing: Sizing,
    identity: dict[str, Any],
    balance_images: bool = False,
    thread: FetchThread | None = None,
) -> Iterator[Step]:
    """The steps with the batches of this rank. What is rejected is counted where the step is given."""
    fetched = batches_of_steps(reader, steps, sizing, balance_images, thread)
    for step, dealt, batches, lost in thread.items(fetched) if thread else fetched:
        counts, images, lost_anywhere = told_by_all(reader, step, batches, lost)
        count_rejects(reader, step, lost_anywhere)
        if step.packs:
            state = {"version": VERSION, "identity": identity} | step.after.state() | {"rejects": reader.rejects.state()}
            costs = [[step.packs[pack].cost if pack < len(step.packs) else (0, 0) for pack in slot] for slot in dealt]
            deals_by = reader.cost if balance_images else None
            if thread:
                thread.start()  # until the next step is asked for, the reader is its own
            packs, sharing = [slot[reader.world.rank] for slot in dealt], reader.group.size
            yield step_of(batches, packs, counts, costs, state, step.epoch, images, deals_by, sharing)


def batches_of_steps(
    reader: Reader, steps: Iterator[PlannedStep], sizing: Sizing, balance_images: bool, thread: FetchThread | None
) -> Iterator[tuple[PlannedStep, tuple[tuple[int, ...], ...], Sequence[Batch], Sequence[Lost]]]:
    """What this rank fetches for each planned step, and how its packs were dealt."""
    asked = packs_to_read(steps, sizing, reader.world.rank, reader.world.size, balance_images)
    fetch = fetch_of(reader, False, sizing.budget, reader.data.augment)
    fetched = fetched_in_order(asked, fetch, reader.data.fetching, reader.rejects.verdicts, reader.group)
    found: list[Fetched] = []
    for (step, dealt, last), one in thread.until_stopped(fetched) if thread else fetched:
        found.append(one)
        if last:
            batches = [one.batch for one in found if step.packs]
            yield step, dealt, thread.ready(batches) if thread else batches, [lost for one in found if step.packs for lost in one.lost]
            found = []


def packs_to_read(
    steps: Iterator[PlannedStep], sizing: Sizing, rank: int, ranks: int, balance_images: bool = False
) -> Iterator[tuple[tuple[PlannedStep, tuple[tuple[int, ...], ...], bool], tuple[GroupToRead, ...]]]:
    """What this rank fetches, in order: each its step, the packs of the step's slots, and whether it is the step's last. Where images are
    dealt on their own, packs are dealt by what they cost the language model."""
    for step in steps:
        dealt = deal([(pack.cost[0], 0) if balance_images else pack.cost for pack in step.packs], ranks)
        mine = [slot[rank] for slot in dealt] or [0]  # a step of no packs has an empty one, which is not given
        for n, pack in enumerate(mine):
            yield (step, dealt, n + 1 == len(mine)), pack_to_read(step.packs[pack], sizing) if pack < len(step.packs) else ()


def pack_to_read(pack: Pack, sizing: Sizing) -> tuple[GroupToRead, ...]:
    """StorageFailed where a row is no longer what was planned: an index that was made again since then has seen other images."""
    if cost_of(pack.groups, sizing) != pack.cost:
        files = {str(sizing.index.sources[source].file_of(shard).path) for group in pack.groups for source, shard, _ in group.rows}
        raise StorageFailed(f"{', '.join(sorted(files))}: images of its rows have changed since they were planned. Restore them")
    return tuple(group_to_read(group, sizing) for group in pack.groups)


def group_to_read(group: ImageGroup, sizing: Sizing) -> GroupToRead:
    """The input of a worker that makes the documents of an image group."""
    source, shard, number = group.rows[0]
    index = sizing.index.shard(source, shard)
    media = index.media(number, sizing.index.sources[source].file_of(shard))
    again = bool(index.showing_R[number] > len(group.rows))
    return GroupToRead((group.epoch, group.window, *group.rows[0]), tuple(row_to_read(row, sizing) for row in group.rows), media, again)


def row_to_read(row: RowOf, sizing: Sizing) -> RowToRead:
    source, shard, number = row
    index, sized = sizing.index.shard(source, shard), sizing(source, shard)
    messages = sized.messages.get(number)
    return RowToRead(
        source=source,
        place=index.place(shard, number),
        messages=messages,
        tokens=int(sized.tokens_R[number]),
        patches=int(sized.patches_R[number]),
        tokenised=index.tokenised(number) if messages is None else None,
        sizes=index.sizes(number),
    )


# Rejects


def told_by_all(
    reader: Reader, step: PlannedStep, batches: Sequence[Batch], lost: Sequence[Lost]
) -> tuple[list[list[Counts]], list[list[list[int]]], list[Lost]]:
    """The counts of each rank's batches, the patches of their images, and what any rank could not decode. It is exchanged where the step is
    given: planning runs ahead of the steps, and not equally far on all ranks. StorageFailed where they plan differently."""
    images = [batch.cu_N1.diff().tolist() for batch in batches]
    mine = [list(step.digests), [list(astuple(batch.counts)) for batch in batches], images, [one.plain for one in lost]]
    digests, counts, images_of, everywhere = zip(*reader.world.gather(mine), strict=True)
    if any(other != digests[0] for other in digests):
        raise StorageFailed(
            f"ranks have different plans from window {step.after.number}: their data or versions differ. Give all ranks the same "
            f"data and version"
        )
    told = [[Counts(*one) for one in of_rank] for of_rank in counts]
    return told, list(images_of), [Lost.of(one) for of_rank in everywhere for one in of_rank]


def count_rejects(reader: Reader, step: PlannedStep, lost: Sequence[Lost]) -> None:
    """Count what was met for a step: rows that were not planned, and those of all ranks that could not be decoded. TooManyRejects or
    Refused where they are too many."""
    rejects = reader.rejects
    rejects.seen += sum(met.first for met in step.met)
    rejects.left_out += sum(met.left_out for met in step.met)
    for met in step.met:
        for reject in met.rejects:
            rejects.add(reject)
    for met in step.met:
        for reject in met.again:
            rejects.note(reject)
    for one in lost:
        # the first time counts. A source that is repeated has a row more than once in an epoch
        first = one.epoch == 0
        if first and reader.data.sources[one.row[0]].repeat > 1:
            first = one.row not in rejects.repeated
            rejects.repeated.add(one.row)
        (rejects.add if first else rejects.note)(one.reject)
    cursors = step.after.cursors
    over = all(cursor.epoch > 0 for cursor in cursors)
    if over:
        refuse_if_nothing_usable(reader)
    rejects.check(over, lambda: rows_about(reader, cursors))


def check_rejects_at_end(reader: Reader, state: dict[str, Any]) -> None:
    """The verdict on what was read when a stage ends after `state`: TooManyRejects, or Refused when not one row could be used."""
    refuse_if_nothing_usable(reader)
    cursors = cursors_of(state)
    if not all(cursor.epoch > 0 for cursor in cursors):
        reader.rejects.check_part(lambda: rows_about(reader, cursors))


def rows_about(reader: Reader, cursors: Sequence[Cursor]) -> int:
    """The number of different rows to train on, as far as it is known where the plan stands."""
    return sum(pool.rows_about(cursor) for pool, cursor in zip(training_pools(reader), cursors, strict=True))


def refuse_if_nothing_usable(reader: Reader) -> None:
    rejects = reader.rejects
    if rejects.seen and rejects.seen == rejects.rejected and rejects.max_rate == 1:
        raise Refused(f"no sample can be used: all {rejects.seen} were rejected. `eyeline check` says why")
