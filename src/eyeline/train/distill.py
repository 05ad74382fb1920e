"""`eyeline distill`: a recipe's `distill` section, asked of its teacher."""

from pathlib import Path

from eyeline.core.errors import Refused, TeacherFailed
from eyeline.core.files import make_folder
from eyeline.core.log import say, visible
from eyeline.core.words import counted, percent
from eyeline.data.sources.source_files import DISTILLED
from eyeline.data.text.templates import template_named
from eyeline.distill.dry import dry_run
from eyeline.distill.job import REJECTS, Student, Summary, distill
from eyeline.distill.settings import Distill
from eyeline.distill.work import IMAGES
from eyeline.offline.report import JOBS
from eyeline.offline.run import Where
from eyeline.train.run import Run
from eyeline.train.start import description
from eyeline.train.stop import sole_owner


def distill_recipe(run: Run, folder: Path, where: Where) -> None:
    """Ask for every sample, and complete `folder`. Refused when it holds something else."""
    settings, student = distill_settings(run), student_of(run)
    there = [p.name for p in folder.iterdir() if not p.name.startswith(".")] if folder.is_dir() else []
    strangers = sorted(name for name in there if name not in KNOWN and not (name.startswith("samples-") and name.endswith(".jsonl")))
    if strangers:
        raise Refused(f"{folder} holds {', '.join(strangers[:5])}, which `eyeline distill` did not write. Choose another folder")
    own = folder / JOBS / f"shard-{where.shard}-of-{where.shards}" if where.shards > 1 else folder
    make_folder(own)
    with sole_owner(own):
        try:
            made = distill(settings, student, folder, where)
        except TeacherFailed as failed:
            raise TeacherFailed(f"{failed}. Once it answers, the same command resumes: what is committed is not asked again") from failed
    if made is None:
        say(
            f"{folder}: the share {where.shard} of {where.shards} is done. When the others have ended, run one of the commands again, or "
            "one without --shard: it completes the folder"
        )
        return
    for line in summary_lines(made, folder):
        say(line)


KNOWN = {DISTILLED, IMAGES, JOBS, REJECTS, "lock"}


def dry(run: Run, count: int, where: Where) -> None:
    """Ask for a few samples and print what came back, and what all would take."""
    dry_run(distill_settings(run), student_of(run), count, where, lambda line: say(visible(line)))


def distill_settings(run: Run) -> Distill:
    if run.distill is None:
        raise Refused(f"the recipe {run.name} has no distill section. docs/distill.md shows one")
    return run.distill


def student_of(run: Run) -> Student:
    """The model that learns from the answers. A new one needs no data for that, which may be the answers themselves."""
    named, probabilities = run.model.template, run.distill is not None and run.distill.top_logprobs > 0
    if named is not None and not probabilities:
        return Student(template_named(named), run.seed, run.device, run.threads)
    encoder = description(run).encoder()
    return Student(encoder.template, run.seed, run.device, run.threads, encoder.identity)


def summary_lines(made: Summary, folder: Path) -> list[str]:
    """What a complete folder holds, in words."""
    share = percent(made.kept_samples / max(made.samples, 1))
    lines = [f"{folder}: {counted(made.rows, 'answer')} to {made.kept_samples:,} of {counted(made.samples, 'sample')} kept ({share})"]
    lines.append("answers: " + ", ".join(f"{count:,} {what}" for what, count in made.answers.items()))
    if made.dropped:
        lines.append("samples of which nothing is kept: " + ", ".join(f"{count:,} {cause}" for cause, count in made.dropped.items()))
    unmeasured = f", without {counted(made.unmeasured, 'answer')} that the server did not count" if made.unmeasured else ""
    lines.append(f"tokens: {made.prompt_tokens:,} of prompts and {made.answer_tokens:,} of answers{unmeasured}")
    if not made.rows:
        return [*lines, f"Nothing was kept, so there is nothing to train on. {folder / REJECTS} has each answer with its cause: change the "
                "prompts, filters or accept by them, try them with --dry, and write into another folder"]  # fmt: skip
    return [*lines, f"To train on it: a source with path: {folder}"]
