"""Jobs of a folder here: their plans are in `job/NAME`, and they show their progress."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyeline.core.errors import Stopped, StorageFailed
from eyeline.core.files import sha256_of
from eyeline.offline.attempt import Job
from eyeline.offline.manifests import Manifest, missing_numbers
from eyeline.offline.plan import Draft, Partition, Plan, open_plan
from eyeline.offline.progress import progress
from eyeline.offline.report import JOBS
from eyeline.offline.run import Where, run
from eyeline.offline.store import LocalStore, refuse_unconditional


def open_job(
    folder: Path, job: str, identity: dict[str, Any], draft: Callable[[Path], Draft], now: Sequence[Partition] | None = None
) -> Plan:
    """The plan of a job in this folder, which is made if there is none."""
    store = LocalStore(folder / JOBS / job)
    refuse_unconditional(store, str(folder))
    return open_plan(store, str(folder), job, identity, draft, now)


def run_job(job: Job, plan: Plan, where: Where, folder: Path, damaged: set[int]) -> bool:
    """Do what is missing or damaged of this job's share. Return whether the plan is complete. Stopped by Ctrl-C."""
    left = len(damaged) + sum(where.has(number) for number in missing_numbers(plan))
    name = "metrics.jsonl" if where.shards == 1 else f"metrics-{where.shard}-of-{where.shards}.jsonl"
    try:
        with progress(job.name, left, folder / JOBS / name) as tell:
            return run(job, plan, where, tell, frozenset(damaged))
    except KeyboardInterrupt:
        done = len(plan) - sum(1 for _ in missing_numbers(plan))
        raise Stopped(f"stopped: {done:,} of {len(plan):,} partitions of {job.name} are done, and the same command does the rest") from None


def folder_of(plan: Plan) -> Path:
    assert isinstance(plan.store, LocalStore), "the job is in a folder here"
    return plan.store.folder


def output_path(plan: Plan, manifest: Manifest, name: str) -> Path:
    """Where an attempt wrote an output."""
    return folder_of(plan) / manifest.key(name)


def planned_file(plan: Plan, name: str) -> Path:
    """A file that was written with the plan. StorageFailed where it is not as it was written."""
    path = folder_of(plan) / plan.head.folder / name
    if not path.is_file() or sha256_of(path) != plan.head.files[name]:
        raise StorageFailed(f"{path} is missing or damaged. Restore it, or start again in another folder")
    return path
