"""Plan, then fetch: the whole road from a recipe's `data` to batches. Read this file first.

    open_source          files -> rows                                    sources.py
    rounds, order_of     rows -> visits in an order                       plan.py, pure
    fitted               sizes of a visit; what cannot be used is rejected before it is planned
    pack                 visits -> packs within the budget                packing.py, pure
    Fetch                a pack -> documents -> Batch                     fetch.py, in workers if wanted

The plan never depends on who fetches it, so any number of workers gives the same steps, and the state is where the plan
stands: an epoch, a position, the open packs.
"""

import hashlib
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from torch.utils.data import DataLoader, Dataset

from eyeline.core.batch import Batch, Budget, Sample, Text
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.facts import ImageRule
from eyeline.core.settings import NotNegative, Positive, Settings, Share
from eyeline.data.documents import Measured, TooLong, fitted
from eyeline.data.fetch import Fetch, Fetched, Row, Visit
from eyeline.data.images import Augment, check_file, size_of
from eyeline.data.packing import Bins, copied, fullest, pack, place
from eyeline.data.plan import Rounds, order_of, rounds, unshuffled
from eyeline.data.rejects import FIRST_VERDICT, Reject, Rejects
from eyeline.data.sources import Rows, Source, open_source
from eyeline.data.tokenizer import Encoder

KEPT_PICTURE_BYTES = 256 << 20  # a set of pictures that is no larger, resized, is decoded once
PREFETCHED = 2  # packs ahead for each worker
VERSION = 1  # of the state


class Data(Settings):
    """What a stage learns from."""

    sources: tuple[Source, ...] = Field(min_length=1)
    share_images: Positive = 1  # rows of one picture that are packed together and share its encoding
    hold_out: Share = 0.0  # share of the pictures that is kept from training, to validate on; the same in every stage and run
    validation: tuple[Source, ...] = ()  # or sources of their own to validate on
    max_reject_rate: Share = 0.01
    too_long: TooLong = "reject"  # or shrink: keep as many of the first exchanges as fit
    augment: Augment = Augment()
    workers: NotNegative = 0  # processes that decode and tokenise; 0: this one. The batches are the same

    @model_validator(mode="after")
    def _one_validation(self) -> "Data":
        if self.hold_out and self.validation:
            raise ValueError("hold_out and validation both say what to validate on; give one of them")
        if any(source.repeat > 1 for source in self.validation):
            raise ValueError("repeat says how often an epoch visits a source, and validation looks at each sample once. Leave it out there")
        if self.hold_out == 1:
            raise ValueError("hold_out: 1 leaves nothing to learn from; it is the share of pictures kept for validation, such as 0.02")
        return self


@dataclass(frozen=True, eq=False)
class Opened:
    """Rows of all sources as one list."""

    sources: tuple[Rows, ...]
    places: tuple[tuple[int, int], ...]  # row -> (source, row of it)

    def sample(self, row: int) -> Sample:
        source, i = self.places[row]
        return self.sources[source].sample(i)

    def named(self, row: int) -> tuple[str, str, int]:
        """Id, file and row number in the file."""
        source, i = self.places[row]
        return (self.sources[source].id(i), *self.sources[source].place(i))

    def key(self, row: int) -> str | None:
        source, i = self.places[row]
        return self.sources[source].image_key(i)

    def repeat(self, row: int) -> int:
        return self.sources[self.places[row][0]].source.repeat


def opened(sources: Iterable[Source]) -> Opened:
    """All rows of the sources, in order."""
    rows = tuple(open_source(source) for source in sources)
    return Opened(rows, tuple((s, i) for s, r in enumerate(rows) for i in range(len(r))))


def held_out(all: Opened, row: int, share: float) -> bool:
    """Whether a row is kept for validation: when any of its pictures is drawn, so that training never sees one of those.

    The draw is a hash of the picture's path below its root (of the row's id for text), so it is the same wherever the data
    lies, whatever the seed, in every stage.
    """
    source, i = all.places[row]
    rows = all.sources[source]
    names = [key.removeprefix(str(rows.root)) for key in rows.shown[i]] or [rows.id(i)]
    return any(_drawn(name) < share for name in names)


