"""For tests/test_settings_live.py: how each setting of `distill` is turned, and where the change is seen."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from eyeline.bundle.bundle import open_bundle
from eyeline.core.batch import Likely
from eyeline.core.errors import Refused, TeacherFailed
from eyeline.core.files import read_lines
from eyeline.data.layouts.likely import packed_likely
from eyeline.data.text.templates import template_named
from eyeline.distill import check, dry, http, job, model
from eyeline.distill.job import Student
from eyeline.distill.verdicts import agree
from eyeline.generate.generate import Answer
from eyeline.offline.run import Where
from eyeline.recipes.read import run_of
from tests.distill.recipe import REASON, rejects_of, right, rows_of
from tests.distill.scripted import Scripted, scripted, slow, status

STUDENT = Student(template_named("plain"), 0, "cpu", 1)
SAYS = {  # an answer of a kind for each request by its seed
    0: "I cannot help with that, sorry, though the image shows much.\nAnswer: red",
    1: f"{REASON} {REASON} {REASON}\nAnswer: red",
    2: "It agrees with the provided answer, as one can well see.\nAnswer: red",
    3: "我 看 到 一 个 红 色 的 圆\nAnswer: red",
    4: "So it is.\nAnswer: 103",
    5: "It has one colour and not another, and that is it.\nAnswer: 100",
    6: "It has one colour and not another, I can see it.\nAnswer: red!",
}


def say(body: dict[str, Any]) -> str:
    if body["temperature"] == 0.125:
        return right(body)
    seed = body.get("seed", 6)
    return SAYS[seed % 7].replace("\nAnswer", f" ({seed})\nAnswer")


def settings_of(recipe: dict[str, Any], script: Scripted | None) -> Any:
    found = run_of(recipe, "recipe").distill
    assert found is not None
    if script is not None and found.teacher.kind == "server":
        found = found.model_copy(update={"teacher": found.teacher.model_copy(update={"urls": (script.url,)})})
    return found


def distilled(recipe: dict[str, Any], folder: Path) -> Any:
    """What is asked, kept and rejected, and how it was committed."""
    with scripted(say) as script:
        job.distill(settings_of(recipe, script), STUDENT, folder / "out", Where())
    committed = sorted(path.name for path in (folder / "out").rglob("done/*/*.json"))
    asked = sorted(repr(sorted(body.items())) for body in script.asked)
    return asked, [without(row) for row in rows_of(folder / "out")], [without(row) for row in rejects_of(folder / "out")], committed


def without(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what only repeats settings."""
    about = {name: value for name, value in row.get("distilled", {}).items() if name not in ("settings", "teacher")}
    return row | ({"distilled": about} if about else {})


def said_by_check(recipe: dict[str, Any], folder: Path) -> Any:
    found = settings_of(recipe, None)
    try:
        return [*check.problems(found), *check.lines(found), check.form_line(found, STUDENT.template)]
    except Refused as refused:
        return str(refused)


def refusal_of_settings(recipe: dict[str, Any], folder: Path) -> str:
    try:
        found = settings_of(recipe, None)
    except Refused as refused:
        return str(refused)
    return "\n".join(text for text, _ in check.problems(found))


def failure(fault: Any) -> Callable[[dict[str, Any], Path], str]:
    """How a job ends whose server fails."""

    def observe(recipe: dict[str, Any], folder: Path) -> str:
        with scripted(say) as script, patch.object(http, "FIRST_WAIT_S", 0.01):
            script.always = fault
            try:
                job.distill(settings_of(recipe, script), STUDENT, folder / "out", Where())
            except (Refused, TeacherFailed) as error:
                return str(error).replace(str(script.port), "PORT")
        return "none"

    return observe


def near(recipe: dict[str, Any], folder: Path) -> bool:
    return agree("103", "100", settings_of(recipe, None).accept)


