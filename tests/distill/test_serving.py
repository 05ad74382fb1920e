"""`eyeline distill` against a real server, `transformers serve`, with a tiny vision-language checkpoint: the answers of the same folder in
this process, from several servers, one of which is killed."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.exporting import export
from eyeline.bundle.fill import load
from eyeline.recipes.read import run_of
from eyeline.train.loop import train
from tests.bundle.tiny import imported
from tests.command import Command, Done
from tests.distill.conftest import BARE
from tests.distill.recipe import recipe_with, rejects_of, rows_of, server, write_recipe
from tests.distill.serving import Served, served
from tests.train.recipe import tiny_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SigLIP and a Qwen2.5 as the hub has them, made by transformers, joined and trained until they name colours and stop."""
    folder = tmp_path_factory.mktemp("teacher")
    imported(folder, "llava")
    recipe = tiny_recipe(folder)
    stage = recipe["stages"][0] | {"steps": 60, "batch": {"max_tokens": 400, "max_patches": 400, "packs_per_step": 1}}
    stage["data"] = {"sources": stage["data"]["sources"]}
    train(run_of(recipe | {"model": {"path": str(folder / "model")}, "stages": [stage]}, "recipe"))
    return folder


@pytest.fixture(scope="module")
def exported(teacher: Path) -> Path:
    found = open_bundle(teacher / "run")
    export(found.bundle, load(found, "cpu").model, teacher / "exported")
    return teacher / "exported"


@pytest.fixture(scope="module")
def servers(exported: Path) -> Iterator[list[Served]]:
    with served(exported, 2) as found:
        yield found


def recipe_for(folder: Path, teacher: dict[str, Any], **distill: Any) -> Path:
    (folder / "bare.jinja").write_text(BARE)
    settings = {"prompts": ["bare.jinja"], "temperature": 0, "max_new_tokens": 24, "accept": {"by": "any"}}
    settings |= {"filters": {"min_words": 0, "same_script": False, "max_repetition": 1.0}} | distill
    return write_recipe(folder, recipe_with(folder, teacher, **settings))


def asked(eyeline: Command, folder: Path, teacher: dict[str, Any], **distill: Any) -> tuple[Done, Path]:
    folder.mkdir()
    done = eyeline("distill", str(recipe_for(folder, teacher, **distill)), "--out", str(folder / "out"))
    return done, folder / "out"


def what_was_said(out: Path) -> list[tuple[Any, ...]]:
    """Questions and answers of all rows, kept or not."""
    kept = [(row["id"], row["messages"], row["distilled"]["finish"], row["distilled"]["tokens"]["prompt"]) for row in rows_of(out)]
    return kept + [(row["sample"], row["text"], row["finish"], row["tokens"]["prompt"]) for row in rejects_of(out)]


def test_greedy_answers_are_those_of_the_model_in_this_process(
    eyeline: Command, exported: Path, servers: list[Served], tmp_path: Path
) -> None:
    done, here = asked(eyeline, tmp_path / "here", {"kind": "model", "path": str(exported)})
    assert done.code == 0, done.err
    assert len(rows_of(here)) > 5
    before = [one.asked for one in servers]
    done, there = asked(eyeline, tmp_path / "there", server(*[one.url for one in servers], model=str(exported), timeout=60.0))
    assert done.code == 0, done.err
    assert what_was_said(there) == what_was_said(here)
    assert all(one.asked - count >= 2 for one, count in zip(servers, before, strict=True))  # both were asked


def test_several_answers_differ_where_the_server_is_told_to_sample(
    eyeline: Command, exported: Path, servers: list[Served], tmp_path: Path
) -> None:
    """`transformers serve` samples only where the model's own generation settings say so, whatever the temperature of a request."""
    sampling = json.dumps({"do_sample": True, "max_new_tokens": 24, "temperature": 5.0, "eos_token_id": 2})
    teacher = server(servers[0].url, model=str(exported), timeout=60.0, concurrency=1)
    for extra, different in (({}, False), ({"generation_config": sampling}, True)):
        more = {"temperature": 5.0, "n": 3, "keep": 3, "sources": [{"path": str(tmp_path / "data" / "data.json"), "limit": 2}]}
        tiny_recipe(tmp_path)
        done, out = asked(eyeline, tmp_path / f"out-{different}", teacher | {"extra": extra}, **more)
        assert done.code == 0, done.err
        said = [row["messages"][-1]["content"] for row in rows_of(out)] + [row["text"] for row in rejects_of(out)]
        assert len(said) == 6 and (len(set(said)) > 2) == different


def test_wrong_names_and_fields_are_told_in_the_server_s_words(
    eyeline: Command, exported: Path, servers: list[Served], tmp_path: Path
) -> None:
    teacher = server(servers[0].url, model="Qwen/Qwen3-VL-2B-Instruct", timeout=60.0)
    done, _ = asked(eyeline, tmp_path / "name", teacher)
    assert done.code == 2
    assert "HTTP 400: Server is pinned to" in done.err and "requested 'Qwen/Qwen3-VL-2B-Instruct'" in done.err, done.err
    done, _ = asked(eyeline, tmp_path / "field", teacher | {"model": str(exported), "extra": {"repetition_penalty": 1.1}})
    assert done.code == 2
    assert "HTTP 422: Unexpected fields in the request: {'repetition_penalty'}" in done.err, done.err


def test_a_server_that_is_killed_costs_no_answer(eyeline: Command, exported: Path, servers: list[Served], tmp_path: Path) -> None:
    more = {"sources": [{"path": str(exported.parent / "data" / "data.json")}], "partition_rows": 2}
    done, here = asked(eyeline, tmp_path / "here", {"kind": "model", "path": str(exported)}, **more)
    assert done.code == 0, done.err

    def kill_one() -> None:
        while not list((tmp_path / "there" / "out" / "job").rglob("done/*/*.json")):
            time.sleep(0.01)
        servers[1].process.kill()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    teacher = server(*[one.url for one in servers], model=str(exported), timeout=60.0, concurrency=2)
    done, there = asked(eyeline, tmp_path / "there", teacher, **more)
    killer.join(10)
    assert done.code == 0, done.err
    assert servers[1].process.poll() is not None and not servers[1].answers()
    assert what_was_said(there) == what_was_said(here)
    summary = json.loads((there / "distilled.json").read_text())
    assert summary["samples"] == 24 and summary["unmeasured"] == 0
