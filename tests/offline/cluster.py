"""A Ray cluster on this machine, whose actors find the code of this checkout and of its tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eyeline.offline.attempt import Done
from eyeline.offline.plan import Partition
from tests.offline.rows_job import work

ROOT = Path(__file__).parents[2]


@contextmanager
def ray_here() -> Iterator[None]:
    """A cluster of two CPUs, and of what it takes for a GPU. The test is skipped where Ray is not installed."""
    ray = pytest.importorskip("ray")
    paths = f"{ROOT / 'src'}:{ROOT}:{Path(ray.__file__).parents[1]}"
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    try:
        yield
    finally:
        ray.shutdown()


def asked_for(partition: Partition, folder: Path) -> Done:
    """Work of rows that also says what its actor asked for."""
    import ray

    found = work(partition, folder)
    (folder / "asked.txt").write_text(repr(sorted(ray.get_runtime_context().get_assigned_resources().items())))
    return found
