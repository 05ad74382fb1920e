"""The report on data: a list of blocks, which a terminal prints and a page shows, so that both say the same.

Everything is made into words here, from the records of `data/report/report.py`; data that is quoted is cut to a length, and whatever
prints or writes it makes it harmless.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyeline.core.image_rule import ImageRule
from eyeline.core.words import counted, percent
from eyeline.data.rejects import CAUSES, REMEDIES
from eyeline.data.report.budgets import LOST, WASTE, Load, Packing, suggest_budget
from eyeline.data.report.duplicates import Duplicates
from eyeline.data.report.preview import SamplePreview
from eyeline.data.report.report import DataReport, Images, Measure
from eyeline.models.flops import NONE, Arithmetic, Flops, Work
from eyeline.study import page
from eyeline.study.page import metric, words
from eyeline.train.run import Batching

MUCH_WASTE = 0.25  # padding that is warned of
FEW_IMAGES, MANY_SAMPLES = 1_000, 4  # different images, and samples per image: fewer images and as many samples are warned of
LONGEST_CELL = 300  # characters of what is quoted
MOST_ROWS = 200  # of a table
PARTS = ("vision", "projector", "language", "head")
LARGEST_PAGE = 5 << 20  # bytes


@dataclass(frozen=True)
class Heading:
    text: str
    part: bool = False  # of a stage: for pages only


@dataclass(frozen=True)
class Line:
    text: str
    warns: bool = False


@dataclass(frozen=True)
class Grid:
    """A table. `line` says how a row reads in a terminal where its cells are too long for columns: "{0}: {1}"."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    line: str | None = None
    numbers: int = 1  # columns from here on are numbers


@dataclass(frozen=True)
class Histogram:
    """A figure for pages only: its numbers are in a table, too."""

    label: str
    caption: str
    measure: Measure


Block = Heading | Line | Grid | Histogram | SamplePreview


@dataclass(frozen=True)
class StageData:
    """A stage, and what was found of its data."""

    name: str
    batch: Batching
    report: DataReport
    samples: tuple[SamplePreview, ...]
    flops: tuple[Flops, ...] = ()  # of the load of each budget; none where they were not counted
    same_as: str | None = None  # an earlier stage with the same data and budget: only the FLOPs are shown again


def flops_of(packing: Packing, arithmetic: Arithmetic, rule: ImageRule | None) -> Flops:
    """The FLOPs of the packs of a budget."""

    def of(load: Load) -> Flops:
        if not load.packs:
            return NONE
        visual = load.patch // rule.merge**2 if rule else 0
        return arithmetic.of_work(Work(load.patch, load.patch_pair, visual, load.token, load.pair, load.label))

    return of(packing.with_images) + of(packing.texts)


def blocks(found: StageData) -> Iterator[Block]:
    """All lines about a stage's data."""
    report = found.report
    yield Heading(f"stage {found.name}")
    if found.same_as is not None:
        yield Line(f"Its data and its batches are those of stage {found.same_as}.")
        yield from _budgets(found)
        return
    yield Heading("Sources", part=True)
    several = len(report.sources) > 1
    shares = ("share of samples", "share of tokens", "share of visual tokens") if several else ()
    yield Grid(
        ("source", "layout", "detected from", "samples", "held out", "per epoch", *shares),
        _sources(report, several),
        "{0}: {1} ({2}), {3} samples, {4} of them held out for validation, {5} per epoch"
        + ("; {6} of the samples, {7} of the tokens, {8} of the visual tokens" if several else ""),
        numbers=3,
    )
    for source in report.sources:
        if source.where is not None:
            share = percent(source.left_out / max(source.left_out + source.rows, 1))
            yield Line(
                f"{shorten(source.path)}: where: {source.where} keeps {_about(report)}{source.rows:,} samples, and leaves out "
                f"{_about(report)}{source.left_out:,} ({share})"
            )
    yield Line(
        f"{_about(report)}{report.training:,} training samples, {report.validation:,} validation samples; {report.examined:,} examined"
    )
    yield from image_lines(report.images, "" if report.exact else f"of the {report.looked:,} rows looked at, ")
    if epoch := report.epoch:
        yield Line(f"one epoch: about {epoch.tokens:,.0f} tokens, {epoch.visual:,.0f} of them visual, from {epoch.visits:,.0f} samples")
    if kinds := _kinds(report):
        yield Grid(("source", "kind", "samples", "share"), kinds, numbers=2)
    yield Heading("Sizes", part=True)
    yield Grid(("", "min", "median", "mean", "p99", "max"), _measures(report))
    yield from _histograms(report)
    batch = found.batch
    yield Heading("Batches", part=True)
    yield Line(f"one step: {batch.packs_per_step:,} × up to {batch.budget.tokens:,} tokens and {batch.budget.patches:,} patches")
    yield from _budgets(found)
    yield Heading("Invalid and unusual samples", part=True)
    yield from _unusual_lines(report)
    yield from _rejects(report)
    if report.duplicates is not None:
        yield Heading("Duplicates and overlap", part=True)
        yield from _duplicates(report.duplicates, report)
    if found.samples:
        yield Heading("Samples", part=True)
        yield Line("the first samples, as the model sees them; tokens in the loss are green:")
        yield from found.samples


