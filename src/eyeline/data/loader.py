"""Plan, then fetch: the whole road from a recipe's `data` to batches. Read this file first.

    divided              a recipe's data -> opened sources: shards of rows                         sets.py, sources.py
    Index                a shard -> places, token ids, sizes of pictures: once, before a window needs it    index.py, ahead.py
    Pool, blended        shards -> windows of rows in an order                                      order.py, blend.py: pure
    plan                 a window -> packs within the budget; open bins go on into the next         plan.py, packing.py: pure
    deal                 the packs of a step -> ranks                                               deal.py: pure
    Fetch                a pack -> documents -> Batch                                               fetch.py, in workers if wanted

The plan never depends on who fetches it, so any number of ranks and workers gives the same steps, and the state is where the
plan stands: a window, how much of it is done, and the bins that were open where it begins.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from eyeline.core.batch import Batch, Budget
from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.facts import Cost, ImageRule
from eyeline.core.files import make_folder, read_json, storage_failed, write_json
from eyeline.data.fetch.fetch import Fetch, Lost, Row, Visit, fetched_in_order
from eyeline.data.images.patches import Augment
from eyeline.data.plan import plan as planning
from eyeline.data.plan.ahead import Ahead, Entry, indexed
from eyeline.data.plan.blend import Cursor, Pool, Side, blended, pool_of, pools_of, whole
from eyeline.data.plan.carried import Carried, Drawn, Order
from eyeline.data.plan.deal import deal
from eyeline.data.plan.index import Index
from eyeline.data.plan.order import Longs
from eyeline.data.plan.plan import Item, Ordered, Plan, RowOf, Sizing, plan
from eyeline.data.rejects import FIRST_VERDICT, Reject, Rejects
from eyeline.data.sets import Data, Divided, divided
from eyeline.data.sources.recorded import NAMED, changes, digest_of, record
from eyeline.data.text.tokenizer import Encoder

VERSION = 3  # of the state
PLAIN = Cost(token=1, pair=0, label=0, patch=1, patch_pair=0)
PATIENCE = 2.0  # seconds of indexing before a bar appears
COUNTED_SHARDS = 32  # of a source, at most, when its samples are counted


# Where a plan stands


@dataclass(frozen=True)
class Position:
    """A window, how much of it is done, and the bins that were open where it begins. All that there is to know."""

    cursors: tuple[Cursor, ...]  # where the window begins: of the pool of everything, or of each source's
    number: int = 0  # windows before it
    done: int = 0  # packs (and rests without one) of the window that were given
    bins: Carried = field(default_factory=lambda: Carried(()))
    digest: str | None = None  # of the window's plan, once it is made

    def state(self) -> dict[str, Any]:
        """As JSON. An item is its rows, under the epoch and window that drew it."""
        return {
            "epoch": self.cursors[0].epoch,
            "number": self.number,
            "done": self.done,
            "digest": self.digest,
            "cursors": [asdict(cursor) for cursor in self.cursors],
            "bins": self.bins.written,
        }

    @staticmethod
    def of(state: dict[str, Any], order: Order | None = None) -> "Position":
        cursors = tuple(Cursor(**c) for c in state["cursors"])
        return Position(cursors, state["number"], state["done"], Carried.read(state["bins"], len(cursors), order), state["digest"])


class Pack(NamedTuple):
    items: list[Item]
    cost: tuple[int, int]


@dataclass(frozen=True)
class Met:
    """What came next in the plan: a pack, or none and only rows that count (many rejects, or the rest of a window)."""

    pack: Pack | None
    seen: int  # rows since the last Met that came for the first time
    rejects: tuple[Reject, ...]  # of these, the ones that are not planned
    again: tuple[Reject, ...]  # rows that are not planned, and were not the first time
    after: Position
    digest: str  # of the plan that it belongs to
    epoch_ended: bool = False
    epoch: float | None = None  # epochs done after it, by shards; None where each source has epochs of its own

    @property
    def window(self) -> int:
        """Number of the window that it is of. What is still open at the very end counts to the last."""
        return self.after.number - (self.after.done == 0)


@dataclass(frozen=True)
class Group:
    """The packs of a step, or none: then only what was met on the way counts."""

    packs: tuple[Pack, ...]
    seen: int
    rejects: tuple[Reject, ...]
    again: tuple[Reject, ...]
    after: Position
    digests: tuple[str, ...]  # of the plans that it takes from
    epoch_ended: bool
    epoch: float | None


class Step(NamedTuple):
    """The micro-batches of one rank, the state that goes on right after them, and the rank's wait for others."""

    batches: tuple[Batch, ...]
    state: dict[str, Any]
    imbalance: Mapping[str, float]  # by part: cost of the slowest rank of each micro-batch, over the mean; 1 is ideal
    epoch: float | None  # epochs done after it


