"""`eyeline distill` from a recipe: what is asked, what is kept and stored, and that a folder is a source as it stands."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Message, Text
from eyeline.core.errors import RunLocked
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.templates import template_named
from eyeline.distill.job import Student, distill
from eyeline.offline.attempt import Job, attempt
from eyeline.offline.plan import Plan
from eyeline.offline.run import Where
from eyeline.recipes.read import run_of
from eyeline.train.loop import train
from eyeline.train.stop import sole_owner
from tests.command import Command
from tests.distill.recipe import REASON, colour_in, question_in, recipe_with, rejects_of, right, rows_of, server, write_recipe
from tests.distill.scripted import completion, scripted, status


def texts_of(message: Message) -> tuple[str, list[str | None]]:
    return message.role, [part.text if isinstance(part, Text) else None for part in message.parts]


def test_what_is_kept_is_a_source_that_trains(eyeline: Command, tmp_path: Path) -> None:
    with scripted(right) as script:
        recipe = recipe_with(tmp_path, server(script.url, key_env="TEACHER_KEY"), temperature=0.5)
        path = write_recipe(tmp_path, recipe)
        eyeline.monkeypatch.setenv("TEACHER_KEY", "sk-canary")
        done = eyeline("distill", str(path), "--out", "distilled")
    assert done.code == 0, done.err
    out = tmp_path / "distilled"
    kept, rejected = rows_of(out), rejects_of(out)
    assert len(script.asked) == 10
    assert len({body["seed"] for body in script.asked}) == 10
    assert all(colour_in(body) for body in script.asked if "which colour" in question_in(body))
    causes = [row["cause"] for row in rejected]
    assert len(kept) + len(rejected) == 10 and set(causes) == {"wrong"}
    assert {row["distilled"]["sample"] for row in kept} | {row["sample"] for row in rejected} == {f"data.json#{n}" for n in range(10)}
    first = kept[0]
    assert first["distilled"] | {"seed": 0} == {
        "sample": "data.json#0",
        "prompt": "chain-of-thought",
        "n": 0,
        "seed": 0,
        "finish": "stop",
        "tokens": {"prompt": 100, "answer": 20},
        "rationale": REASON,
        "answer": "It is red.",
        "teacher": "tiny-teacher",
        "settings": {"temperature": 0.5, "top_p": 1.0, "max_new_tokens": 1024},
    }
    assert first["messages"][-1]["content"] == f"{REASON}\n\nAnswer: it is red"  # as the sample has it
    rows = open_source(Source(path=str(out)))
    samples = [found for _, _, found in rows.kept_rows()]
    originals = open_source(Source(path=str(tmp_path / "data" / "data.json")))
    asked = {originals.id(place): found for place, _, found in originals.kept_rows()}
    for row, sample in zip(kept, samples, strict=True):
        before = asked[row["distilled"]["sample"]]
        assert [texts_of(m) for m in sample.messages[:-1]] == [texts_of(m) for m in before.messages[:-1]]
        assert [Path(str(i.source)).read_bytes() for i in sample.images] == [Path(str(i.source)).read_bytes() for i in before.images]
        assert sample.kind == before.kind
    everything = b"".join(p.read_bytes() for p in out.rglob("*") if p.is_file())
    assert b"sk-canary" not in everything and "sk-canary" not in done.out + done.err
    assert "To train on it: a source with path: distilled" in done.out
    stage = recipe["stages"][0] | {"data": {"sources": [{"path": str(out)}]}, "steps": 1}
    train(run_of(recipe | {"stages": [stage | {"batch": {"max_tokens": 400, "max_patches": 80}}], "evaluation": None}, "recipe"))


def test_the_same_command_asks_for_nothing_that_is_committed(eyeline: Command, tmp_path: Path) -> None:
    with scripted(right) as script:
        path = write_recipe(tmp_path, recipe_with(tmp_path, server(script.url, concurrency=1, retries=0)))
        script.faults = [None] * 7 + [status(503)]  # in the third partition
        first = eyeline("distill", str(path), "--out", "distilled")
        assert first.code == 10 and "the teacher did not answer a request after 1 attempts" in first.err, first.err
        assert "the same command resumes: what is committed is not asked again" in first.err
        assert len(script.asked) == 8
        assert eyeline("distill", str(path), "--out", "distilled").code == 0
        assert len(script.asked) == 8 + 3 + 1  # the third partition again, and the last one
        before = rows_of(tmp_path / "distilled")
        assert eyeline("distill", str(path), "--out", "distilled").code == 0
        assert len(script.asked) == 12
        (tmp_path / "distilled" / "samples-00000.jsonl").unlink()
        assert eyeline("distill", str(path), "--out", "distilled").code == 0  # it is written again, from what is committed
        assert rows_of(tmp_path / "distilled") == before
        assert len(script.asked) == 12
        told = eyeline("report", "distilled")
    assert "distill: 4 of 4 partitions are done" in told.out


def test_shares_together_are_the_whole(eyeline: Command, tmp_path: Path) -> None:
    with scripted(right) as script:
        path = write_recipe(tmp_path, recipe_with(tmp_path, server(script.url)))
        assert eyeline("distill", str(path), "--out", "whole").code == 0
        for n in range(3):
            done = eyeline("distill", str(path), "--out", "shared", "--shard", f"{n}/3")
            assert done.code == 0, done.err
            assert ("the share" in done.out) == (n < 2)
        assert eyeline("distill", str(path), "--out", "processes", "--workers", "2").code == 0
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "shared") == rows_of(tmp_path / "processes")
    assert rejects_of(tmp_path / "whole") == rejects_of(tmp_path / "shared") == rejects_of(tmp_path / "processes")


def test_changed_settings_and_prompts_are_refused_by_name(eyeline: Command, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ question }} Say why, then end with: Answer: <answer>")
    with scripted(right) as script:
        teacher = server(script.url)
        path = write_recipe(tmp_path, recipe_with(tmp_path, teacher, prompts=["own.jinja"]))
        assert eyeline("distill", str(path), "--out", "distilled").code == 0
        for override, said in (("distill.temperature=0.1", "temperature"), ("seed=3", "seed"), ("distill.teacher.model=other", "teacher")):
            done = eyeline("distill", str(path), override, "--out", "distilled")
            assert done.code == 2 and said in done.err, done.err
        same = ("distill.teacher.concurrency=1", "distill.teacher.retries=1", "distill.price.answer=1")
        assert eyeline("distill", str(path), *same, "--out", "distilled").code == 0
        own.write_text("{{ question }} Why? End with: Answer: <answer>")
        done = eyeline("distill", str(path), "--out", "distilled")
        assert done.code == 2 and "prompts" in done.err
        assert len(script.asked) == 10


def test_several_prompts_and_answers_vote(eyeline: Command, tmp_path: Path) -> None:
    count = {"asked": 0}

    def say(body: dict[str, Any]) -> str:
        with script.lock:
            count["asked"] += 1
        colour = "mauve" if body["seed"] % 4 == 0 else "red"
        return f"{REASON} {body['seed']}\nAnswer: {colour}"

    with scripted(say) as script:
        more = {"prompts": ["chain-of-thought", "self-check"], "n": 3, "accept": {"by": "majority"}, "keep": 2}
        path = write_recipe(tmp_path, recipe_with(tmp_path, server(script.url), **more))
        assert eyeline("distill", str(path), "--out", "distilled").code == 0
    kept, rejected = rows_of(tmp_path / "distilled"), rejects_of(tmp_path / "distilled")
    assert count["asked"] == 60 == len(kept) + len(rejected)
    assert {row["distilled"]["answer"] for row in kept} <= {"red", "mauve"}
    assert {row["cause"] for row in rejected} <= {"surplus", "minority"}
    by_sample = [row["distilled"]["sample"] for row in kept]
    assert all(by_sample.count(one) == 2 for one in set(by_sample))
    assert len({row["distilled"]["seed"] for row in kept} | {row["seed"] for row in rejected}) == 60


def test_a_rewritten_question_takes_the_place_of_the_question(eyeline: Command, tmp_path: Path) -> None:
    def say(body: dict[str, Any]) -> str:
        return f"Question: Name the colour.\n{right(body)}"

    with scripted(say) as script:
        path = write_recipe(tmp_path, recipe_with(tmp_path, server(script.url), prompts=["question-rewriting"]))
        assert eyeline("distill", str(path), "--out", "distilled").code == 0
    row = rows_of(tmp_path / "distilled")[0]
    assert row["messages"][-2]["content"] == [{"type": "image"}, {"type": "text", "text": "Name the colour."}]
    assert "Question:" not in row["messages"][-1]["content"]


def test_rows_that_cannot_be_asked_are_counted_by_cause(eyeline: Command, tmp_path: Path) -> None:
    with scripted(right) as script:
        recipe = recipe_with(tmp_path, server(script.url))
        data = tmp_path / "data" / "data.json"
        rows = json.loads(data.read_text())
        rows[1] = {"image": "pictures/1.png", "conversations": "nothing"}
        (tmp_path / "data" / "pictures" / "2.png").write_bytes(b"\x89PNG damaged")
        (tmp_path / "data" / "pictures" / "3.png").unlink()
        data.write_text(json.dumps(rows))
        done = eyeline("distill", str(write_recipe(tmp_path, recipe)), "--out", "distilled")
    assert done.code == 0, done.err
    assert len(script.asked) == 7
    causes = {row["sample"]: row["cause"] for row in rejects_of(tmp_path / "distilled") if row["cause"] != "wrong"}
    assert causes == {"data.json#1": "wrong_type", "data.json#2": "broken_image", "data.json#3": "missing_image"}
    about = json.loads((tmp_path / "distilled" / "distilled.json").read_text())
    assert about["samples"] == 10 == about["kept_samples"] + sum(about["dropped"].values())


def test_names_that_are_not_utf8_are_kept(eyeline: Command, tmp_path: Path) -> None:
    with scripted(right) as script:
        recipe = recipe_with(tmp_path, server(script.url))
        named = os.fsdecode(os.fsencode(tmp_path) + b"/data/caf\xe9.json")
        shutil.copy(tmp_path / "data" / "data.json", named)
        recipe["distill"]["sources"] = [{"path": str(tmp_path / "data" / "*.json"), "limit": 30}]
        done = eyeline("distill", str(write_recipe(tmp_path, recipe)), "--out", "distilled")
    assert done.code == 0, done.err
    ids = {row["distilled"]["sample"] for row in rows_of(tmp_path / "distilled")}
    assert any(id.startswith("caf\udce9.json#") for id in ids), ids


def test_a_key_that_is_not_set_is_refused_before_anything_is_written(eyeline: Command, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, recipe_with(tmp_path, server("http://127.0.0.1:9/v1", key_env="NO_SUCH_KEY")))
    done = eyeline("distill", str(path), "--out", "distilled")
    assert done.code == 2 and "the environment variable NO_SUCH_KEY is not set, and distill.teacher.key_env names it" in done.err
    assert not (tmp_path / "distilled" / "job").exists()


def test_dry_shows_verdicts_and_an_estimate_and_writes_nothing(eyeline: Command, tmp_path: Path) -> None:
    with scripted(right) as script:
        recipe = recipe_with(tmp_path, server(script.url), price={"prompt": 2.0, "answer": 10.0})
        path = write_recipe(tmp_path, recipe)
        before = sorted(tmp_path.rglob("*"))
        done = eyeline("distill", str(path), "--dry", "5")
        assert sorted(tmp_path.rglob("*")) == before
    assert done.code == 0, done.err
    assert len(script.asked) == 5
    assert "[chain-of-thought 0] kept; answer: 'It is red.'; 100 + 20 tokens, seed" in done.out
    assert "rejected: wrong" in done.out
    assert "all 10 samples: 10 requests" in done.out
    assert "tokens: about 1,000 of prompts and 200 of answers; cost: about 0.00 USD" in done.out


def test_a_second_command_in_one_folder_is_locked_out(eyeline: Command, tmp_path: Path) -> None:
    with scripted(right) as script:
        path = write_recipe(tmp_path, recipe_with(tmp_path, server(script.url)))
        (tmp_path / "distilled").mkdir()
        with sole_owner(tmp_path / "distilled"):
            second = eyeline("distill", str(path), "--out", "distilled")
        assert second.code == RunLocked.code and "is in use by process" in second.err
        assert not script.asked
        assert eyeline("distill", str(path), "--out", "distilled").code == 0


def test_dry_without_a_server_does_not_speak_of_resuming(eyeline: Command, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, recipe_with(tmp_path, server("http://127.0.0.1:9/v1", retries=0)))
    done = eyeline("distill", str(path), "--dry", "1")
    assert done.code == 10 and "the teacher did not answer a request after 1 attempts" in done.err
    assert "commit" not in done.err and "resume" not in done.err


def test_check_shows_what_would_be_asked(eyeline: Command, tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, server("http://127.0.0.1:9/v1", key_env="NO_SUCH_KEY"), n=2)
    done = eyeline("check", str(write_recipe(tmp_path, recipe)), "--samples", "0")
    assert "distill: 10 samples × 1 prompt (chain-of-thought) × 2 answers = 20 requests" in done.out
    assert "distill: teacher tiny-teacher at http://127.0.0.1:9/v1, with the key in NO_SUCH_KEY, 4 requests at a time" in done.out
    assert "the environment variable NO_SUCH_KEY, which key_env names, is not set here" in done.out
    recipe["distill"]["prompts"] = ["none.jinja"]
    done = eyeline("check", str(write_recipe(tmp_path, recipe)), "--samples", "0")
    assert done.code == 2 and "distill.prompts: " in done.out and "none.jinja does not exist" in done.out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": ["chain-of-thougt"]}, "Did you mean 'chain-of-thought'"),
        ({"temperature": 0, "n": 2}, "temperature: 0 gives the same answer 2 times"),
        ({"accept": {"by": "majority"}}, "needs at least three"),
        ({"accept": {"tolerance": 0.1}}, "tolerance is of compare: number"),
        ({"teacher": server("localhost:8000/v1")}, "wanted the URL of an API"),
        ({"teacher": server("http://me:secret@host/v1")}, "must not contain a password"),
        ({"teacher": server("http://host/v1", extra={"seed": 1})}, "seed is set by other settings"),
    ],
)
def test_settings_that_make_no_sense_are_refused(eyeline: Command, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    recipe = recipe_with(tmp_path, server("http://127.0.0.1:9/v1"))
    recipe["distill"] |= change
    done = eyeline("distill", str(write_recipe(tmp_path, recipe)), "--out", "distilled")
    assert done.code == 2 and said in done.err, done.err
    assert not (tmp_path / "distilled").exists()


def test_a_folder_that_is_not_complete_is_no_source(eyeline: Command, tmp_path: Path) -> None:
    with scripted(right) as script:
        path = write_recipe(tmp_path, recipe_with(tmp_path, server(script.url, retries=0, concurrency=1)))
        script.faults = [None] * 5 + [status(500)]
        assert eyeline("distill", str(path), "--out", "distilled").code == 10
        done = eyeline("check", str(path), "stages.0.data.sources.0.path=distilled", "--samples", "0")
    assert "distilled is a folder of `eyeline distill` that is not complete. Run the same command again" in done.out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    done = eyeline("distill", str(path), "--out", "other")
    assert done.code == 2 and "holds mine.txt, which `eyeline distill` did not write" in done.err


def test_an_answer_cut_short_is_kept_out(eyeline: Command, tmp_path: Path) -> None:
    with scripted(lambda body: completion(right(body), "length")) as script:
        path = write_recipe(tmp_path, recipe_with(tmp_path, server(script.url)))
        done = eyeline("distill", str(path), "--out", "distilled")
    assert "answers: 10 cut" in done.out
    assert "Nothing was kept, so there is nothing to train on. distilled/rejected has each answer with its cause" in done.out
    assert "To train on it" not in done.out
    done = eyeline("check", str(path), "stages.0.data.sources.0.path=distilled", "--samples", "0")
    assert "distilled holds no answer that was kept; " in done.out


def test_an_attempt_that_lost_with_other_answers_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process commits the same partition meanwhile, with other answers, as a server gives them."""
    ran: list[Job] = []

    def twice(name: Job, plan: Plan, where: Where, folder: Path, damaged: set[int]) -> bool:
        ran.append(name)
        first, second = (attempt(name, plan.store, plan.digest, plan.partition(0)) for _ in range(2))
        assert (first.how, second.how) == ("committed", "lost") and first.manifest == second.manifest
        assert [key for key, _ in plan.store.sizes("files") if first.manifest.attempt not in key] == []
        return False

    monkeypatch.setattr("eyeline.distill.job.run_job", twice)
    with scripted(lambda body: f"{right(body)} {len(script.asked)}") as script:
        found = run_of(recipe_with(tmp_path, server(script.url)), "recipe").distill
        assert found is not None
        assert distill(found, Student(template_named("plain"), 0, "cpu", 1), tmp_path / "out", Where()) is None
    assert len(ran) == 1 and len(script.asked) == 6
