"""`eyeline distill`: the samples of a recipe's `distill` section, asked in partitions, each committed once.

samples-00000.jsonl   what is kept: a source of messages, together with `images/`
rejected/             what is not, with causes
distilled.json        which files there are, and what was counted: with it the folder is complete
job/distill/          the plan and the partitions; the same command resumes it
"""

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from eyeline import __version__
from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.files import claimed, make_folder, read_object, sha256_of, storage_failed, write_json
from eyeline.data.plan.order import Longs
from eyeline.data.reader import digest_of
from eyeline.data.sets import open_each
from eyeline.data.sources.source_files import DISTILLED
from eyeline.data.text.templates import Template
from eyeline.distill.ask import Asker, Row, template_thinks
from eyeline.distill.model import FolderTeacher
from eyeline.distill.prompts import prompt_named
from eyeline.distill.server import OpenAITeacher
from eyeline.distill.settings import Distill, ModelTeacher, ServerTeacher
from eyeline.distill.teacher import Asking
from eyeline.distill.work import COUNTS, IMAGES, REJECTED, SAMPLES, WriteAnswers
from eyeline.offline.attempt import Job
from eyeline.offline.local_jobs import open_job, output_path, planned_file, run_job
from eyeline.offline.manifests import Manifest, manifests
from eyeline.offline.plan import GROUP, Draft, Input, Partition, Plan
from eyeline.offline.run import Where
from eyeline.parallel.secrets import secret_named

JOB = "distill"
REJECTS = "rejected"  # the folder of answers that are not kept
VERSION = 1  # of the rows and of distilled.json


@dataclass(frozen=True)
class Student:
    """What the answers are written for, and how the run computes."""

    template: Template
    seed: int
    device: str
    threads: int | None
    tokenizer: str | None = None  # its identity, with the template's; where probabilities of tokens are wanted


@dataclass(frozen=True)
class Summary:
    """The contents of distilled.json."""

    version: int
    files: list[dict[str, Any]]  # name, bytes, sha256, rows
    samples: int  # that were asked
    kept_samples: int  # of which something is kept
    dropped: dict[str, int]  # samples of which nothing is, by cause
    answers: dict[str, int]  # by what became of them
    prompt_tokens: int
    answer_tokens: int
    unmeasured: int  # answers whose tokens the server did not say
    about: dict[str, Any]  # what was asked, of whom

    @property
    def rows(self) -> int:
        return sum(one["rows"] for one in self.files)


def teacher_of(settings: Distill, student: Student) -> Asking:
    match settings.teacher:
        case ServerTeacher() as teacher:
            if teacher.key_env is not None:
                secret_named(teacher.key_env)  # refused before anything is written; workers read it themselves
            return OpenAITeacher(teacher, settings)
        case ModelTeacher() as teacher:
            return FolderTeacher(teacher, settings, student.device, student.threads)
        case _ as never:
            assert_never(never)


def asker_of(settings: Distill, student: Student) -> Asker:
    """What is asked. Refused for sources and prompts that cannot be opened."""
    prompts = tuple(map(prompt_named, settings.prompts))
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        raise Refused(f"distill.prompts has two prompts with the same name: {', '.join(ids)}. Rename one: rows say by name which it was")
    teacher = teacher_of(settings, student)
    if settings.top_logprobs and teacher.tokenizer != student.tokenizer:
        raise Refused(
            f"top_logprobs: the teacher {teacher.name} has another tokenizer or chat template than the recipe's model, so the ids of its "
            "tokens mean nothing there. Use a teacher of the same family and template, or leave top_logprobs out"
        )
    return Asker(open_each(settings.sources), settings, prompts, teacher, student.seed)


def all_rows(asker: Asker) -> Iterator[Row]:
    """Every sample that is asked, in order; those that cannot be are among them, since they are counted."""
    for number, rows in enumerate(asker.sources):
        for place, _, _ in rows.kept_rows():
            yield Row(number, place)


def distill(settings: Distill, student: Student, folder: Path, where: Where) -> Summary | None:
    """Ask for every sample, and complete the folder. None where other jobs (`where`) have to do their share first."""
    asker = asker_of(settings, student)
    try:
        plan = _plan(asker, student, folder)
        write = WriteAnswers(asker, planned_file(plan, "rows.npy"), folder / IMAGES, template_thinks(student.template))
        job = Job(JOB, write, repeatable=False, accelerated=asker.teacher.accelerated)
        if not run_job(job, plan, where, folder, set()):
            return None
    finally:
        asker.teacher.close()
    with claimed(folder / DISTILLED, wait=True):
        return complete(plan, folder)


