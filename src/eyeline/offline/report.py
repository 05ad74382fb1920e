"""What a job has done, read from its manifests; and the files in it that no manifest counts."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from eyeline.core import words
from eyeline.core.errors import Refused
from eyeline.offline.manifests import garbage, manifests, quarantined_numbers
from eyeline.offline.plan import Plan, existing_plan
from eyeline.offline.store import LocalStore

JOBS = "job"  # the folder of a folder's jobs
SLOW = 3  # times the median: a straggler
NAMED = 5  # partitions in a line


def plans_in(folder: Path) -> Iterator[Plan]:
    """The plans of a folder's jobs. Refused where there is none."""
    found = [existing_plan(LocalStore(path)) for path in sorted((folder / JOBS).glob("*")) if path.is_dir()]
    plans = [plan for plan in found if plan is not None]
    if not plans:
        raise Refused(f"{folder} holds no job. Give a folder that `eyeline prepare` or `eyeline distill` wrote, or is writing")
    yield from plans


def report_jobs(folder: Path) -> str:
    """Lines about each job of a folder."""
    return "\n".join(report_of(plan) for plan in plans_in(folder))


def report_of(plan: Plan) -> str:
    """Counts, rates, drops and stragglers of a job, in words."""
    seconds: dict[int, float] = {}
    dropped = Counter[str]()
    workers, rows, size = set[str](), 0, 0
    for one in manifests(plan):
        seconds[one.number] = one.seconds
        dropped.update(one.counts)
        workers.add(one.worker)
        rows += one.rows
        size += sum(output.bytes for output in one.outputs)
    counted = rows + dropped.total()  # none where the job's input is not rows
    kept = f"{rows:,} rows, " if counted else ""
    lines = [f"{plan.head.job}: {len(seconds):,} of {len(plan):,} partitions are done: {kept}{size:,} bytes"]
    if seconds:
        spent, ordered = sum(seconds.values()), sorted(seconds.values())
        median, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        rate = f"{counted / max(spent, 1e-9):,.0f} rows/s per worker, " if counted else ""
        lines.append(f"  {rate}{words.counted(len(workers), 'worker')}; a partition takes {median:.2f} s (median), {p99:.2f} s (p99)")
        slow = sorted((number for number, taken in seconds.items() if taken > SLOW * median), key=lambda number: -seconds[number])
        if slow:
            lines.append(f"  slower than {SLOW} × the median: {_listed([f'{number} ({seconds[number]:.2f} s)' for number in slow])}")
    if dropped:
        lines.append(f"  dropped: {', '.join(f'{count:,} {cause}' for cause, count in dropped.most_common())}")
    given_up = quarantined_numbers(plan.store)
    if given_up:
        lines.append(f"  given up: {_listed([f'{number} ({why.strip().splitlines()[-1]})' for number, why in given_up.items()])}")
    lost = list(garbage(plan))
    if lost:
        lines.append(f"  files of lost attempts: {len(lost):,}, {sum(bytes for _, bytes in lost):,} bytes. `--clean` deletes them")
    return "\n".join(lines)


def _listed(some: list[str]) -> str:
    return ", ".join(some[:NAMED]) + (f" and {len(some) - NAMED:,} more" if len(some) > NAMED else "")


def clean_jobs(folder: Path) -> str:
    """Delete files of lost attempts, and name them."""
    lines, size = [], 0
    for plan in plans_in(folder):
        for key, bytes in garbage(plan):
            plan.store.remove(key)
            lines.append(f"deleted {plan.head.job}: {key} ({bytes:,} bytes)")
            size += bytes
    return "\n".join([*lines, f"{len(lines):,} files of lost attempts were deleted, {size:,} bytes"])