def image_lines(images: Images, where: str) -> Iterator[Line]:
    """The number of different images."""
    samples, different = images.samples, images.different
    if not different:
        return
    what = counted(different, "different image")
    said = f"{where}{samples:,} samples with images show {what} ({samples / different:,.1f} samples per image)"
    if different < FEW_IMAGES and samples >= MANY_SAMPLES * different:
        yield Line(
            f"{said}: too few different images are the most common reason why a model does not learn from images. Add images rather "
            f"than questions",
            warns=True,
        )
    else:
        yield Line(said)


def _about(report: DataReport) -> str:
    return "" if report.exact else "about "  # of large data only some shards are looked at


def _sources(report: DataReport, several: bool) -> tuple[tuple[str, ...], ...]:
    rows = []
    for source in report.sources[:MOST_ROWS]:
        often = f"by weight {source.weight:g}" if source.weight != 1 else "once" if source.repeat == 1 else f"{source.repeat:,} times"
        many, validating = _about(report) + f"{source.rows:,}", f"{source.validation:,}"
        shares = map(percent, (source.visits, source.tokens, source.visual)) if source.training else "–––"
        rows.append((shorten(source.path), source.layout, shorten(source.why), many, validating, often, *(shares if several else ())))
    return tuple(rows)


def _kinds(report: DataReport) -> tuple[tuple[str, ...], ...]:
    """Nothing where a source has one kind only."""
    rows: list[tuple[str, ...]] = []
    for source in report.sources:
        whole = sum(count for _, count in source.kinds)
        if len(source.kinds) > 1:
            rows += [(shorten(source.path), shorten(kind, 60), f"{count:,}", percent(count / whole)) for kind, count in source.kinds]
        if source.more_kinds:
            rows.append((shorten(source.path), f"{source.more_kinds:,} more kinds", "", ""))
    return tuple(rows[:MOST_ROWS])


def _measures(report: DataReport) -> tuple[tuple[str, ...], ...]:
    whole = {
        "tokens per sample": report.tokens,
        "of these, text": report.text,
        "of these, visual": report.visual,
        "of these, in the loss": report.supervised,
        "tokens per answer": report.answers,
        "images per sample": report.images_per_sample,
        "image width, pixels": report.widths,
        "image height, pixels": report.heights,
    }
    rows = [_measure(name, measure, 0) for name, measure in whole.items()]
    return (*rows, _measure("width / height", report.aspects, 2))


def _measure(name: str, measure: Measure | None, places: int) -> tuple[str, ...]:
    if measure is None:
        return (name, *["–"] * 5)
    mean = f"{measure.mean:,.{max(places, 1)}f}"
    least, median, high, most = (f"{v:,.{places}f}" for v in (measure.least, measure.median, measure.high, measure.most))
    return name, least, median, mean, high, most


def _histograms(report: DataReport) -> Iterator[Histogram]:
    shown = (
        ("tokens per sample", "All tokens of a sample, visual ones included.", report.tokens),
        ("text tokens", "Its text tokens, those of the chat template included.", report.text),
        ("visual tokens", "Its visual tokens.", report.visual),
        ("tokens per answer", "Tokens of an answer in the loss, its end-of-turn token included.", report.answers),
        ("width, pixels", "Images as they are stored, after EXIF rotation.", report.widths),
        ("height, pixels", "Images as they are stored, after EXIF rotation.", report.heights),
        ("width / height", "Below 1: portrait. Above 1: landscape.", report.aspects),
        ("images per sample", "Images and videos of a sample.", report.images_per_sample),
    )
    yield from (Histogram(label, caption, measure) for label, caption, measure in shown if measure and measure.least < measure.most)


