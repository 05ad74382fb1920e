"""The same bytes from actors of a Ray cluster, one of which is killed; it is started here, which takes seconds."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyeline.bundle.two_towers import open_two_towers
from eyeline.core.errors import Quarantined, Refused, StorageFailed
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder
from eyeline.offline.attempt import Done, Job
from eyeline.offline.manifests import quarantined_numbers
from eyeline.offline.plan import Partition
from eyeline.offline.run import Where, run
from eyeline.offline.signals import write_signals
from eyeline.offline.store import LocalStore
from tests.bundle.tiny import tokenizer
from tests.bundle.towers import save_towers
from tests.command import Command
from tests.offline.alarmed import AlarmedTowers
from tests.offline.cluster import asked_for, ray_here
from tests.offline.fake_store import FakeStore
from tests.offline.rows_job import JOB, Crash, assert_every_row_once, plan_of, visible
from tests.offline.signal_files import files_of
from tests.train.recipe import tiny_recipe


def test_ray_that_is_not_installed_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(Refused, match=r"pip install 'eyeline\[ray\]'"):
        run(JOB, plan_of(FakeStore(), 2), Where(ray="local"), lambda _: None)


def test_ray_is_asked_for_before_anything_is_written(eyeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    (tmp_path / "tiny.yaml").write_text(json.dumps(tiny_recipe(tmp_path)))
    done = eyeline("prepare", "tiny.yaml", "--stage", "0", "--out", "out", "--ray", "local")
    assert done.code == 2 and "pip install 'eyeline[ray]'" in done.err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_here():
        yield


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


@pytest.mark.slow
def test_actors_of_accelerated_work_have_a_gpu_each(cluster: None, tmp_path: Path) -> None:
    for accelerated, wanted in ((True, {"[('CPU', 1.0), ('GPU', 1.0)]"}), (False, {"[('CPU', 1.0)]"})):
        plan = plan_of(LocalStore(tmp_path / str(accelerated)), 4)
        assert run(Job("rows", asked_for, accelerated=accelerated), plan, Where(ray="local"), lambda _: None)
        assert {data.decode() for name, data in visible(plan).items() if name.endswith("asked.txt")} == wanted


@pytest.mark.slow
def test_signals_from_actors_are_the_same_with_one_killed(cluster: None, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    rows = open_source(Source(path=recipe["stages"][0]["data"]["sources"][0]["path"]))
    towers = open_two_towers(save_towers(tmp_path / "towers"), "cpu", None)
    encoder, alarm = Encoder(tokenizer(TEMPLATES["plain"]), TEMPLATES["plain"]), tmp_path / "alarm"
    assert write_signals([rows], encoder, None, tmp_path / "one", Where(), towers) is not None
    alarm.touch()
    assert write_signals([rows], encoder, None, tmp_path / "two", Where(2, ray="local"), AlarmedTowers(towers, alarm)) is not None
    assert not alarm.exists()
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


@pytest.mark.slow
def test_commands_on_ray_write_the_same(cluster: None, eyeline: Command, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(tiny_recipe(tmp_path)))
    for more in ((), ("--signals",)):
        for name, how in (("here", ()), ("there", ("--ray", "local"))):
            done = eyeline("prepare", "tiny.yaml", "--stage", "0", "--out", f"{name}{len(more)}", *how, *more)
            assert done.code == 0, done.err
        assert contents_of(tmp_path / f"here{len(more)}") == contents_of(tmp_path / f"there{len(more)}")


class NotThere:
    """Work that no actor can load."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return importlib.import_module, ("no_such_module_on_the_nodes",)

    def __call__(self, partition: Partition, folder: Path) -> Done:
        raise AssertionError


@pytest.mark.slow
def test_nodes_that_lack_something_are_told_at_once(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(LocalStore(tmp_path / "job"), 4)
    with pytest.raises(Refused, match=r"an actor could not be started: .*no_such_module_on_the_nodes"):
        run(Job("rows", NotThere()), plan, Where(2, ray="local"), lambda _: None)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setattr("eyeline.offline.on_ray.os.getcwd", lambda: str(gone / "not"))
    with pytest.raises(Refused, match=r"gone/not, where the command was started, is not on .*No such file"):
        run(JOB, plan, Where(2, ray="local"), lambda _: None)
    assert not quarantined_numbers(plan.store)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "job" not in p.relative_to(folder).parts
    }