def divergences(recipe: dict[str, Any], folder: Path) -> list[float]:
    """What a teacher adds to the loss of each step: one that finds three tokens equally likely wherever it starts to answer."""
    from eyeline.train.loop import train

    likely = packed_likely(Likely((0,), np.array([3, 4, 5], np.int32).tobytes(), np.full(3, np.log(1 / 3), np.float16).tobytes(), 3))
    turns = [{"role": "user", "content": "what colour?"}, {"role": "assistant", "content": "it is red", "likely": likely}]
    (folder / "likely.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    stage = recipe["stages"][0] | {"data": {"sources": [{"path": str(folder / "likely.jsonl")}]}, "trains": LANGUAGE}
    train(run_of(recipe | {"stages": [stage], "out": str(folder / "run"), "evaluation": None}, "recipe"))
    return [line["divergence"] for line in read_lines(folder / "run" / "metrics.jsonl") if line["kind"] == "step"]


def estimated(recipe: dict[str, Any], folder: Path) -> Any:
    lines: list[str] = []
    with scripted(say) as script:
        dry.dry_run(settings_of(recipe, script), STUDENT, 2, Where(), lines.append)
    return [line for line in lines if line.startswith("tokens:")]


def rounds(recipe: dict[str, Any], folder: Path) -> Any:
    """How many prompts a model here answers together."""
    from eyeline.train.loop import train

    sizes: list[tuple[int, int]] = []  # with the likeliest tokens that are wanted of each

    def answered(loaded: Any, spec: Any, prompts: Any, *rest: Any, **named: Any) -> list[Answer]:
        sizes.append((len(prompts), named["likeliest"]))
        return [Answer((), "stop") for _ in prompts]

    run = folder / "teacher"
    train(run_of(recipe | {"out": str(run), "distill": None, "evaluation": None}, "recipe"))
    found = settings_of(recipe, None)
    found = found.model_copy(update={"teacher": found.teacher.model_copy(update={"path": str(run)})})
    student = replace(STUDENT, tokenizer=open_bundle(run).bundle.encoder().identity)
    with patch.object(model, "generate", answered):
        job.distill(found, student, folder / "out", Where())
    return sizes


def best_or_newest(recipe: dict[str, Any], folder: Path) -> str:
    """A run without validation has no best checkpoint."""
    try:
        return str(rounds(recipe, folder))
    except Refused as refused:
        return str(refused)


TEACHER = "{kind: server, urls: ['http://x/v1'], model: m}"
LANGUAGE = {"language": {"how": "full", "lr": 0.01}}
SERVER = f"distill={{sources: [{{path: DATA, limit: 8}}], n: 3, keep: 3, accept: {{by: any}}, teacher: {TEACHER}}}"
MODEL = "distill={sources: [{path: DATA, limit: 8}], max_new_tokens: 8, teacher: {kind: model, path: NOWHERE}}"
CASES: dict[str, tuple[tuple[str, ...], Any, tuple[str, ...]]] = {
    **{
        f"distill.{leaf}": ((f"distill.{turn}",), see, (SERVER, *(f"distill.{one}" for one in base)))
        for leaf, turn, see, *base in [
            ("sources[].path", "sources.0.path=MIXED", distilled),
            ("sources[].images", "sources.0.images=NOWHERE", said_by_check),
            ("sources[].layout", "sources.0.layout=openai", said_by_check),
            ("sources[].columns.*", "sources.0.columns={kind: id}", said_by_check, "sources.0.categories=[red]"),
            ("sources[].roles.*", "sources.0.roles={user: guest}", said_by_check),
            ("sources[].categories", "sources.0.categories=[red]", distilled),
            ("sources[].where", "sources.0.where=width > 12", said_by_check),
            ("sources[].signals", "sources.0.signals=NOWHERE", said_by_check, "sources.0.where=width > 12"),
            ("sources[].repeat", "sources.0.repeat=2", refusal_of_settings),
            ("sources[].limit", "sources.0.limit=3", distilled),
            ("sources[].weight", "sources.0.weight=2", refusal_of_settings),
            ("teacher<ServerTeacher>.kind", "teacher.kind=none", refusal_of_settings),
            ("teacher<ServerTeacher>.urls", "teacher.urls=['http://y/v1']", said_by_check),
            ("teacher<ServerTeacher>.model", "teacher.model=other", distilled),
            ("teacher<ServerTeacher>.key_env", "teacher.key_env=NO_SUCH_KEY", refusal_of_settings),
            ("teacher<ServerTeacher>.concurrency", "teacher.concurrency=2", said_by_check),
            ("teacher<ServerTeacher>.timeout", "teacher.timeout=0.1", failure(slow(0.2)), "teacher.retries=0", "teacher.timeout=0.05"),
            ("teacher<ServerTeacher>.retries", "teacher.retries=1", failure(status(503)), "teacher.retries=0"),
            ("teacher<ServerTeacher>.seeds", "teacher.seeds=false", distilled),
            ("teacher<ServerTeacher>.max_side", "teacher.max_side=8", distilled),
            ("teacher<ServerTeacher>.extra.*", "teacher.extra={effort: low}", distilled),
            ("prompts", "prompts=[self-check]", distilled),
            ("n", "n=2", distilled),
            ("temperature", "temperature=0.5", distilled),
            ("top_p", "top_p=0.5", distilled),
            ("max_new_tokens", "max_new_tokens=9", distilled),
            ("accept.by", "accept.by=truth", distilled),
            ("accept.compare", "accept.compare=exact", distilled, "accept.by=truth", "temperature=0.125"),
            ("accept.tolerance", "accept.tolerance=0.1", near, "accept={compare: number}"),
            ("accept.min_share", "accept.min_share=0.1", distilled, "accept.by=majority", "n=7"),
            ("filters.refusals", "filters.refusals=false", distilled),
            ("filters.leaks", "filters.leaks=false", distilled),
            ("filters.same_script", "filters.same_script=false", distilled),
            ("filters.min_words", "filters.min_words=0", distilled),
            ("filters.max_words", "filters.max_words=6", distilled),
            ("filters.max_repetition", "filters.max_repetition=1", distilled),
            ("filters.mentions_image", "filters.mentions_image=true", distilled),
            ("keep", "keep=1", distilled),
            ("partition_rows", "partition_rows=4", distilled),
            ("price.prompt", "price.prompt=5", estimated),
            ("price.answer", "price.answer=5", estimated),
            ("price.currency", "price.currency=EUR", estimated, "price.prompt=5"),
        ]
    },
    **{
        f"distill.teacher<ModelTeacher>.{leaf}": ((f"distill.teacher.{turn}",), see, (MODEL,))
        for leaf, turn, see in [
            ("kind", "kind=none", refusal_of_settings),
            ("path", "path=MIXED", refusal_of_settings),
            ("checkpoint", "checkpoint=best", best_or_newest),
            ("max_tokens", "max_tokens=64", rounds),
            ("max_patches", "max_patches=16", rounds),
        ]
    },
    "distill.top_logprobs": (("distill.top_logprobs=3",), rounds, (MODEL,)),
    "stages[].distill.kl": (("stages.0.distill.kl=2",), divergences, ("stages.0.distill={kl: 1}",)),
    "stages[].distill.temperature": (("stages.0.distill.temperature=2",), divergences, ("stages.0.distill={kl: 1}",)),
}
