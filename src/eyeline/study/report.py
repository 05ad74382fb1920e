"""`report.html` of a run folder: one self-contained page without script, that shows what the run wrote and nothing else."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from eyeline.core.errors import Refused
from eyeline.core.files import write_atomically
from eyeline.core.words import counted, duration, gib, percent
from eyeline.data.rejects import CAUSES, REMEDIES
from eyeline.evals.result import Asked, Result, read_result
from eyeline.study.history import History, Origin, RejectSummary, StageStart, Step, read_history, read_rejects
from eyeline.study.ledger import MEANINGS, Ledger, read_ledger
from eyeline.study.page import (
    EMBEDDED_IMAGE,
    collapsible,
    document,
    facts,
    figure,
    figures_list,
    metric,
    note,
    number,
    table,
    warning,
    words,
)
from eyeline.train.display import SMOOTHED_STEPS

MEMORY = "Memory at its peak: the device's, or on a CPU the process's."
FLOPS = "Arithmetic that the model needs, forward and backward without what is recomputed, over the step's full wall time, by part."


def write_report(run: Path) -> Path:
    """Write RUN/report.html and return its path.

    Reads metrics.jsonl (needed), eval.json, rejects.jsonl, recipe.yaml and env.json (each may be absent). Refused where
    `run` is not a run folder, or has no step yet.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise Refused(f"{run} is not a run folder: it has no metrics.jsonl. Give the folder that `eyeline train` wrote, such as runs/NAME.")
    history = read_history(metrics)
    if not history.steps:
        raise Refused(f"{metrics} holds no step yet ({history.unreadable} unreadable lines): there is nothing to report. Train first.")
    out = run / "report.html"
    rejects = read_rejects(run / "rejects.jsonl")
    write_atomically(out, page(run.resolve().name, history, read_ledger(metrics), evaluation(run), rejects, texts(run)))
    return out


def evaluation(run: Path) -> Result | str | None:
    """eval.json's record; None when absent; a sentence when it cannot be read, since the rest of the report still can."""
    path = run / "eval.json"
    if not path.exists():
        return None
    try:
        return read_result(path)
    except Refused as error:
        return str(error)


def texts(run: Path) -> dict[str, str]:
    """The files that are shown as they are, by name. Bytes that are no UTF-8 are shown as U+FFFD."""
    names = ("recipe.yaml", "env.json")
    return {name: (run / name).read_text("utf-8", errors="replace") for name in names if (run / name).is_file()}


def page(
    name: str, history: History, ledger: Ledger, evaluation: Result | str | None, rejects: RejectSummary, texts: dict[str, str]
) -> str:
    """The page: what was trained and the result, how it went, what the model answers, and at the end what it all depends on, folded.
    Everything that comes from a file is escaped here, at the place where it is written down."""
    sections = [
        f"<h1>{words(name)}</h1>",
        note(subject(history)),
        *remarks(history, evaluation),
        figures(history, evaluation, rejects),
        "<h2>What was trained</h2>",
        *stages(history),
        "<h2>Curves</h2>",
        *curves(history),
        *evaluation_section(evaluation),
        *skipped_section(rejects),
        "<h2>Where the time went</h2>",
        *time_spent(ledger),
        "<h2>Settings and environment</h2>",
        *(collapsible(file, f"<pre>{words(text)}</pre>") for file, text in texts.items()),
        *environment(history),
    ]
    return document(name, sections)


def subject(history: History) -> str:
    """The model, in one line."""
    last = history.steps[-1]
    start = history.stages.get(last.stage)
    parts = []
    if start is not None:
        begun = f"from {start.model}" if start.model else "from scratch"
        parts += [f"{start.family}, {begun}", f"{sum(part.parameters for part in start.parts):,} parameters"]
    stages = dict.fromkeys(step.stage for step in history.steps)
    parts.append(f"{counted(last.global_step, 'step')} in {counted(len(stages), 'stage')}")
    known = history.starts[-1] if history.starts else {}
    parts += [stamp(known[name]) for name in ("precision", "hardware") if name in known]
    return " · ".join(parts)