def _budgets(found: StageData) -> Iterator[Block]:
    report = found.report
    if not report.budgets:
        return
    names = [f"{p.budget.tokens:,}" + (" (now)" if n == 0 else "") for n, p in enumerate(report.budgets)]
    rows = tuple((name, *_packing(p)) for name, p in zip(names, report.budgets, strict=True))
    yield Grid(("batch.max_tokens", "patches", "samples", "padding", "patches used", "too long"), rows)
    yield Line("padding: unused token positions; too long: samples over batch.max_tokens, batch.max_patches or the model's context length")
    now, *others = report.budgets
    if now.settled and now.waste > MUCH_WASTE:
        why = (
            "batch.max_patches fills up long before"
            if now.patch_share > 1 - MUCH_WASTE
            else "samples are long for it, and few fit together"
        )
        remedy = "" if others else ". `eyeline data` tries other sizes"
        yield Line(f"{percent(now.waste)} of batch.max_tokens is padding: {why}{remedy}", warns=True)
    if found.flops:
        packs = [packing.load.packs for packing in report.budgets]
        costs = [(*(flops.by_part[part] for part in PARTS), flops.total) for flops in found.flops]
        rows = [(name, *(metric(cost / n) for cost in of)) for name, of, n in zip(names, costs, packs, strict=True)]
        yield Grid(("FLOPs per batch", *PARTS, "all"), tuple(rows))
        yield Line("FLOPs per batch: forward and backward passes as the stage trains, without recomputation")
    if report.epoch:
        steps = report.epoch.visits * now.load.packs / max(now.load.sample, 1) / found.batch.packs_per_step
        yield Line(f"1 epoch ≈ {steps:,.0f} steps with the current batch")
    best = suggest_budget(report.budgets)
    if best is not None and others:
        yield Line(suggestion(best, report.budgets, found.batch))


def _packing(packing: Packing) -> tuple[str, ...]:
    load = packing.load
    return (
        f"{packing.budget.patches:,}",
        f"{load.sample / load.packs:,.1f}",
        ("" if packing.settled else "about ") + percent(packing.waste),
        percent(packing.patch_share) if packing.budget.patches else "–",
        percent(packing.lost),
    )


def suggestion(best: Packing, packings: Sequence[Packing], batch: Batching) -> str:
    """The budget to take, as a line for the recipe, and why."""
    wanted = f"at most {percent(WASTE)} padding and {percent(LOST)} of the samples too long"
    if best.good:
        why = f"the smallest of these with {wanted}"
    else:
        why = f"none has {wanted}; this one comes closest" + ("" if best.settled else ", of few batches")
    if best is packings[0]:
        return f"suggested: the current batch ({why})"
    now, then = (p.load.token / p.load.packs for p in (packings[0], best))  # real tokens of a micro-batch: a step keeps about as many
    micro_batches = max(round(now * batch.packs_per_step / then), 1)
    line = f"batch: {{max_tokens: {best.budget.tokens}, max_patches: {best.budget.patches}, packs_per_step: {micro_batches}}}"
    return f"suggested, if the device has the memory: {line} ({why})"


def _unusual_lines(report: DataReport) -> Iterator[Line]:
    yield from (Line(line, warns=True) for line in report.unread)
    if not (report.unusual or report.rejects or report.control_strings or report.not_supervised or report.unread or report.refused):
        yield Line("all examined samples are usable")
    if report.unusual:
        unusual = ", ".join(f"{what} {count}" for what, count in report.unusual.items())
        yield Line(f"unusual but usable images (of {report.decoded:,}): {unusual}")
    if report.control_strings:
        yield Line(f"samples whose text spells a control token (trained on as text): {report.control_strings}")
    if report.masked:
        yield Line(f"answers that the data exclude from the loss: {report.masked:,} (of {report.masked + report.said:,})")
    if report.not_supervised:
        yield Line(
            f"{report.not_supervised:,} of {report.said:,} answers are not in the loss: the template {report.template} trains on the last "
            f"answer of a "
            "conversation only (docs/data.md#chat-templates). To train on each, write one row per turn",
            warns=True,
        )


def _rejects(report: DataReport) -> Iterator[Block]:
    if not report.rejects:
        return
    yield Grid(
        ("rejected", "samples", "share of examined", "what it means", "what to do"),
        tuple((c, f"{n:,}", percent(n / report.examined), CAUSES[c], REMEDIES[c]) for c, n in report.rejects.items()),
        "rejected: {0} {1} ({2}): {3}. {4}",
        numbers=5,
    )
    yield Line("the first of each cause; rows are counted from 0:")
    yield Grid(
        ("cause", "file", "row", "field", "message"),
        tuple((r.cause, shorten(r.file), f"{r.row}", shorten(r.field), shorten(r.message)) for r in report.rejected),
        "  {1} row {2}, {3}: {4} [{0}]",
        numbers=5,
    )


