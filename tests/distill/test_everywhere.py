"""A teacher in processes, in shares and on a Ray cluster: the same bytes, with a worker killed in each, and loaded once per worker."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyeline.data.text.templates import template_named
from eyeline.distill import job
from eyeline.distill.job import Student, Summary
from eyeline.distill.settings import Distill
from eyeline.offline.run import Where
from tests.forked import Forked
from tests.offline.alarmed import AlarmedTeacher
from tests.offline.cluster import ray_here

STUDENT = Student(template_named("plain"), 3, "cpu", 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_here():
        yield


def files_of(folder: Path) -> dict[str, str]:
    """The digest of each file that a reader sees."""
    there = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in ("job", "distilled.json")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in there}


def settings_of(home: Path) -> Distill:
    return Distill.model_validate(
        {
            "sources": [{"path": str(home / "data" / "data.json")}],
            "teacher": {"kind": "model", "path": str(home / "run")},
            "prompts": [str(home / "bare.jinja")],
            "max_new_tokens": 12,
            "n": 2,
            "accept": {"by": "any"},
            "filters": {"min_words": 0, "same_script": False, "max_repetition": 1.0},
            "partition_rows": 3,
        }
    )


@pytest.mark.parametrize("mode", ["workers", "shards", pytest.param("ray", marks=pytest.mark.slow)])
def test_every_mode_writes_the_same_with_a_worker_killed(
    request: pytest.FixtureRequest, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    settings, alarm, log = settings_of(home), tmp_path / "alarm", tmp_path / "log"
    whole = job.distill(settings, STUDENT, tmp_path / "whole", Where())
    assert isinstance(whole, Summary) and whole.rows > 3
    teacher_of = job.teacher_of
    monkeypatch.setattr(job, "teacher_of", lambda *some: AlarmedTeacher(teacher_of(*some), alarm, log))
    alarm.touch()
    out = tmp_path / "out"
    if mode == "shards":
        wheres = [Where(0, shard, 3) for shard in range(3)]
        for where in wheres:  # in processes of their own: one is killed
            Forked(lambda where=where: job.distill(settings, STUDENT, out, where)).wait()
    else:
        if mode == "ray":
            request.getfixturevalue("cluster")
        wheres = [Where(2, ray="local" if mode == "ray" else None)]
    found = [job.distill(settings, STUDENT, out, where) for where in wheres]
    assert not alarm.exists()
    assert files_of(out) == files_of(tmp_path / "whole")
    assert found[-1] is not None and found[-1].answers == whole.answers
    calls = Counter(line for line in log.read_text().splitlines())
    assert all(count == 1 for line, count in calls.items() if line.endswith("new"))  # loaded once per process
    assert sum(count for line, count in calls.items() if line.endswith("loaded")) > 0
