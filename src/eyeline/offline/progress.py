"""How far a job is: a bar or lines on the screen, and a line of metrics.jsonl for each partition."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from eyeline.core.files import append_line
from eyeline.core.log import say
from eyeline.core.words import duration
from eyeline.offline.attempt import Outcome

QUIET_S = 30.0  # between two lines, where there is no terminal


@contextmanager
def progress(what: str, partitions: int, metrics: Path) -> Iterator[Callable[[Outcome], None]]:
    """Return a function that takes every attempt that ends: it shows progress, and appends to `metrics`."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    start = shown_at = time.monotonic()
    done, rows = 0, 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=partitions)

        def tell(outcome: Outcome) -> None:
            nonlocal done, rows, shown_at
            manifest, now = outcome.manifest, time.monotonic()
            kept, dropped = manifest.rows, sum(manifest.counts.values())
            done, rows = done + 1, rows + kept + dropped
            append_line(
                metrics,
                {
                    "kind": "partition",
                    "job": what,
                    "number": manifest.number,
                    "how": outcome.how,
                    "rows": kept,
                    "dropped": dropped,
                    "bytes": sum(one.bytes for one in manifest.outputs),
                    "seconds": round(outcome.seconds, 3),
                    "worker": manifest.worker,
                    "elapsed_s": round(now - start, 3),
                },
            )
            rate = f", {rows / max(now - start, 1e-9):,.0f} rows/s" if rows else ""
            bar.update(task, completed=done, description=f"{what}{rate}")
            if not console.is_terminal and now - shown_at >= QUIET_S:
                shown_at = now
                left = duration((now - start) / done * max(partitions - done, 0))
                say(f"{what}: {done:,} of {partitions:,} partitions{rate}, ETA {left}")

        yield tell