def _duplicates(duplicates: Duplicates, report: DataReport) -> Iterator[Block]:
    some = "" if duplicates.whole else f" of about {report.training:,} (so there may be more)"
    yield Line(
        f"duplicates: {duplicates.equal_samples:,} of {duplicates.samples:,} training samples{some}, {duplicates.equal_images:,} of "
        f"{duplicates.images:,} images"
    )
    pairs = [("sample", *pair) for pair in duplicates.sample_examples] + [("image", *pair) for pair in duplicates.image_examples]
    if pairs:
        yield Grid(("duplicate", "this", "equals"), _shorten_rows(pairs), "  {0} {1} equals {2}", numbers=3)
    for overlap in duplicates.overlaps:
        yield Line(
            f"{overlap.name} overlap with training: {overlap.equal_samples:,} of {overlap.samples:,} samples, {overlap.equal_texts:,} "
            f"question texts, {overlap.equal_images:,} of {overlap.images:,} images ({overlap.equal_paths:,} by path)",
            warns=overlap.equal_samples + overlap.equal_images > 0,
        )
        if overlap.examples:
            rows = _shorten_rows([(overlap.name, *pair) for pair in overlap.examples])
            yield Grid(("overlap", "this image", "is trained on as"), rows, "  {1} is trained on as {2}", numbers=3)


def _shorten_rows(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(shorten(cell) for cell in row) for row in rows)


def shorten(text: str, longest: int = LONGEST_CELL) -> str:
    """The text, or its begin and its end."""
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


# The page


def data_page(name: str, stages: Sequence[StageData], problems: Sequence[str]) -> str:
    """The page of a recipe's data. At most LARGEST_PAGE bytes: what does not fit is left out whole, with a note."""
    top = [f"<h1>{words(name)}</h1>", page.note("The data of this recipe as Eyeline reads them. Nothing was trained.")]
    top += [page.warning(problem) for problem in problems] or [
        page.note("No problem that would stop training. Warnings, if any, are marked below.")
    ]
    body: list[str] = []
    left_out = 0
    room = LARGEST_PAGE - len(page.document(name, top).encode()) - 1024
    for stage in stages:
        plots: list[str] = []
        for block in [*blocks(stage), None]:
            if isinstance(block, Histogram):
                plots.append(_plot(block))
                continue
            made = ['<div class="plots">', *plots, "</div>"] if plots else []
            plots = []
            made += [] if block is None else [_html(block)]
            size = len("\n".join(made).encode()) + 1
            if size > room:
                left_out += 1
                continue
            room -= size
            body += made
    rest = [page.note(f"{left_out:,} pieces are left out, since the page would be over {LARGEST_PAGE:,} bytes.")] if left_out else []
    return page.document(name, [*top, *body, *rest])


def _html(block: Heading | Line | Grid | SamplePreview) -> str:
    match block:
        case Heading(text, part):
            return f"<h3>{words(text)}</h3>" if part else f"<h2>{words(text)}</h2>"
        case Line(text, warns):
            return page.warning(text) if warns else page.note(text)
        case Grid(head, rows, _, numbers):
            return page.table(head, rows, numbers)
        case SamplePreview():
            return _sample(block)


def _plot(block: Histogram) -> str:
    from eyeline.study.plots import bars  # here, since matplotlib takes half a second to import

    return page.figure(bars(block.measure.edges, block.measure.bars, block.label, block.measure.log), block.caption)


def _sample(shown: SamplePreview) -> str:
    images = "".join(page.image(jpeg) for jpeg in shown.thumbnails)
    more = f", {shown.images - len(shown.thumbnails)} more images" if shown.images > len(shown.thumbnails) else ""
    about = f"{shorten(shown.id)} · {shorten(shown.source)} · {counted(shown.tokens, 'token')}, {shown.supervised:,} in the loss{more}"
    pieces = []
    for piece in shown.pieces:
        if piece.image is not None:
            pieces.append(f"<i>{words(image_words(piece.image, piece.tokens))}</i>")
        else:
            pieces.append(f"<b>{words(piece.text)}</b>" if piece.trained else words(piece.text))
    return f'<div class="seen"><p class="note">{words(about)}</p>{images}<p class="text">{"".join(pieces)}</p></div>'


def image_words(image: int, tokens: int) -> str:
    return f"[image {image}: {tokens} tokens]"