def _drawn(name: str) -> float:
    """A number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(("held out" + name).encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


@dataclass(frozen=True, eq=False)
class Divided:
    """Which rows a stage learns from, and which it is judged by."""

    all: Opened
    training: list[int]  # rows of `all`
    judges: Opened
    judged: list[int]  # rows of `judges`


def divided(data: Data) -> Divided:
    """Open the sources and keep the held-out rows apart. Refused when nothing is left on a side that is asked for."""
    all = opened(data.sources)
    everything = range(len(all.places))
    held = [data.hold_out > 0 and held_out(all, row, data.hold_out) for row in everything]
    training = [row for row in everything if not held[row]]
    if not training and any(held):
        raise Refused(f"hold_out={data.hold_out} holds back all {len(held)} samples, and none is left to learn from. Lower it")
    if not training:
        raise Refused(
            "no sample is left to learn from: " + ", ".join(f"{r.path} has {len(r)} that the settings leave" for r in all.sources)
        )
    judges = opened(data.validation) if data.validation else all
    judged = list(range(len(judges.places))) if data.validation else [row for row in everything if held[row]]
    if data.hold_out and not judged:
        raise Refused(f"hold_out={data.hold_out} holds back nothing of {len(held)} samples. Raise it")
    return Divided(all, training, judges, judged)


def training_samples(data: Data) -> Iterator[Sample]:
    """Every sample that training visits, once, in the sources' order. Rows that cannot be used are passed over."""
    all = opened(data.sources)
    for row in range(len(all.places)):
        if data.hold_out and held_out(all, row, data.hold_out):
            continue
        try:
            yield all.sample(row)
        except BadSample:  # counted when it is read for training
            continue


def training_texts(data: Data) -> Iterator[str]:
    """Every text that training shows, for a tokenizer to be made from."""
    for sample in training_samples(data):
        yield from texts(sample)


def texts(sample: Sample) -> Iterator[str]:
    """The texts of a conversation in order."""
    return (part.text for message in sample.messages for part in message.parts if isinstance(part, Text))


@dataclass(frozen=True)
class Known:
    """What measuring a row found."""

    size: Measured
    messages: int  # how many of its messages are kept


@dataclass(frozen=True, eq=False)
class Measuring:
    """Sizes of rows under one budget. Each row is read, rendered and tokenised once for it."""

    all: Opened
    encoder: Encoder
    rule: ImageRule | None
    budget: Budget
    longest: int  # tokens that one document may have: those of the budget, or fewer if the model has fewer positions
    too_long: TooLong
    _known: dict[int, Known | Reject] = field(default_factory=dict, repr=False)

    def __call__(self, row: int) -> Known | Reject:
        known = self._known.get(row)
        if known is None:
            known = self._known[row] = self._measured(row)
        return known

    def _measured(self, row: int) -> Known | Reject:
        try:
            sample = self.all.sample(row)
            for picture in sample.pictures:
                check_file(picture)
            sizes = [size_of(medium, self.rule) for medium in sample.media] if self.rule else []
            kept, size = fitted(sample, sizes, self.longest, self.budget.patches, self.too_long, self.encoder, self.rule)
        except BadSample as bad:
            return Reject.of(*self.all.named(row), bad)
        return Known(size, len(kept.messages))

    def items(self, rows: list[int]) -> tuple[list[tuple[list[int], int, int]], list[Reject]]:
        """The usable rows of a visit as items (rows, tokens, patches): one, or more when together they are over the budget.

        Rows of a visit show the same pictures (or the first of them, where a row was shrunk), so an item has the patches of
        its largest row.
        """
        items: list[tuple[list[int], int, int]] = []
        rejects: list[Reject] = []
        for row in rows:
            known = self(row)
            if isinstance(known, Reject):
                rejects.append(known)
                continue
            tokens, patches = known.size.tokens, known.size.patches
            if items and items[-1][1] + tokens <= self.budget.tokens:
                before = items.pop()
                items.append(([*before[0], row], before[1] + tokens, max(before[2], patches)))
            else:
                items.append(([row], tokens, patches))
        return items, rejects

    def visit(self, epoch: int, number: int, rows: list[int]) -> Visit:
        """What a worker needs to make the documents of these rows."""
        out: list[Row] = []
        for row in rows:
            known = self(row)
            id, file, number_in_file = self.all.named(row)
            try:
                assert isinstance(known, Known), f"{id} was planned and is now unusable"
                sample = self.all.sample(row)
            except (BadSample, AssertionError) as changed:
                raise StorageFailed(f"{file} has changed since it was opened: {changed}. Restore it; a plan must not change") from changed
            out.append(Row(Sample(sample.id, sample.messages[: known.messages], sample.kind), file, number_in_file))
        return Visit(epoch, number, tuple(out))


