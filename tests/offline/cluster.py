"""A Ray cluster on this machine, whose actors find the code of this checkout and of its tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@contextmanager
def ray_here() -> Iterator[None]:
    """A cluster of two CPUs, and of what it takes for a GPU. The test is skipped where Ray is not installed."""
    ray = pytest.importorskip("ray")
    paths = f"{ROOT / 'src'}:{ROOT}:{Path(ray.__file__).parents[1]}"
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    )
    try:
        yield
    finally:
        ray.shutdown()