def remarks(history: History, evaluation: Result | str | None) -> list[str]:
    """Warnings at the top of the report."""
    notes = []
    if any(start.get("forced_expert_balance") for start in history.starts):
        notes.append(
            "Forced expert balance: round-robin routing, for benchmarks only. Throughput is valid; losses and answers are meaningless."
        )
    if (before := older(history, evaluation)) is not None:
        notes.append(f"{before} Run `eyeline eval` again for the model that this page shows.")
    if failed := sum(step.outcome == "not finite" or (step.outcome is None and not step.applied) for step in history.steps):
        notes.append(f"{counted(failed, 'step')} had a loss or gradient that was not finite and were not applied.")
    if skipped := sum(step.outcome == "overflow" for step in history.steps):
        notes.append(f"{counted(skipped, 'step')} overflowed in fp16 and were skipped; the loss scale was halved after each.")
    if spiked := sum(step.outcome == "spike" for step in history.steps):
        notes.append(f"{counted(spiked, 'step')} had a loss spike and were skipped (max_spike_steps).")
    if idle := sum(step.outcome == "no targets" for step in history.steps):
        notes.append(f"{counted(idle, 'step')} had no supervised tokens: no loss and no update.")
    if len(history.starts) > 1:
        notes.append(
            f"The run was started {len(history.starts)} times; {counted(history.lost, 'step')} after the last checkpoint were lost."
        )
    if history.unreadable:
        notes.append(f"{counted(history.unreadable, 'line')} of metrics.jsonl could not be read.")
    return [warning(text) for text in notes]


def older(history: History, evaluation: Result | str | None) -> str | None:
    """A remark if the evaluation is of an earlier checkpoint than the last step."""
    if not isinstance(evaluation, Result):
        return None
    found = re.fullmatch(r"step-(\d{1,15})(-\w+)?", str(evaluation.stamps.get("checkpoint")))
    if found is None or int(found[1]) == history.steps[-1].global_step:
        return None
    return f"The evaluation is of the checkpoint after step {int(found[1]):,}, and the run has {history.steps[-1].global_step:,} steps."


def environment(history: History) -> list[str]:
    """The stamps of the last start: what every number of the page depends on."""
    if not history.starts:
        return []
    rows = ((name.replace("_", " "), stamp(value)) for name, value in history.starts[-1].items())
    return [collapsible("environment of the last start", table((), rows))]


def stamp(value: object) -> str:
    """A stamp as text: `torch 2.13.0, numpy 2.4.6` for a mapping, `–` for what there is none of."""
    match value:
        case str():
            return value
        case dict():
            return ", ".join(f"{name} {one}" for name, one in value.items())
        case None:
            return "–"
        case _:
            return json.dumps(value)


def figures(history: History, evaluation: Result | str | None, rejects: RejectSummary) -> str:
    """The figures that a reader looks for first. Losses are those of the last stage, since it made the model that came out."""
    steps = history.steps
    last = steps[-1].stage
    stage = [step for step in steps if step.stage == last]
    of_stage = f" of stage {last}" if len(stage) < len(steps) else ""
    shown: dict[str, str] = {}
    if isinstance(evaluation, Result):
        asked = "questions partly trained on" if evaluation.warning else "questions held out"
        shown[f"exact match, {asked}"] = percent(evaluation.accuracy)
    if (end := validation_loss_of(history, last)) is not None:
        shown[f"validation loss at the end{of_stage}"] = end
    shown |= {
        f"training loss, last {min(len(stage), SMOOTHED_STEPS)} steps{of_stage}": number(weighted_loss(stage[-SMOOTHED_STEPS:])),
        "tokens trained on": metric(sum(s.real for s in steps)),
        "tokens/s": f"{rate(steps):,.0f}",
        "time in steps": duration(sum(history.spent_s.values())),
        "padding": percent(padding(steps)),
    }
    if any(s.flops for s in steps):
        shown["FLOP/s"] = metric(flop_rate(steps))
    if (mfu := utilisation(steps)) is not None:
        shown["MFU"] = percent(mfu)
    if rejects.by_cause:
        shown["samples skipped"] = f"{sum(count for _, count in rejects.by_cause):,}"
    return figures_list(shown)


def validation_loss_of(history: History, stage: str) -> str | None:
    """The last validation loss of a stage. None where it has none: another stage's is not that of the same model."""
    found = [v for v in history.validations if v.stage == stage]
    return None if not found else number(found[-1].loss)


def stages(history: History) -> list[str]:
    """A block for each stage: what it trained, from what, how fast, and what came out. Every mean is a sum divided once."""
    out = []
    for name in dict.fromkeys(step.stage for step in history.steps):
        steps = [step for step in history.steps if step.stage == name]
        settings = stage_settings(history.stages[name], steps) if name in history.stages else {}
        out.append(f'<div class="stage"><h3>{words(f"stage {name}")}</h3>{facts(settings | results(history, name, steps))}</div>')
    return out


