"""What `eyeline check` says of a recipe's `distill` section, without a request."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from eyeline.bundle.bundle import open_bundle
from eyeline.core.batch import Sample
from eyeline.core.errors import BadSample, Refused
from eyeline.core.words import counted
from eyeline.data.sets import open_each
from eyeline.data.sources.sources import open_source
from eyeline.data.text.documents import up_to_last_supervised
from eyeline.data.text.templates import Template
from eyeline.distill.ask import template_thinks
from eyeline.distill.prompts import Prompt, asked, prompt_named
from eyeline.distill.settings import Distill, ModelTeacher, ServerTeacher
from eyeline.parallel.secrets import has_secret

TRIED = 20  # samples that each prompt is rendered for


def problems(settings: Distill) -> Iterator[tuple[str, bool]]:
    """(what is wrong, whether it is only warned of): sources, prompts, the teacher's folder and the key."""
    samples: list[Sample] = []
    for source in settings.sources:
        try:
            rows = open_source(source)
        except Refused as error:
            yield f"distill.sources: {error}", False
            continue
        samples += [found for _, _, found in islice(rows.kept_rows(), TRIED) if isinstance(found, Sample)]
    for name in settings.prompts:
        try:
            prompt = prompt_named(name)
            unfit = [bad for sample in samples[:TRIED] if (bad := _unfit(prompt, sample)) is not None]
        except Refused as error:
            yield f"distill.prompts: {error}", False
            continue
        if unfit:
            yield f"distill.prompts: {len(unfit)} of the first {len(samples[:TRIED])} samples cannot be asked: {unfit[0]}", True
    match settings.teacher:
        case ModelTeacher(path=path, checkpoint=checkpoint):
            try:
                open_bundle(Path(path), checkpoint)
            except Refused as error:
                yield f"distill.teacher: {error}", False
        case ServerTeacher(key_env=str(name)) if not has_secret(name):
            yield f"distill.teacher: the environment variable {name}, which key_env names, is not set here", True
        case _:
            pass


def _unfit(prompt: Prompt, sample: Sample) -> BadSample | None:
    try:
        asked(prompt, up_to_last_supervised(sample))
    except BadSample as bad:
        return bad
    return None


def lines(settings: Distill) -> Iterator[str]:
    """What is asked, and of whom. Refused for sources that cannot be opened."""
    count = sum(1 for rows in open_each(settings.sources) for _ in rows.kept_rows())
    asked = f"{counted(count, 'sample')} × {counted(len(settings.prompts), 'prompt')} ({', '.join(settings.prompts)})"
    yield f"distill: {asked} × {counted(settings.n, 'answer')} = {count * settings.answers_per_sample:,} requests"
    match settings.teacher:
        case ServerTeacher() as teacher:
            key = "without a key" if teacher.key_env is None else f"with the key in {teacher.key_env}"
            seeds = "" if teacher.seeds else "; without seeds: the same request may be answered otherwise"
            yield f"distill: teacher {teacher.model} at {', '.join(teacher.urls)}, {key}, {teacher.concurrency} requests at a time{seeds}"
        case ModelTeacher() as teacher:
            yield f"distill: teacher {teacher.path}, in this process"


def form_line(settings: Distill, student: Template) -> str:
    """What is kept, and how it is written for the student."""
    by = {
        "truth": f"whose final answer is the sample's ({settings.accept.compare})",
        "majority": f"whose final answer most answers to the sample have ({settings.accept.compare})",
        "any": "whatever their final answer is",
    }[settings.accept.by]
    thinks = template_thinks(student)
    form = "between <think> and </think>" if thinks else f"before the answer, since the template {student.name} has no reasoning"
    return f"distill: keeps up to {counted(settings.keep, 'answer')} per sample, {by}; the rationale is written {form}"
