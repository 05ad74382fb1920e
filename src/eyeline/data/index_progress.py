"""Making indexes before they are needed, with a bar or messages where that takes long."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from eyeline.core.batch import Budget
from eyeline.data.loader import entries_of, start_of
from eyeline.data.plan.index import Entry, Index, make_each
from eyeline.data.reader import Reader, changes, refuse_changes, training_pools

PATIENCE = 2.0  # seconds of indexing before a bar appears


def index_all(reader: Reader) -> None:
    """Make all indexes of training rows that are not there yet."""
    make_indexes(reader, reader.training.index, sorted({entry for pool in training_pools(reader) for entry in pool.entries}))


def index_first(reader: Reader, budget: Budget, state: dict[str, Any] | None) -> None:
    """Make the indexes that the next step needs, at the start or after `state`. Refused when that belongs to other data."""
    if state is not None:
        refuse_changes(changes(reader, budget, state))
    cursors = start_of(reader, state).cursors
    make_indexes(reader, reader.training.index, sorted(set(entries_of(training_pools(reader), cursors))))


def make_indexes(reader: Reader, index: Index, shards: Sequence[Entry]) -> None:
    """Make those of these shards that are not there yet: with a bar when that takes long, or with messages to the reader's `notify`."""
    start, bar, notified = time.monotonic(), None, False
    console = Console(stderr=True)
    absent = [entry for entry in shards if index.absent(*entry)] if index.is_shared else []
    try:
        for done, _ in enumerate(make_each(index, absent, reader.data.fetching), 1):
            if time.monotonic() - start < PATIENCE:
                continue
            if reader.notify is not None:
                reader.notify(f"indexing data: {done:,} of {len(absent):,} shards")
                notified = True
            elif bar is None and console.is_terminal:
                bar = Progress(console=console, transient=True)
                bar.start()
                bar.add_task("indexing", total=len(absent))
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
    finally:
        if bar is not None:
            bar.stop()
        if reader.notify is not None and notified:
            reader.notify("")