def stage_settings(start: StageStart, steps: Sequence[Step]) -> dict[str, str]:
    """The settings of a stage."""
    shown = {}
    for part in start.parts:
        how = (
            f"{part.how}, {part.trained:,} of {part.parameters:,} parameters" if part.trained else f"frozen, {part.parameters:,} parameters"
        )
        shown[part.part] = how + (f", peak lr {part.lr:g}" if part.lr else "")
    own = start.validation
    shown |= {f"data {n}" if len(start.sources) > 1 else "data": source(one) for n, one in enumerate(start.sources, 1)}
    shown |= {f"validation data {n}" if len(own) > 1 else "validation data": source(one) for n, one in enumerate(own, 1)}
    batch = start.batch
    times = f"{batch.packs_per_step} × " if batch.packs_per_step > 1 else ""
    shown["batch"] = f"{times}up to {batch.max_tokens:,} tokens and {batch.max_patches:,} patches"
    planned = f"{start.steps:,}" + (f" ({counted(start.epochs, 'epoch')})" if start.epochs else "")
    done = f"{len(steps):,} of {planned}" if len(steps) != start.steps else planned
    epoch = "" if steps[-1].epoch is None or start.epochs else f", {steps[-1].epoch:.2f} epochs"
    shown["steps"] = done + epoch
    shown["optimizer"] = f"{start.optimizer}, {start.schedule} schedule"
    return shown


def source(origin: Origin) -> str:
    about = "" if origin.exact else "about "
    samples = "" if origin.samples is None else f", {about}{counted(origin.samples, 'sample')}"
    held = f", {about}{origin.held_out:,} more held out" if origin.held_out else ""
    return f"{origin.path} ({origin.layout}{samples}{held})"


def results(history: History, name: str, steps: Sequence[Step]) -> dict[str, str]:
    """The results of a stage."""
    shown = {f"training loss, last {min(len(steps), SMOOTHED_STEPS)} steps": number(weighted_loss(steps[-SMOOTHED_STEPS:]))}
    found = [v for v in history.validations if v.stage == name]
    if found:
        shown["validation loss"] = number(found[-1].loss)
        lowest = min((v for v in found if v.loss is not None), key=lambda v: v.loss or 0.0, default=None)
        if lowest is not None and lowest is not found[-1]:
            shown["validation loss"] += (
                f", best {number(lowest.loss)} at step {lowest.global_step - steps[0].global_step + steps[0].step:,}"
            )
    wait = sum(s.seconds.get("data_wait", 0.0) for s in steps) / (sum(s.step_s for s in steps) or 1)
    shown |= {
        "tokens": f"{sum(s.real for s in steps):,}, of them {sum(s.supervised for s in steps):,} supervised",
        "images encoded": f"{sum(s.images for s in steps):,}",
    }
    if any(s.flops for s in steps):
        shown["FLOPs"] = metric(sum(sum(s.flops.values()) for s in steps))
    return shown | {
        "speed": f"{rate(steps):,.0f} tokens/s, {percent(padding(steps))} padding, {percent(wait)} data wait",
        "peak memory": gib(max(s.memory_bytes for s in steps)),
    }


def evaluation_section(evaluation: Result | str | None) -> list[str]:
    """Accuracy by kind with the text-only baseline's, and answers with their images: wrong ones first, since they teach most."""
    match evaluation:
        case None:
            return []
        case str():
            return [f"<h2>Evaluation</h2>\n{note(evaluation)}"]
        case Result():
            pass
    text_only = evaluation.text_only
    rows = [("all", evaluation.overall, text_only.overall)]
    if any(evaluation.by_kind):
        rows += [(kind, score, text_only.by_kind.get(kind)) for kind, score in evaluation.by_kind.items()]
    shown = [
        (kind or "no kind", f"{score.questions:,}", percent(score.accuracy), percent(guess.accuracy) if guess else "–")
        for kind, score, guess in rows
    ]
    notes = [f"Text-only baseline: {text_only.how}", f"Answers cut at {evaluation.max_new_tokens} tokens: {evaluation.cut}."]
    made = [f"{name} {evaluation.stamps[name]}" for name in ("checkpoint", "commit", "hardware") if evaluation.stamps.get(name)]
    notes += [" · ".join(made)] if made else []
    if evaluation.rejected:
        notes.append(f"Not asked, since they were rejected: {', '.join(f'{n} {cause}' for cause, n in evaluation.rejected.items())}.")
    if evaluation.given:
        notes.append(f"The last question of each sample is asked; {evaluation.given:,} answers before it were given.")
    exact = evaluation.metric == "exact match"
    wrong = f"Wrong answers: {evaluation.questions - evaluation.overall.correct:,} of {evaluation.questions:,}"
    wrong_ids = {one.id for one in evaluation.wrong}
    others = [one for one in sorted(evaluation.samples, key=lambda one: one.correct) if one.id not in wrong_ids]
    return [
        "<h2>Evaluation</h2>",
        *([warning(evaluation.warning)] if evaluation.warning else []),
        table(("kind", "questions", evaluation.metric, "text-only baseline"), shown, numbers=1),
        *map(note, notes),
        *samples(wrong if exact else "Answers with a score below 1", evaluation.wrong),
        *samples("Questions chosen at random", others),
    ]


