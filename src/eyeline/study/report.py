"""`report.html` of a run folder: one self-contained page without script, that shows what the run wrote and nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path

from eyeline.core.errors import Refused
from eyeline.core.files import write_atomically
from eyeline.evals.result import Asked, Result, read_result
from eyeline.study.history import History, RejectSummary, Step, read_history, read_rejects
from eyeline.study.page import PICTURE, document, figure, figures_list, metric, note, number, percent, table, warning, words

FLOPS = "Arithmetic that the model needs, forward and backward without what is recomputed, over the step's full wall time, by part."


def write_report(run: Path) -> Path:
    """Write RUN/report.html and return its path.

    Reads metrics.jsonl (needed), eval.json, rejects.jsonl, recipe.yaml and env.json (each may be absent). Refused where
    `run` is no run folder, or has no step yet.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise Refused(f"{run} is no run folder: it has no metrics.jsonl. Give the folder that `eyeline train` wrote, such as runs/NAME.")
    history = read_history(metrics)
    if not history.steps:
        raise Refused(f"{metrics} holds no step yet ({history.unreadable} unreadable lines): there is nothing to report. Train first.")
    out = run / "report.html"
    write_atomically(out, page(run.resolve().name, history, evaluation(run), read_rejects(run / "rejects.jsonl"), texts(run)))
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


def page(name: str, history: History, evaluation: Result | str | None, rejects: RejectSummary, texts: dict[str, str]) -> str:
    """The page. Everything that comes from a file is escaped here, at the place where it is written down."""
    sections = [
        f"<h1>{words(name)}</h1>",
        *stamps(history),
        figures(history, evaluation),
        *evaluated(evaluation),
        "<h2>Curves</h2>",
        *curves(history),
        "<h2>Stages</h2>",
        stage_table(history),
        "<h2>Where the time went</h2>",
        ledger(history),
        *rejected(rejects),
        *(f"<h2>{words(file)}</h2>\n<pre>{words(text)}</pre>" for file, text in texts.items()),
    ]
    return document(name, sections)


def stamps(history: History) -> list[str]:
    """What every number below depends on, from the last start, and the notes that a reader must not miss."""
    out: list[str] = []
    if history.starts:
        out.append(table((), ((name, stamp(value)) for name, value in history.starts[-1].items())))
    notes = []
    if any(start.get("forced_expert_balance") for start in history.starts):
        notes.append("Forced expert balance: tokens went to experts in turn. Speeds can be read; losses and answers mean nothing.")
    if len(history.starts) > 1:
        notes.append(f"The run was started {len(history.starts)} times; {history.done_twice} steps were done again after a resume.")
    if not_applied := sum(not s.applied for s in history.steps):
        notes.append(f"{not_applied} steps had a loss or gradient that was not finite and were not applied.")
    if history.unreadable:
        notes.append(f"{history.unreadable} lines of metrics.jsonl could not be read.")
    return out + [note(text) for text in notes]


def stamp(value: object) -> str:
    """A stamp as a person reads it: `torch 2.13.0, numpy 2.4.6` for a mapping, `–` for what there is none of."""
    match value:
        case str():
            return value
        case dict():
            return ", ".join(f"{name} {one}" for name, one in value.items())
        case None:
            return "–"
        case _:
            return json.dumps(value)


def figures(history: History, evaluation: Result | str | None) -> str:
    """The figures a reader looks for first, each with the name that says what it counts."""
    steps = history.steps
    shown = {
        "steps": f"{steps[-1].global_step:,}",
        "training loss, last 20 steps": number(weighted_loss(steps[-20:])),
        "real tokens/s, full step wall time": f"{rate(steps):,.0f}",
        "real tokens trained on": f"{sum(s.real for s in steps):,}",
        "padding, share of slots": percent(padding(steps)),
        "time in steps": duration(sum(history.spent_s.values())),
    }
    if any(s.flops for s in steps):
        shown["FLOP/s of the model, full step wall time"] = metric(flop_rate(steps))
    if (mfu := utilisation(steps)) is not None:
        shown["MFU, share of the bf16 peak"] = percent(mfu)
    losses = [v.loss for v in history.validations if v.loss is not None]
    if losses:
        shown["validation loss, best"] = number(min(losses))
    if isinstance(evaluation, Result):
        asked = "questions partly learned from" if evaluation.warning else "held-out questions"
        shown[f"exact match, {asked}"] = percent(evaluation.accuracy)
    return figures_list(shown)


