"""The same bytes from actors of a Ray cluster, one of which is killed; it is started here, which takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eyeline.core.errors import Quarantined, Refused, StorageFailed
from eyeline.offline.attempt import Job
from eyeline.offline.manifests import quarantined_numbers
from eyeline.offline.run import Where, run
from eyeline.offline.store import LocalStore
from tests.offline.fake_store import FakeStore
from tests.offline.rows_job import JOB, Crash, assert_every_row_once, plan_of, visible

ROOT = Path(__file__).parents[2]


def test_ray_that_is_not_installed_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(Refused, match=r"pip install 'eyeline\[ray\]'"):
        run(JOB, plan_of(FakeStore(), 2), Where(ray="local"), lambda _: None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    paths = f"{ROOT / 'src'}:{ROOT}:{Path(ray.__file__).parents[1]}"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield
    ray.shutdown()


@pytest.mark.slow
def test_actors_write_the_same_with_one_killed(cluster: None, tmp_path: Path) -> None:
    alarm = tmp_path / "alarm"
    alarm.touch()
    plan, wanted = plan_of(LocalStore(tmp_path / "job"), 12), plan_of(FakeStore(), 12)
    run(JOB, wanted, Where(), lambda _: None)
    assert run(Job("rows", Crash((7,), alarm)), plan, Where(ray="local"), lambda _: None)
    assert not alarm.exists()
    assert visible(plan) == visible(wanted)
    assert_every_row_once(plan)


@pytest.mark.slow
def test_what_kills_every_actor_is_given_up_and_expected_failures_are_raised(cluster: None, tmp_path: Path) -> None:
    plan = plan_of(LocalStore(tmp_path / "killed"), 4)
    with pytest.raises(Quarantined, match="1 of 4 partitions were given up"):
        run(Job("rows", Crash((2,))), plan, Where(2, ray="local"), lambda _: None)
    assert list(quarantined_numbers(plan.store)) == [2]
    with pytest.raises(StorageFailed, match="the disk is on fire"):
        run(
            Job("rows", Crash((2,), error=StorageFailed)),
            plan_of(LocalStore(tmp_path / "failed"), 4),
            Where(2, ray="local"),
            lambda _: None,
        )