def samples(title: str, shown: Sequence[Asked]) -> list[str]:
    """Cards under a title; nothing where there are none."""
    return [f"<h2>{words(title)}</h2>", '<div class="samples">', *map(sample, shown), "</div>"] if shown else []


def sample(asked: Asked) -> str:
    """One question with its image, the model's answer, and the true one where they differ."""
    images = "".join(f'<img alt="" src="{p}">' for p in asked.images if EMBEDDED_IMAGE.fullmatch(p))
    verdict = "right" if asked.correct else "wrong"
    said = f"score {asked.score:.2f}" if asked.score not in (None, 0, 1) else verdict
    lines = (
        f"<p>{words(asked.question)}</p>",
        f'<p class="{verdict}"><b>{words(asked.prediction)}</b> ({said})</p>',
        "" if asked.correct else f"<p>answer: {words(asked.answer)}</p>",
        f'<p class="note">{words(asked.kind)} · {words(asked.id)}</p>',
    )
    return f'<div class="sample">{images}{"".join(lines)}</div>'


def curves(history: History) -> list[str]:
    """The plots, each in a figure whose caption defines what is drawn. All are over the same steps, one exactly below the other."""
    # here, since matplotlib takes half a second to import, and a run imports this file before it has anything to draw
    from eyeline.study.plots import NARROW, WIDE, Curve, plot, smooth, together

    steps = history.steps
    x, piece = [s.global_step for s in steps], [s.stage for s in steps]
    befores = (None, *piece)
    borders = [(s.global_step, s.stage) for before, s in zip(befores, steps, strict=False) if before != s.stage]
    parts = list(dict.fromkeys(part for s in steps for part in s.lr))  # of all stages: each trains some

    def curve(name: str, y: Sequence[float | None], weight: Sequence[float] | None = None) -> Curve:
        return Curve(name, x, y, weight=weight, piece=piece)

    def plot_figure(label: str, caption: str, curves: Sequence[Curve], log: bool = False, epochs: Sequence[tuple[int, str]] = ()) -> str:
        wide, narrow = (plot(curves, label, borders, log, (x[0], x[-1]), epochs, width) for width in (WIDE, NARROW))
        return figure(wide, caption, narrow)

    each = replace(curve("each step", [s.loss for s in steps], [s.supervised for s in steps]), pale=True)
    loss = [each, replace(smooth(each, SMOOTHED_STEPS), name=f"mean of {SMOOTHED_STEPS} steps")]
    if found := history.validations:
        at, of = [v.global_step for v in found], [v.stage for v in found]
        loss.append(Curve("validation", at, [v.loss for v in found], dots=True, piece=of))
    waits = [100 * s.seconds.get("data_wait", 0.0) / s.step_s if s.step_s > 0 else None for s in steps]
    shares = [
        curve("padding", [100 * s.padding for s in steps], [s.slots for s in steps]),
        curve("data wait", waits, [s.step_s for s in steps]),
    ]
    counted = dict.fromkeys(part for s in steps for part in s.flops)
    flops = [curve(p, [s.flops.get(p, 0) / s.step_s / 1e9 if s.step_s > 0 else None for s in steps]) for p in counted]
    above = epoch_marks(steps)
    losses = (
        "Loss per supervised token"
        + (", epochs of each stage's data above" if above else "")
        + ". Stages are not joined: each has its own data."
    )
    return [
        plot_figure("loss", losses, loss, log=True, epochs=above),
        plot_figure(
            "learning rate", "Learning rate of each part that trains.", together([curve(p, [s.lr.get(p) for s in steps]) for p in parts])
        ),
        plot_figure("gradient norm", "Norm of all gradients before clipping.", [curve("norm", [s.grad_norm for s in steps])], log=True),
        plot_figure(
            "tokens/s", "Tokens without padding over the step's full wall time.", [curve("rate", [s.real_tokens_per_s for s in steps])]
        ),
        *([plot_figure("GFLOP/s", FLOPS, flops)] if flops else []),
        plot_figure("%", "Padding as a share of token positions, and waiting for data as a share of the step's wall time.", shares),
        plot_figure("GiB", MEMORY, [curve("memory", [s.memory_bytes / 2**30 for s in steps])]),
    ]