class Count(NamedTuple):
    """How many samples a source has."""

    samples: int | None  # None: not known yet
    exact: bool


Gather = Callable[[Any], Sequence[Any]]  # a plain value of each rank -> those of all ranks, in their order


def alone(value: Any) -> Sequence[Any]:
    return [value]


class Reader:
    """The data of one stage. Opening it lists the shards; rows are read when the window that needs them is planned."""

    def __init__(
        self,
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
    ):
        """`seed` orders and augments. Rejects are written into `folder` when there is one, and indexes unless `data.cache` names another.
        A document has at most `longest` tokens: the model's positions. `found` is what `data` are, where that is known already. `notify`
        is told how far indexing is, in place of a bar, where that takes long.
        Refused for unusable sources."""
        self.data, self.encoder, self.rule, self.seed, self.longest, self.cost = data, encoder, rule, seed, longest, cost
        self.gather, self.notify = gather, notify
        self.rejects = Rejects(folder, data.max_reject_rate)
        self.records = folder / "sources" if folder else None  # which files the sources had, by name
        found = found or divided(data)
        self.prepared = found.prepared
        cache = Path(data.cache).expanduser() if data.cache else folder / "index" if folder else None
        shelf = self.prepared.shelf if self.prepared is not None else None
        index = Index(found.sources, encoder, rule, cache, shelf)
        self.training = Side(index, data.hold_out, judges=False)
        own = bool(data.validation)
        judging = Index(found.judges, encoder, rule, cache, shelf) if own else index
        self.judges = Side(judging, 0.0 if own else data.hold_out, judges=not own)
        self.validates = bool(found.judges)  # whether there is anything to validate on
        self._cursors: tuple[Cursor, ...] = ()  # where the plan stands after the last step that was given
        self._sizings: dict[tuple[bool, Budget], Sizing] = {}
        self._fetches: dict[tuple[bool, Budget | None], Fetch] = {}

    def sizing(self, budget: Budget, judges: bool = False) -> Sizing:
        """What measures the training rows, or the validation rows; it remembers, so there is one for each. Refused for prepared data
        when they were planned for something else."""
        if (judges, budget) not in self._sizings:
            if self.prepared is not None:
                self.prepared.refuse_other(self.identity(budget), self.prepared.manifest.identity)
            side = self.judges if judges else self.training
            self._sizings[judges, budget] = Sizing(side.index, budget, min(budget.tokens, self.longest), self.data.too_long, self.cost)
        return self._sizings[judges, budget]

    def _fetch(self, side: Side, budget: Budget | None, augment: Augment | None) -> Fetch:
        key = (side is self.judges, budget)
        if key not in self._fetches:
            self._fetches[key] = Fetch(side.index.sources, self.encoder, self.rule, budget, self.seed, augment, self.data.read_retries)
        return self._fetches[key]

    # Training

    def steps(
        self,
        budget: Budget,
        micro_batches: int,
        epochs: int | None,
        state: dict[str, Any] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> Iterator[Step]:
        """Steps of `micro_batches` packs over all ranks; endless unless `epochs` is given.

        Every rank has as many batches in a step as any other; where the ranks do not divide the packs, some are empty. With
        `epochs`, the last step may have fewer packs. Refused when `state` belongs to other data. Raises TooManyRejects in the
        step where the rate is exceeded, on all ranks.
        """
        identity = self.identity(budget)
        if state is not None:
            self._refuse_another(state, budget)
        if self.records is not None:
            for rows in (*self.training.index.sources, *(self.judges.index.sources if self.data.validation else ())):
                record(self.records, rows)
        self.rejects.restore(state["rejects"] if state else {"seen": 0, "counts": {}})
        sizing = self.sizing(budget)
        begin = Position.of(state, self._order) if state else None
        with closing(Ahead.of(self.training.index, self.data.fetching)) as ahead:
            groups = self._groups(self._met(sizing, epochs, begin, ahead), micro_batches)
            yield from self._steps(groups, sizing, budget, identity, rank, ranks)

    def _steps(
        self, groups: Iterator[Group], sizing: Sizing, budget: Budget, identity: dict[str, Any], rank: int, ranks: int
    ) -> Iterator[Step]:
        """The groups fetched. What is rejected is counted where the step is given."""
        batches: list[Batch] = []
        found: list[Lost] = []
        asked = self._asked(groups, sizing, rank, ranks)
        for (group, imbalance, last), fetched in fetched_in_order(
            asked, self._fetch(self.training, budget, self.data.augment), self.data.fetching, self.rejects.verdicts
        ):
            if group.packs:
                batches.append(fetched.batch)
                found += fetched.lost
            if not last:
                continue
            self.rejects.seen += group.seen
            # asked here and not where the plan is made: that runs ahead of the steps, and not equally far on all ranks
            digests, everywhere = zip(*self.gather([list(group.digests), [_listed(lost) for lost in found]]), strict=True)
            if any(other != digests[0] for other in digests):
                raise StorageFailed(
                    f"ranks plan differently, by window {group.after.number}: their data or versions differ. Make them equal"
                )
            for reject in group.rejects:
                self.rejects.add(reject)
            for reject in group.again:
                self.rejects.note(reject)
            for lost in (_lost(listed) for one in everywhere for listed in one):
                self._judge(lost)
            self._cursors = group.after.cursors
            if self._over():
                self._refuse_none()
            self.rejects.check(self._over(), self._rows_about)
            if group.packs:
                yield Step(
                    tuple(batches),
                    {"version": VERSION, "identity": identity} | group.after.state() | {"rejects": self.rejects.state()},
                    imbalance,
                    group.epoch,
                )
            batches, found = [], []

    def _judge(self, lost: Lost) -> None:
        """Of a row that decoding has found to be unusable, the first time counts. A source that is repeated has it more than once in an
        epoch."""
        first = lost.epoch == 0
        if first and self.data.sources[lost.row[0]].repeat > 1:
            first = lost.row not in self.rejects.repeated
            self.rejects.repeated.add(lost.row)
        (self.rejects.add if first else self.rejects.note)(lost.reject)

    def _over(self) -> bool:
        """Whether every row has been met."""
        return all(cursor.epoch > 0 for cursor in self._cursors)

    def _rows_about(self) -> int:
        """How many different rows there are to learn from, as far as it can be told where the plan stands."""
        return sum(pool.rows_about(cursor) for pool, cursor in zip(self.pools(), self._cursors, strict=True))

    def _refuse_none(self) -> None:
        if self.rejects.seen and self.rejects.seen == self.rejects.rejected and self.rejects.max_rate == 1:
            raise Refused(f"no sample can be used: all {self.rejects.seen} were rejected. `eyeline check` says why")

    def judge_end(self) -> None:
        """The verdict on what was read when a stage ends: TooManyRejects, or Refused when not one row could be used."""
        self._refuse_none()
        if not self._over():
            self.rejects.check_part(self._rows_about)

    def count_steps(self, budget: Budget, micro_batches: int, epochs: int) -> int:
        """How many steps so many epochs are. Every row is indexed for it, behind a bar when that takes long. The number is kept beside
        the indexes, so that a run counts once however often it resumes."""
        kept = self._count_file(budget, micro_batches, epochs)
        known = _count_in(kept) if kept is not None else None
        if known is not None:
            return known
        self.index_all()
        packs = seen = rejected = 0
        for met in self._met(self.sizing(budget), epochs, None):
            packs, seen, rejected = packs + (met.pack is not None), seen + met.seen, rejected + len(met.rejects)
            if met.epoch_ended and rejected == seen:
                raise Refused(f"no sample can be used: all {seen} were rejected. `eyeline check` says why")
        steps = -(-packs // micro_batches)
        if kept is not None:
            make_folder(kept.parent)
            write_json(kept, steps)
        return steps

    def forget_count(self, budget: Budget, micro_batches: int, epochs: int) -> None:
        """Count again the next time: pictures have changed, which no fingerprint tells."""
        kept = self._count_file(budget, micro_batches, epochs)
        if kept is not None:
            kept.unlink(missing_ok=True)

    def _count_file(self, budget: Budget, micro_batches: int, epochs: int) -> Path | None:
        folder = self.training.index.folder
        return folder / "counts" / f"{_hash([self.identity(budget), micro_batches, epochs])}.json" if folder else None

    def index_all(self) -> None:
        """Make all indexes of training rows that are not there yet."""
        self._index(self.training.index, sorted({entry for pool in self.pools() for entry in pool.entries}))

    def _index(self, index: Index, shards: Sequence[Entry]) -> None:
        """With a bar when that takes long, or with messages to `notify`."""
        begin, bar, told = time.monotonic(), None, False
        console = Console(stderr=True)
        absent = [entry for entry in shards if index.absent(*entry)] if index.written else []
        try:
            for done, _ in enumerate(indexed(index, absent, self.data.fetching), 1):
                if time.monotonic() - begin < PATIENCE:
                    continue
                if self.notify is not None:
                    self.notify(f"indexing data: {done:,} of {len(absent):,} shards")
                    told = True
                elif bar is None and console.is_terminal:
                    bar = Progress(console=console, transient=True)
                    bar.start()
                    bar.add_task("indexing", total=len(absent))
                if bar is not None:
                    bar.update(bar.task_ids[0], completed=done)
        finally:
            if bar is not None:
                bar.stop()
            if self.notify is not None and told:
                self.notify("")

    def index_first(self, budget: Budget, state: dict[str, Any] | None) -> None:
        """Make the indexes that the next step needs, at the start or after `state`. Refused when that belongs to other data."""
        if state is not None:
            self._refuse_another(state, budget)
        pools = self.pools()
        cursors = Position.of(state, self._order).cursors if state else [Cursor() for _ in pools]
        self._index(self.training.index, sorted(set(_shards(pools, cursors))))

    def samples(self, side: Side) -> list[Count]:
        """How many samples each source has on a side, as far as its indexes are made. Where some are not, the number follows from
        the bytes of those that are."""
        return [self._count(side, source) for source in range(len(side.index.sources))]

    def _count(self, side: Side, source: int) -> Count:
        index, shards = side.index, side.index.sources[source].shards
        whole = range(side.shards(source))
        there = (n for n in whole if index.shelf is not None or not index.absent(source, n))
        chosen = list(islice(there, COUNTED_SHARDS))
        found = sum(int(side.kept(source, n).sum()) for n in chosen)
        if len(chosen) == len(whole):
            return Count(found, True)
        share = sum(shards[n].bytes for n in chosen) / max(sum(shards[n].bytes for n in whole), 1)
        return Count(round(found / share) if share else None, False)

    def pools(self) -> tuple[Pool, ...]:
        """What the training rows are drawn from: one pool of everything, or one of each source."""
        if self.data.blend == "once":
            return (pool_of(self.training, self.data.share_images, self.seed),)
        return pools_of(self.training, self.data.share_images, self.seed)

    def planned(self, budget: Budget, epochs: int | None) -> Iterator[Met]:
        """The plan from its begin, and nothing fetched."""
        return self._met(self.sizing(budget), epochs, None)

    def _met(self, sizing: Sizing, epochs: int | None, position: Position | None, ahead: Ahead | None = None) -> Iterator[Met]:
        """The plan from a position on; `ahead` sees to the indexes of what comes next. Besides packs there is a Met without one at the
        end of each window, and wherever many rejects came without one, so that a stream of bad samples is noticed."""
        pools = self.pools()
        at = position or Position(tuple(Cursor() for _ in pools))
        digest = ""
        if ahead is not None:
            ahead.begin(_shards(pools, at.cursors))
        while epochs is None or at.cursors[0].epoch < epochs:
            ordered, after = self._window(pools, at, sizing)
            made = plan(ordered, at.bins.bins, sizing)
            if at.digest not in (None, made.digest):
                shards = np.unique(ordered.row_R5[:, 2:4], axis=0).tolist()
                files = sorted({str(self.training.index.sources[source].lies_in(shard).path) for source, shard in shards})
                more = f" and {len(files) - NAMED} more files" if len(files) > NAMED else ""
                raise Refused(
                    f"the rows of window {at.number} are no longer those that were planned (plan {made.digest}, saved with {at.digest}): "
                    f"images that rows of {', '.join(files[:NAMED])}{more} show have changed. Restore them, or start a new run"
                )
            if self.prepared is not None:
                self.prepared.refuse_other_plan(at.number, made.digest)
            digest = made.digest
            here = replace(at, digest=digest)
            ended = self.data.blend == "once" and after[0].epoch > at.cursors[0].epoch
            at = Position(after, at.number + 1, 0, Carried(tuple(map(tuple, made.bins)), len(pools), self._order))
            rest = list(_packs_and_rests(made))
            start, end = (self._epoch(pools, cursors) for cursors in (here.cursors, after))
            coming = _shards(pools, after)
            if ahead is not None:
                ahead.begin(coming)
            for n, (pack, seen, rejects, again) in enumerate(rest[here.done :], here.done):
                if ahead is not None:
                    ahead.share(coming, n, len(rest))
                last = n + 1 == len(rest)
                found = None if pack is None else Pack(made.items(pack), made.cost(pack))
                epoch = None if start is None or end is None else start + (end - start) * (n + 1) / len(rest)
                yield Met(found, seen, rejects, again, at if last else replace(here, done=n + 1), digest, last and ended, epoch)
        planning.reopened(at.bins.bins, sizing)  # are they still what was planned?
        left = [Pack(list(bin), _cost(bin, sizing)) for bin in at.bins.bins]
        for n, pack in enumerate(left):
            yield Met(pack, 0, (), (), replace(at, bins=at.bins.without(n + 1)), digest, epoch=self._epoch(pools, at.cursors))

    def _epoch(self, pools: tuple[Pool, ...], cursors: Sequence[Cursor]) -> float | None:
        """Epochs that are done where a window starts, by shards."""
        return None if self.data.blend == "shares" else cursors[0].epoch + cursors[0].first / max(len(pools[0].entries), 1)

    def _order(self, drawn: Drawn) -> Longs:
        """The rows of a window of a pool, as they come."""
        pool, epoch, window = drawn
        of = self.pools()[pool]
        return of.window(of.at(epoch, window)).row_R3

    def _window(self, pools: tuple[Pool, ...], at: Position, sizing: Sizing) -> tuple[Ordered, tuple[Cursor, ...]]:
        if self.data.blend == "once":
            ordered, after = whole(pools[0], at.cursors[0])
            return ordered, (after,)
        return blended(pools, [source.weight for source in self.data.sources], at.cursors, at.number, sizing)

    @staticmethod
    def _groups(plan: Iterator[Met], packs: int) -> Iterator[Group]:
        """The packs of each step together. What comes without a pack goes on by itself, at once, with the counts of the packs that wait
        for their step: a rate of rejects is of all that was met."""
        waiting: list[Pack] = []
        uncounted: list[Met] = []
        met = None

        def group(given: Sequence[Pack], after: Met) -> Group:
            rejects, again = (tuple(r for met in uncounted for r in of(met)) for of in (attrgetter("rejects"), attrgetter("again")))
            digests = tuple(dict.fromkeys(met.digest for met in uncounted))
            return Group(
                tuple(given), sum(met.seen for met in uncounted), rejects, again, after.after, digests, after.epoch_ended, after.epoch
            )

        for met in plan:
            uncounted.append(met)
            if met.pack is None:
                yield group((), met)
                uncounted.clear()
                continue
            waiting.append(met.pack)
            if len(waiting) == packs:
                yield group(waiting, met)
                uncounted.clear()
                waiting.clear()
        if met is not None and waiting:
            yield group(waiting, met)

    def _asked(
        self, groups: Iterator[Group], sizing: Sizing, rank: int, ranks: int
    ) -> Iterator[tuple[tuple[Group, Mapping[str, float], bool], tuple[Visit, ...]]]:
        """What this rank fetches, in order: each its group, and whether it is the group's last."""
        for group in groups:
            dealt = deal([pack.cost for pack in group.packs], ranks)
            imbalance: dict[str, float] = dict(zip(("language", "vision", "all"), dealt.imbalance, strict=True))
            mine = [slot[rank] for slot in dealt.slots] or [None]
            for n, pack in enumerate(mine):
                visits = () if pack is None else self._visits(group.packs[pack], sizing)
                yield (group, imbalance, n + 1 == len(mine)), visits

    def _visits(self, pack: Pack, sizing: Sizing) -> tuple[Visit, ...]:
        """StorageFailed where a row is no longer what was planned: an index that was made anew since has seen other pictures."""
        if _cost(pack.items, sizing) != pack.cost:
            files = {str(sizing.index.sources[source].lies_in(shard).path) for item in pack.items for source, shard, _ in item.rows}
            raise StorageFailed(
                f"{', '.join(sorted(files))}: pictures of its rows have changed since they were planned. Put them back as they were"
            )
        return tuple(self._visit(item, sizing) for item in pack.items)

    def _visit(self, item: Item, sizing: Sizing) -> Visit:
        """What a worker needs to make the documents of an item."""
        source, shard, number = item.rows[0]
        index = sizing.index.shard(source, shard)
        media = index.media(number, sizing.index.sources[source].lies_in(shard))
        again = bool(index.showing_R[number] > len(item.rows))
        return Visit((item.epoch, item.window, *item.rows[0]), tuple(self._row(row, sizing) for row in item.rows), media, again)

    def _row(self, row: RowOf, sizing: Sizing) -> Row:
        source, shard, number = row
        index, sized = sizing.index.shard(source, shard), sizing(source, shard)
        messages = sized.messages.get(number)
        return Row(
            source=source,
            place=index.place(shard, number),
            messages=messages,
            tokens=int(sized.tokens_R[number]),
            patches=int(sized.patches_R[number]),
            tokenised=index.tokenised(number) if messages is None else None,
            sizes=index.sizes(number),
        )

    def identity(self, budget: Budget) -> dict[str, Any]:
        """All that the plan depends on, except files of pictures, by name: what a state must not be used without."""
        data = self.data
        choice = [[s.kinds, s.repeat, s.limit, s.weight] for s in data.sources]
        order = [self.seed, data.blend, data.share_images, data.hold_out, choice]
        return {
            "data": [digest_of(rows) for rows in self.training.index.sources],
            "validation": [digest_of(rows) for rows in self.judges.index.sources if data.validation],
            "layout": [rows.layout.identity for rows in self.training.index.sources],
            "order (seed, blend, share_images, hold_out, sources)": _hash(order),
            "budget (tokens, patches, longest, too_long)": [budget.tokens, budget.patches, self.longest, data.too_long],
            "tokenizer": self.encoder.identity,
            "picture rule": _hash(self.rule),
            "plan version": planning.VERSION,
        }

    def changes(self, budget: Budget, state: dict[str, Any], records: Path | None = None) -> list[tuple[str, str]]:
        """In what data and settings differ from a state's: a name, and how, in words. `records` is where a run wrote file names down,
        by default the reader's own folder. Refused for a state of another version."""
        if state.get("version") != VERSION:
            raise Refused(
                f"the data position was saved in version {state.get('version')} of its format, and this is version {VERSION}. Start a new "
                "run from its checkpoint (model.path), or use the version of Eyeline that wrote it"
            )
        saved, now, found = state["identity"], self.identity(budget), list[tuple[str, str]]()
        for what, side in (("data", self.training), ("validation", self.judges)):
            rows = side.index.sources if now[what] else ()
            for before, one in zip_longest(saved.get(what, ()), rows):
                if one is None or before != digest_of(one):
                    found.append((what, changes(records or self.records, before, one)))
        others = [name for name in now if name not in ("data", "validation") and saved.get(name) != now[name]]
        return found + [(name, f"{saved.get(name)} → {now[name]}") for name in others]

    def _refuse_another(self, state: dict[str, Any], budget: Budget) -> None:
        """Raise Refused, naming what differs, when a state belongs to other data or settings."""
        if found := self.changes(budget, state):
            listed = "; ".join(f"{what} ({how})" for what, how in found)
            raise Refused(
                f"the data position was saved for other data or settings. Different are: {listed}. Restore them, or start a new run"
            )

    # Validation

    def validation(self, budget: Budget, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Every usable validation sample once, in the same order each time, as it is: no augmentation, no padding.

        Of several ranks, each has every `ranks`-th pack.
        """
        if not self.validates:
            return
        sizing, rejected = self.sizing(budget, judges=True), list[Reject]()
        self._index(self.judges.index, sorted(set(pool_of(self.judges, 1, None, repeated=False).entries)))
        usable = False
        for _, fetched in fetched_in_order(
            self._judged(sizing, rank, ranks, rejected), self._fetch(self.judges, None, None), self.data.fetching, self.rejects.verdicts
        ):
            rejected += (lost.reject for lost in fetched.lost)
            if fetched.batch.counts.supervised:
                usable = True
                yield fetched.batch
        for reject in rejected:
            self.rejects.note(reject)
        if not any(self.gather(usable)):
            raise Refused("no validation sample can be used: all were rejected. `eyeline check` says why")

    def _judged(self, sizing: Sizing, rank: int, ranks: int, rejected: list[Reject]) -> Iterator[tuple[None, tuple[Visit, ...]]]:
        for number, pack in enumerate(self.judging(sizing, rejected)):
            if number % ranks == rank:
                yield None, tuple(self._visit(item, sizing) for item in pack)

    def judging(self, sizing: Sizing, rejected: list[Reject]) -> Iterator[list[Item]]:
        """The packs of validation; rows that cannot be used are added to `rejected`."""
        pool = pool_of(self.judges, self.data.share_images, None, repeated=False)
        cursor, bins = Cursor(), ()
        while cursor.epoch == 0 or bins:
            if cursor.epoch == 0:
                ordered, cursor = whole(pool, cursor)
                made = plan(ordered, bins, sizing)
                rejected += [reject for _, reject in made.rejects]
                packs, bins = [made.items(n) for n in range(len(made.packs))], tuple(map(tuple, made.bins))
            else:
                packs, bins = [list(bin) for bin in bins], ()
            yield from packs


def _shards(pools: Sequence[Pool], cursors: Sequence[Cursor]) -> list[Entry]:
    """All that the windows at these cursors are made of."""
    return [entry for pool, cursor in zip(pools, cursors, strict=True) for entry in pool.shards(cursor)]


def _packs_and_rests(made: Plan) -> Iterator[tuple[int | None, int, tuple[Reject, ...], tuple[Reject, ...]]]:
    """(number of a pack or None, rows since the one before that came for the first time, rejects among these, other rejects); last the
    rest of the window."""
    first_R1 = np.concatenate([[0], np.cumsum(made.first_R)])
    met, rejects = 0, list(made.rejects)

    def since(upto: int, bad: Sequence[tuple[int, Reject]]) -> tuple[int, tuple[Reject, ...], tuple[Reject, ...]]:
        first, again = ([reject for n, reject in bad if made.first_R[n] == wanted] for wanted in (True, False))
        return int(first_R1[upto] - first_R1[met]), tuple(first), tuple(again)

    for pack, passed in [*enumerate(made.passed_K.tolist()), (None, len(made.first_R))]:
        here = 0
        while here < len(rejects) and rejects[here][0] < passed:
            here += 1
        bad, rejects = rejects[:here], rejects[here:]
        while len(bad) >= FIRST_VERDICT:
            some, bad = bad[:FIRST_VERDICT], bad[FIRST_VERDICT:]
            upto = some[-1][0] + 1
            yield None, *since(upto, some)
            met = upto
        yield pack, *since(passed, bad)
        met = passed


def _cost(bin: Sequence[Item], sizing: Sizing) -> tuple[int, int]:
    language = vision = 0
    for item in bin:
        of = [(sizing(source, shard), row) for source, shard, row in item.rows]
        language += sum(int(sized.language_R[row]) for sized, row in of)
        vision += max(int(sized.vision_R[row]) for sized, row in of)
    return language, vision


def _listed(lost: Lost) -> list[Any]:
    reject = lost.reject
    return [[reject.id, reject.file, reject.row, reject.field, reject.cause, reject.message], lost.epoch, list(lost.row)]


def _lost(listed: list[Any]) -> Lost:
    reject, epoch, (source, shard, number) = listed
    return Lost(Reject(*reject), epoch, (source, shard, number))


def _count_in(file: Path) -> int | None:
    """What was counted; None where there is nothing, or nothing sound."""
    try:
        count = read_json(file)
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise storage_failed("read", file, error) from error
    return count if isinstance(count, int) and count > 0 else None


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]