@dataclass(frozen=True)
class Planned:
    """One pack, or none (`visits` empty): then only the rejects met on the way count. `state` stands right after it."""

    visits: tuple[Visit, ...]
    state: dict[str, Any]
    seen: int  # samples met since the last Planned
    rejects: tuple[Reject, ...]  # of these, the ones that were not planned
    epoch_ended: bool = False


class Reader:
    """The data of one stage. Opening it reads the indexes; no picture is opened."""

    def __init__(
        self, data: Data, encoder: Encoder, rule: ImageRule | None, seed: int, folder: Path | None = None, longest: int = 2**31 - 1
    ):
        """`seed` orders and augments. Rejects are written into `folder` when there is one. A document has at most `longest`
        tokens: the model's positions. Refused for unusable sources."""
        self.data, self.encoder, self.rule, self.seed, self.longest = data, encoder, rule, seed, longest
        self.rejects = Rejects(folder, data.max_reject_rate)
        rows = divided(data)
        self.all, self.training, self.judges, self.judged = rows.all, rows.training, rows.judges, rows.judged
        self._rounds = self._rounds_of(self.all, self.training, repeated=True)
        self._measuring: dict[tuple[bool, Budget], Measuring] = {}
        self._fetches: dict[tuple[Budget | None, Augment | None], Fetch] = {}

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.judged)

    def _rounds_of(self, all: Opened, rows: list[int], repeated: bool) -> Rounds:
        return rounds(rows, [all.key(row) for row in rows], [all.repeat(row) if repeated else 1 for row in rows], self.data.share_images)

    def measuring(self, budget: Budget, judges: bool = False) -> Measuring:
        """What measures the training rows, or the validation rows; it remembers, so there is one for each."""
        if (judges, budget) not in self._measuring:
            all = self.judges if judges else self.all
            self._measuring[judges, budget] = Measuring(
                all, self.encoder, self.rule, budget, min(budget.tokens, self.longest), self.data.too_long
            )
        return self._measuring[judges, budget]

    def _fetch(self, all: Opened, budget: Budget | None, augment: Augment | None) -> Fetch:
        if (budget, augment) not in self._fetches:
            pictures = {key for rows in all.sources for shown in rows.shown for key in shown}
            small = self.rule is not None and len(pictures) * 3 * self.rule.most_pixels <= KEPT_PICTURE_BYTES
            self._fetches[budget, augment] = Fetch(self.encoder, self.rule, budget, self.seed, augment, small)
        return self._fetches[budget, augment]

    # Training

    def steps(
        self, budget: Budget, micro_batches: int, epochs: int | None, state: dict[str, Any] | None = None
    ) -> Iterator[tuple[tuple[Batch, ...], dict[str, Any]]]:
        """Steps of `micro_batches` batches each, with the state that goes on right after them; endless unless `epochs` is given.

        With `epochs`, the last step may have fewer batches. Refused when `state` belongs to other data.
        Raises TooManyRejects in the step where the rate is exceeded.
        """
        self.rejects.restore(state["rejects"] if state else {"seen": 0, "counts": {}})
        plan = self._plan(budget, epochs, state)
        batches: list[Batch] = []
        for planned, fetched in fetched_in_order(plan, self._fetch(self.all, budget, self.data.augment), self.data.workers):
            self.rejects.seen += planned.seen
            for reject in (*planned.rejects, *fetched.rejects):
                self.rejects.add(reject)
            self.rejects.check(planned.epoch_ended)
            if fetched.batch is not None:
                batches.append(fetched.batch)
            elif planned.epoch_ended and self.rejects.seen == self.rejects.rejected:
                raise Refused(f"no sample can be used: all {self.rejects.seen} were rejected. `eyeline check` says why")
            last = epochs is not None and planned.state["epoch"] == epochs and not planned.state["bins"]
            if batches and (len(batches) == micro_batches or last):
                yield tuple(batches), planned.state | {"rejects": self.rejects.state()}
                batches = []

    def count_steps(self, budget: Budget, micro_batches: int, epochs: int) -> int:
        """How many steps so many epochs are. Every sample is measured for it."""
        measuring = self.measuring(budget)
        packs = sum(1 for items, *_ in self._packs(measuring, epochs, 0, 0, 0, []) if items)
        if not packs:
            raise Refused(f"no sample can be used: all {len(self.training)} were rejected. `eyeline check` says why")
        return -(-packs // micro_batches)

    def _plan(self, budget: Budget, epochs: int | None, state: dict[str, Any] | None) -> Iterator[Planned]:
        """Packs with everything that fetching them needs, each with the state that stands right after it."""
        identity = self._identity(budget)
        if state is not None and (state["version"], state["identity"]) != (VERSION, identity):
            raise Refused(
                f"the data position was saved for other data, settings or budgets (version {state['version']}, identity "
                f"{state['identity']}; here version {VERSION}, identity {identity}). Restore the data as it was, or begin a new run"
            )
        measuring = self.measuring(budget)
        begin = (state["epoch"], state["position"], state["offset"], state["bins"]) if state else (0, 0, 0, [])
        for items, (epoch, position, offset), bins, seen, rejects, ended in self._packs(measuring, epochs, *begin):
            visits = tuple(measuring.visit(*item) for item in items)
            now = {"version": VERSION, "identity": identity, "epoch": epoch, "position": position, "offset": offset, "bins": bins}
            yield Planned(visits, now, seen, rejects, ended)

    def _packs(
        self, measuring: Measuring, epochs: int | None, epoch: int, position: int, offset: int, bins: Bins
    ) -> Iterator[tuple[list[Any], tuple[int, int, int], Bins, int, tuple[Reject, ...], bool]]:
        """Yield (items of a pack, where the plan stands after it, open bins, samples seen, rejects, whether an epoch ended).

        Besides packs there is an empty one after each epoch and wherever many rejects came without one, so that a stream
        of bad samples is noticed. An item is [epoch, number of the visit, its rows]; `offset` counts the items of a visit
        that are done, for visits that are several.
        """
        budget = measuring.budget
        bins = copied(bins)
        seen, rejects = 0, []
        while epochs is None or epoch < epochs:
            order = order_of(self._rounds, self.seed, epoch)
            while position < len(order):
                rows = order.rows(position)
                items, bad = measuring.items(rows)
                if offset == 0:
                    seen, rejects = seen + len(rows), rejects + bad
                for n in range(offset, len(items)):
                    done = place(bins, [epoch, position, items[n][0]], items[n][1], items[n][2], budget)
                    if done is not None:
                        after = (epoch, position + 1, 0) if n + 1 == len(items) else (epoch, position, n + 1)
                        yield done, after, copied(bins), seen, tuple(rejects), False
                        seen, rejects = 0, []
                position, offset = position + 1, 0
                if len(rejects) >= FIRST_VERDICT:
                    yield [], (epoch, position, 0), copied(bins), seen, tuple(rejects), False
                    seen, rejects = 0, []
            epoch, position = epoch + 1, 0
            yield [], (epoch, 0, 0), copied(bins), seen, tuple(rejects), True
            seen, rejects = 0, []
        while bins:
            done = fullest(bins, budget)
            yield done, (epoch, 0, 0), copied(bins), 0, (), False

    def _identity(self, budget: Budget) -> str:
        """A hash of all that the plan depends on, except files of pictures."""
        data = self.data
        said = [[rows.fingerprint for rows in self.all.sources], data.share_images, data.hold_out, data.too_long, self.seed]
        said += [budget.tokens, budget.patches, self.longest, self.encoder.identity, repr(self.rule)]
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]

    # Validation

    def validation(self, budget: Budget) -> Iterator[Batch]:
        """Every usable validation sample once, in the same order each time, as it is: no augmentation, no padding."""
        measuring = self.measuring(budget, judges=True)
        fetch = self._fetch(self.judges, None, None)
        order = unshuffled(self._rounds_of(self.judges, self.judged, repeated=False))
        bad: list[Reject] = []

        def items() -> Iterator[tuple[list[Any], int, int]]:
            for number in range(len(order)):
                found, rejects = measuring.items(order.rows(number))
                bad.extend(rejects)
                yield from (([0, number, rows], tokens, patches) for rows, tokens, patches in found)

        usable = False
        for packed, _ in pack(items(), budget):
            fetched = fetch([measuring.visit(*item) for item in packed])
            bad += fetched.rejects
            if fetched.batch is not None and fetched.batch.counts.supervised:
                usable = True
                yield fetched.batch
        for reject in bad:
            self.rejects.note(reject)
        if self.judged and not usable:
            raise Refused(f"no validation sample can be used: all {len(self.judged)} were rejected. `eyeline check` says why")


