"""Workers and commands that are killed: every sample in one row or one reject, and what is committed is not asked again."""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eyeline.distill import job
from eyeline.distill.http import Servers
from eyeline.offline.store import LocalStore
from tests.command import Command
from tests.distill.recipe import question_in, recipe_with, rejects_of, right, rows_of, server, write_recipe
from tests.distill.scripted import Scripted, scripted
from tests.forked import forked_command
from tests.processes import children

ROWS, SIZE = 5, 2  # samples, and of a partition
BORDERS: list[tuple[Any, str]] = [
    *((LocalStore, name) for name in ("create", "put")),
    *((job, name) for name in ("_joined", "write_json")),
    (Servers, "post"),
]


def killed_at(number: int) -> Callable[[], None]:
    """In a process of its own: it is killed right before it does a thing for the n-th time. Things are those of BORDERS."""
    count = [0]

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **named)

        return inner

    def arm() -> None:
        for owner, name in BORDERS:
            setattr(owner, name, wrapped(getattr(owner, name)))

    return arm


def tiny(folder: Path, script: Scripted, rows: int) -> Path:
    """A recipe whose samples all have questions of their own."""
    recipe = recipe_with(folder, server(script.url, concurrency=2), partition_rows=SIZE)
    data = folder / "data" / "own.json"
    data.write_text(json.dumps([{"question": f"what is number {n}?", "answer": str(n)} for n in range(rows)]))
    recipe["distill"]["sources"] = [{"path": str(data)}]
    recipe["distill"]["accept"] = {"by": "any"}
    return write_recipe(folder, recipe)


def number_in(body: dict[str, Any]) -> int:
    return int(question_in(body).split("number ")[1].split("?")[0])


def say(body: dict[str, Any]) -> str:
    number = number_in(body)
    return right(body) if number % 3 else "I do not want to answer that."


def assert_each_once(folder: Path, rows: int) -> None:
    names = [row["distilled"]["sample"] for row in rows_of(folder)] + [row["sample"] for row in rejects_of(folder)]
    assert sorted(names) == sorted(f"own.json#{n}" for n in range(rows))
    about = json.loads((folder / "distilled.json").read_text())
    assert about["samples"] == rows == about["kept_samples"] + sum(about["dropped"].values())


def committed(folder: Path) -> set[int]:
    """The samples of committed partitions."""
    numbers = [int(path.stem) for path in (folder / "job" / "distill" / "done").rglob("*.json")]
    return {row for number in numbers for row in range(number * SIZE, min((number + 1) * SIZE, ROWS))}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_command_that_is_killed_at_any_border_is_resumed(eyeline: Command, tmp_path: Path, every: int) -> None:
    with scripted(say) as script:
        path = tiny(tmp_path, script, ROWS)
        for number in range(3, 100, every):
            out = tmp_path / f"out-{number}"
            script.asked.clear()
            with open(tmp_path / "output.txt", "wb") as file:
                child = forked_command("distill", str(path), "--out", str(out), stdout=file.fileno(), before=killed_at(number))
                code = child.wait(60)
            if code == 0:
                break
            assert code == -signal.SIGKILL, (tmp_path / "output.txt").read_text()
            before, safe = Counter(map(number_in, script.asked)), committed(out)
            done = eyeline("distill", str(path), "--out", str(out))
            assert done.code == 0, done.err
            after = Counter(map(number_in, script.asked))
            assert {n: after[n] - before[n] for n in range(ROWS)} == {n: int(n not in safe) for n in range(ROWS)}
            assert_each_once(out, ROWS)
        assert 20 < number < 60
        assert_each_once(out, ROWS)


@pytest.mark.parametrize("moments", [(2,), (3, 7)])
def test_workers_that_are_killed_cost_their_own_partition_alone(eyeline: Command, tmp_path: Path, moments: tuple[int, ...]) -> None:
    rows, killed = 12, list[int]()

    def kill_one(body: dict[str, Any]) -> str:
        if len(script.asked) in moments and len(killed) < len(moments):
            for pid in sorted(children())[:1]:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
        return say(body)

    with scripted(kill_one) as script:
        path = tiny(tmp_path, script, rows)
        with suppress(ProcessLookupError):
            done = eyeline("distill", str(path), "--out", str(tmp_path / "out"), "--workers", "2")
        assert done.code == 0, done.err
        asked = Counter(map(number_in, script.asked))
    assert killed
    assert set(asked) == set(range(rows)) and asked.total() <= rows + len(killed) * SIZE
    assert_each_once(tmp_path / "out", rows)
