"""The number of steps of some epochs, and of samples of each source."""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.files import make_folder, read_json, storage_failed, write_json
from eyeline.data.index_progress import index_all
from eyeline.data.loader import planned_windows
from eyeline.data.plan.blend import Side
from eyeline.data.reader import Reader, identity_of_plan, short_hash, sizing_of

COUNTED_SHARDS = 32  # of a source, at most, when its samples are counted


def count_steps(reader: Reader, budget: Budget, micro_batches: int, epochs: int) -> int:
    """The number of steps of some epochs. Every row is indexed for it, behind a bar when that takes long. The number is kept with
    the indexes, so that a run counts once however often it resumes."""
    kept = count_file(reader, budget, micro_batches, epochs)
    known = _count_in(kept) if kept is not None else None
    if known is not None:
        return known
    index_all(reader)
    packs = seen = rejected = 0
    for window in planned_windows(reader, sizing_of(reader, budget), epochs):
        packs += len(window.plan.packs)
        seen += int(window.plan.first_R.sum())
        rejected += sum(bool(window.plan.first_R[n]) for n, _ in window.plan.rejects)
        if window.epoch_ended and rejected == seen:
            raise Refused(f"no sample can be used: all {seen} were rejected. `eyeline check` says why")
    steps = -(-packs // micro_batches)
    if kept is not None:
        make_folder(kept.parent)
        write_json(kept, steps)
    return steps


def forget_step_count(reader: Reader, budget: Budget, micro_batches: int, epochs: int) -> None:
    """Count again the next time: images have changed, which no fingerprint tells."""
    kept = count_file(reader, budget, micro_batches, epochs)
    if kept is not None:
        kept.unlink(missing_ok=True)


def count_file(reader: Reader, budget: Budget, micro_batches: int, epochs: int) -> Path | None:
    """The file that keeps the number of steps."""
    folder = reader.training.index.folder
    return folder / "counts" / f"{short_hash([identity_of_plan(reader, budget), micro_batches, epochs])}.json" if folder else None


def _count_in(file: Path) -> int | None:
    """The number in the file; None if there is none, or none that is valid."""
    try:
        count = read_json(file)
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise storage_failed("read", file, error) from error
    return count if isinstance(count, int) and count > 0 else None


class Count(NamedTuple):
    """The number of samples of a source."""

    samples: int | None  # None: not known yet
    exact: bool


def sample_counts(side: Side) -> list[Count]:
    """The number of samples of each source on a side, as far as its indexes are made. Where some are not, the number follows from
    the bytes of those that are."""
    return [_count_of(side, source) for source in range(len(side.index.sources))]


def _count_of(side: Side, source: int) -> Count:
    index, shards = side.index, side.index.sources[source].shards
    whole = range(side.shards(source))
    there = (n for n in whole if index.shelf is not None or not index.absent(source, n))
    chosen = list(islice(there, COUNTED_SHARDS))
    found = sum(int(side.kept_rows(source, n).sum()) for n in chosen)
    if len(chosen) == len(whole):
        return Count(found, True)
    share = sum(shards[n].bytes for n in chosen) / max(sum(shards[n].bytes for n in whole), 1)
    return Count(round(found / share) if share else None, False)