def epoch_marks(steps: Sequence[Step], most: int = 10) -> list[tuple[int, str]]:
    """Steps at which some round share of an epoch, or a whole number of epochs, is done; each stage counts its own."""
    known = [s.epoch for s in steps if s.epoch is not None]
    for every in (f * 10.0**power for power in range(-2, 7) for f in (1, 2, 5)):
        if max(known, default=0.0) / every > most:
            continue
        marks: list[tuple[int, str]] = []
        stage, done = None, 0
        for step in steps:
            if step.stage != stage:
                stage, done = step.stage, 0
            if step.epoch is not None and (now := int(step.epoch / every + 1e-9)) > done:
                marks.append((step.global_step, f"{now * every:,.4g}"))
                done = now
        if len(marks) <= most:
            return marks
    return []


def time_spent(ledger: Ledger) -> list[str]:
    """Wall time by cause over all attempts, down time between them included."""
    rows = [
        (name.replace("_", " "), f"{seconds:,.1f} s", percent(seconds / (ledger.wall_s or 1)), MEANINGS[name])
        for name, seconds in ledger.rows()
    ]
    shown = table(("cause", "time", "share", "what it is"), [*rows, ("all", f"{ledger.wall_s:,.1f} s", percent(1.0), "")])
    return [
        note(f"Goodput: {percent(ledger.goodput)} of the wall time computed steps that were kept."),
        shown,
        *map(note, ledger.remarks()),
    ]


def skipped_section(rejects: RejectSummary) -> list[str]:
    """Samples that were left out: how many by cause, why, and what to do; then the first of them."""
    if not rejects.by_cause:
        return []
    causes = [(cause, f"{count:,}", CAUSES.get(cause, "–"), REMEDIES.get(cause, "–")) for cause, count in rejects.by_cause]
    columns = ("file", "row", "field", "cause", "message")
    first = [[str(line.get(c, ""))[:300] for c in columns] for line in rejects.first]
    total = sum(count for _, count in rejects.by_cause)
    return [
        "<h2>Samples that were skipped</h2>",
        note(f"{counted(total, 'sample')} of training and validation data could not be used; each is named in rejects.jsonl."),
        table(("cause", "samples", "what it means", "what to do"), causes),
        collapsible(f"the first {len(first)}; rows are counted from 0", table(columns, first)),
    ]


def weighted_loss(steps: Sequence[Step]) -> float | None:
    """Loss a supervised token over several steps."""
    known = [(s.loss, s.supervised) for s in steps if s.loss is not None]
    count = sum(n for _, n in known)
    return sum(loss * n for loss, n in known) / count if count else None


def rate(steps: Sequence[Step]) -> float:
    """Non-padding tokens per second: all tokens over all wall time, never a mean of rates."""
    seconds = sum(s.step_s for s in steps)
    return sum(s.real for s in steps) / seconds if seconds > 0 else 0.0


def flop_rate(steps: Sequence[Step]) -> float:
    """FLOPs per second that the model needed."""
    seconds = sum(s.step_s for s in steps)
    return sum(sum(s.flops.values()) for s in steps) / seconds if seconds > 0 else 0.0


def utilisation(steps: Sequence[Step], of: Callable[[Step], float | None] = lambda step: step.mfu) -> float | None:
    """The share of the device's peak over all steps of which it is known: MFU, or what `of` takes of a step."""
    known = [(share, s.step_s) for s in steps if (share := of(s)) is not None]
    seconds = sum(spent for _, spent in known)
    return sum(share * spent for share, spent in known) / seconds if seconds > 0 else None


def padding(steps: Sequence[Step]) -> float:
    """Share of slots that is padding."""
    slots = sum(s.slots for s in steps)
    return 1 - sum(s.real for s in steps) / slots if slots else 0.0