def evaluated(evaluation: Result | str | None) -> list[str]:
    """Accuracy by kind beside the blind prior's, and the samples with their pictures."""
    match evaluation:
        case None:
            return []
        case str():
            return [f"<h2>Evaluation</h2>\n{note(evaluation)}"]
        case Result():
            pass
    blind = evaluation.blind
    rows = [("all", evaluation.overall, blind.overall)]
    if any(evaluation.by_kind):
        rows += [(kind, score, blind.by_kind[kind]) for kind, score in evaluation.by_kind.items()]
    shown = [(kind or "no kind", f"{score.questions:,}", percent(score.accuracy), percent(guess.accuracy)) for kind, score, guess in rows]
    notes = [f"Without looking: {blind.how}", f"Answers cut at {evaluation.max_tokens} tokens: {evaluation.cut}."]
    notes += [f"{name}: {evaluation.stamps[name]}" for name in ("checkpoint", "commit", "hardware") if evaluation.stamps.get(name)]
    if evaluation.rejected:
        notes.append(f"Not asked, since they were rejected: {', '.join(f'{n} {cause}' for cause, n in evaluation.rejected.items())}.")
    if evaluation.given:
        notes.append(f"The last question of each sample is asked; {evaluation.given:,} answers before it were given.")
    return [
        "<h2>Evaluation</h2>",
        *([warning(evaluation.warning)] if evaluation.warning else []),
        table(("kind", "questions", "exact match", "without looking"), shown, numbers=1),
        *map(note, notes),
        "<h2>Questions and answers</h2>",
        '<div class="samples">',
        *map(sample, evaluation.samples),
        "</div>",
    ]


def sample(asked: Asked) -> str:
    """One question with its picture, the model's answer, and the true one where they differ."""
    images = "".join(f'<img alt="" src="{p}">' for p in asked.pictures if PICTURE.fullmatch(p))
    verdict = "right" if asked.correct else "wrong"
    lines = (
        f"<p>{words(asked.question)}</p>",
        f'<p class="{verdict}"><b>{words(asked.prediction)}</b> ({verdict})</p>',
        "" if asked.correct else f"<p>answer: {words(asked.answer)}</p>",
        f'<p class="note">{words(asked.kind)} · {words(asked.id)}</p>',
    )
    return f'<div class="sample">{images}{"".join(lines)}</div>'


def curves(history: History) -> list[str]:
    """The plots, each in a figure whose caption defines what is drawn."""
    # here, since matplotlib takes half a second to import, and a run imports this file before it has anything to draw
    from eyeline.study.plots import Curve, plot

    steps = history.steps
    x = [s.global_step for s in steps]
    befores = (None, *(s.stage for s in steps))
    borders = [(s.global_step, s.stage) for before, s in zip(befores, steps, strict=False) if before != s.stage]
    parts = list(dict.fromkeys(part for s in steps for part in s.lr))  # of all stages: each trains some
    loss = [Curve("training", x, [s.loss for s in steps], weight=[s.supervised for s in steps])]
    if found := history.validations:
        loss.append(Curve("validation", [v.global_step for v in found], [v.loss for v in found], dots=True))
    waits = [100 * s.seconds.get("data_wait", 0.0) / s.step_s if s.step_s > 0 else None for s in steps]
    shares = [
        Curve("padding", x, [100 * s.padding for s in steps], weight=[s.slots for s in steps]),
        Curve("data wait", x, waits, weight=[s.step_s for s in steps]),
    ]

    def shown(label: str, caption: str, curves: Sequence[Curve], log: bool = False) -> str:
        return figure(plot(curves, label, borders, log), caption)

    rates = [Curve("rate", x, [s.real_tokens_per_s for s in steps])]
    counted = dict.fromkeys(part for s in steps for part in s.flops)
    flops = [Curve(p, x, [s.flops.get(p, 0) / s.step_s / 1e9 if s.step_s > 0 else None for s in steps]) for p in counted]
    norms = [Curve("norm", x, [s.grad_norm for s in steps])]
    memory = [Curve("memory", x, [s.memory_bytes / 2**30 for s in steps])]
    return [
        shown("loss", "Loss a supervised token. Merged steps: their mean over tokens, in a band from least to greatest.", loss, log=True),
        shown("real tokens/s", "Real tokens (no padding) over the step's full wall time.", rates),
        *([shown("GFLOP/s", FLOPS, flops)] if flops else []),
        shown("learning rate", "Learning rate of each part that trains.", [Curve(p, x, [s.lr.get(p) for s in steps]) for p in parts]),
        shown("gradient norm", "Norm of all gradients before clipping.", norms, log=True),
        shown("%", "Padding as a share of token slots, and waiting for data as a share of the step's wall time.", shares),
        shown("GiB", "Memory at its peak: the device's, or on a CPU the process's.", memory),
    ]