def _plan(asker: Asker, student: Student, folder: Path) -> Plan:
    settings = asker.settings
    kept = settings.model_dump(mode="json", exclude={"teacher", "price", "sources", "prompts"})
    identity = {
        "sources": [
            {str(rows.path): [rows.layout.identity, digest_of(rows), rows.source.categories, rows.source.limit]} for rows in asker.sources
        ],
        "settings": kept,
        "prompts": {prompt.id: prompt.digest for prompt in asker.prompts},
        "teacher": asker.teacher.identity,
        "template of the student": student.template.name,
        "seed": student.seed,
        "code": {"eyeline": __version__, "distilled version": VERSION},
    }

    def draft(here: Path) -> Draft:
        row_R5 = np.fromiter((number for row in all_rows(asker) for number in (row.source, *row.place)), np.int64).reshape(-1, 5)
        if not len(row_R5):
            raise Refused("the sources of distill have no sample left after categories and limit")
        np.save(here / "rows.npy", row_R5)
        return Draft(_partitions(asker, row_R5, settings.partition_rows))

    return open_job(folder, JOB, identity, draft)


def _partitions(asker: Asker, row_R5: Longs, size: int) -> Iterator[Partition]:
    for number, start in enumerate(range(0, len(row_R5), size)):
        mine = row_R5[start : start + size]
        shards = [asker.sources[source].shards[shard] for source, shard in dict.fromkeys(map(tuple, mine[:, :2].tolist()))]
        inputs = dict.fromkeys(Input(about.name, about.bytes, about.fingerprint) for about in shards)
        yield Partition(number, tuple(inputs), len(mine), [start, start + len(mine)])


# When all partitions are committed


def complete(plan: Plan, folder: Path) -> Summary:
    """Join the outputs of all partitions, and write distilled.json. What is whole is kept."""
    path = folder / DISTILLED
    if path.exists():
        before = Summary(**read_object(path))
        if all(_is_whole(folder, one) for one in before.files):
            return before
    make_folder(folder / REJECTS)
    answers, tokens, dropped, kept = Counter[str](), Counter[str](), Counter[str](), 0
    files: list[dict[str, Any]] = []
    for group, some in groupby(manifests(plan), key=lambda one: one.number // GROUP):
        mine = list(some)
        for one in mine:
            counts = json.loads(_output(plan, one, COUNTS).read_bytes())
            answers.update(counts.pop("answers"))
            tokens.update(counts)
            dropped.update(one.counts)
            kept += one.rows
        _joined(plan, mine, REJECTED, folder / REJECTS / f"{group:05d}.jsonl")
        rows = _joined(plan, mine, SAMPLES, made := folder / f"samples-{group:05d}.jsonl")
        if rows:
            files.append({"name": made.name, "bytes": made.stat().st_size, "sha256": sha256_of(made), "rows": rows})
    about = {name: value for name, value in plan.head.identity.items() if name != "code"}
    figures = {name: tokens[name] for name in ("prompt_tokens", "answer_tokens", "unmeasured")}
    by_cause = [dict(sorted(counts.items(), key=lambda item: -item[1])) for counts in (dropped, answers)]
    summary = Summary(VERSION, files, kept + dropped.total(), kept, by_cause[0], by_cause[1], **figures, about=about)
    write_json(path, vars(summary))
    return summary


def _is_whole(folder: Path, about: dict[str, Any]) -> bool:
    path = folder / about["name"]
    return path.is_file() and path.stat().st_size == about["bytes"] and sha256_of(path) == about["sha256"]


def _output(plan: Plan, manifest: Manifest, name: str) -> Path:
    """An output, as it was committed. StorageFailed for one that is not: its answers cannot be had again for nothing."""
    path = output_path(plan, manifest, name)
    about = next(one for one in manifest.outputs if one.name == name)
    if not path.is_file() or path.stat().st_size != about.bytes or sha256_of(path) != about.sha256:
        raise StorageFailed(f"{path} is missing or damaged, and asking again would give other answers. Restore it, or use another folder")
    return path


def _joined(plan: Plan, committed: Sequence[Manifest], name: str, path: Path) -> int:
    """Write the rows of several partitions into one file, which appears whole; how many there are. None: no file."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    rows = 0
    try:
        with open(temporary, "wb") as file:
            for one in committed:
                data = _output(plan, one, name).read_bytes()
                rows += data.count(b"\n")
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if rows:
            os.replace(temporary, path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_failed("write", path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return rows