def fetched_in_order(plan: Iterator[Planned], fetch: Fetch, workers: int) -> Iterator[tuple[Planned, Fetched]]:
    """Each planned pack and what came of it, in the plan's order. With workers, some packs are fetched ahead of their turn."""
    if workers == 0:
        for planned in plan:
            yield planned, fetch(planned.visits)
        return
    waiting: deque[Planned] = deque()

    def ahead() -> Iterator[tuple[Visit, ...]]:
        for planned in plan:
            waiting.append(planned)
            yield planned.visits

    loader = DataLoader(
        _Asked(fetch),
        batch_size=None,
        sampler=_Once(ahead()),
        num_workers=workers,
        prefetch_factor=PREFETCHED,
        multiprocessing_context="spawn",  # a fork would copy threads of torch and tokenizers in mid-flight
        worker_init_fn=partial(_end_without, os.getpid()),
    )
    for fetched in _started(loader):
        if isinstance(fetched, StorageFailed):
            raise fetched
        yield waiting.popleft(), fetched


class _Asked(Dataset[Fetched | StorageFailed]):
    """A map-style data set for torch's DataLoader whose index is the pack itself."""

    def __init__(self, fetch: Fetch):
        self.fetch = fetch

    def __getitem__(self, visits: tuple[Visit, ...]) -> Fetched | StorageFailed:
        try:
            return self.fetch(visits)
        except StorageFailed as error:  # raised by a worker, it would arrive as a traceback in a string
            return error


@dataclass(frozen=True)
class _Once:
    """A sampler for torch's DataLoader."""

    indices: Iterator[tuple[Visit, ...]]

    def __iter__(self) -> Iterator[tuple[Visit, ...]]:
        return self.indices


def _end_without(parent: int, _: int) -> None:
    """End this worker if the process that started it was killed meanwhile: torch takes whoever is the parent now for the main one."""
    if os.getppid() != parent:
        os._exit(0)


def _started(loader: DataLoader) -> Iterator[Fetched | StorageFailed]:
    """The loader's items. Its workers are deaf to SIGINT and SIGTERM from their first moment.

    Ctrl-C reaches every process of a terminal, and schedulers send SIGTERM to every process of a job; the main one ends the run
    in order, and its workers with it. They inherit what is blocked here; the main one has what came meanwhile right after.
    """
    resource_tracker.ensure_running()  # it unblocks both signals when it starts, which would be after the first worker's semaphores
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