def stage_table(history: History) -> str:
    """A row a stage: every mean is a sum divided once."""
    stages = dict.fromkeys((s.stage_index, s.stage) for s in history.steps)
    rows = []
    for index, name in stages:
        steps = [s for s in history.steps if (s.stage_index, s.stage) == (index, name)]
        wait = sum(s.seconds.get("data_wait", 0.0) for s in steps) / (sum(s.step_s for s in steps) or 1)
        rows.append(
            (
                name,
                f"{len(steps):,}",
                number(weighted_loss(steps[-20:])),
                f"{sum(s.real for s in steps):,}",
                f"{sum(s.supervised for s in steps):,}",
                f"{sum(s.images for s in steps):,}",
                metric(sum(sum(s.flops.values()) for s in steps)) if any(s.flops for s in steps) else "–",
                f"{rate(steps):,.0f}",
                percent(padding(steps)),
                percent(wait),
                f"{max(s.memory_bytes for s in steps) / 2**30:.2f}",
            )
        )
    head = ("stage", "steps", "last loss", "real tokens", "supervised", "images encoded", "FLOPs", "real tokens/s")
    return table((*head, "padding", "data wait", "GiB"), rows, numbers=1)


def ledger(history: History) -> str:
    """Seconds by cause over all attempts, lost work included; they add up to the time in steps."""
    total = sum(history.spent_s.values())
    causes = sorted(history.spent_s.items(), key=lambda item: -item[1])
    rows = [(name.replace("_", " "), f"{seconds:,.1f} s", percent(seconds / (total or 1))) for name, seconds in causes]
    return table(("cause", "time", "share"), [*rows, ("all steps", f"{total:,.1f} s", percent(1.0))], numbers=1)


def rejected(rejects: RejectSummary) -> list[str]:
    """Rejected samples: counts by cause, then the first lines."""
    if not rejects.by_cause:
        return []
    columns = ("id", "file", "row", "field", "cause", "message")
    first = [[str(line.get(c, ""))[:300] for c in columns] for line in rejects.first]
    return ["<h2>Rejected samples</h2>", table(("cause", "samples"), rejects.by_cause, numbers=1), table(columns, first)]


def weighted_loss(steps: Sequence[Step]) -> float | None:
    """Loss a supervised token over several steps."""
    known = [(s.loss, s.supervised) for s in steps if s.loss is not None]
    count = sum(n for _, n in known)
    return sum(loss * n for loss, n in known) / count if count else None


def rate(steps: Sequence[Step]) -> float:
    """Real tokens a second: all tokens over all wall time, never a mean of rates."""
    seconds = sum(s.step_s for s in steps)
    return sum(s.real for s in steps) / seconds if seconds > 0 else 0.0


def flop_rate(steps: Sequence[Step]) -> float:
    """FLOPs that the model needed, a second."""
    seconds = sum(s.step_s for s in steps)
    return sum(sum(s.flops.values()) for s in steps) / seconds if seconds > 0 else 0.0


def utilisation(steps: Sequence[Step]) -> float | None:
    """The share of the device's peak over all steps of which it is known."""
    known = [(s.mfu, s.step_s) for s in steps if s.mfu is not None]
    seconds = sum(spent for _, spent in known)
    return sum(mfu * spent for mfu, spent in known) / seconds if seconds > 0 else None


def padding(steps: Sequence[Step]) -> float:
    """Share of slots that is padding."""
    slots = sum(s.slots for s in steps)
    return 1 - sum(s.real for s in steps) / slots if slots else 0.0


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
