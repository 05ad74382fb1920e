"""Problems of a recipe that are found before training: settings against each other, against the model, the machine's folders and the
sources. Nothing is printed here.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from eyeline.bundle.bundle import Bundle
from eyeline.core.batch import Sample
from eyeline.core.errors import Refused, nearest
from eyeline.core.plan import Part, Plan
from eyeline.core.randomness import seed_for
from eyeline.core.words import counted, percent
from eyeline.data.containers.container import RETRIES
from eyeline.data.reader import reader_of, sizing_of
from eyeline.data.report.report import DataReport
from eyeline.data.sets import open_each, open_sides
from eyeline.data.sources.folders import parse_location
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.sources.unread import unread
from eyeline.evals.metric import metric_named
from eyeline.kernels.nf4 import BLOCK
from eyeline.models import Model
from eyeline.models import spec as spec_of
from eyeline.models.lora import experts_problems, quantizable, targets_of, unknown_target
from eyeline.models.moe import Bias
from eyeline.models.shape import savable, shape
from eyeline.parallel.mesh import model_problems
from eyeline.parallel.mesh import problems as mesh_problems
from eyeline.train.graph_start import graph_problems, model_problem
from eyeline.train.in_backward import in_backward_problems
from eyeline.train.loop import run_folder
from eyeline.train.run import Adapted, Full, Run, Stage
from eyeline.train.samples import sample_problems
from eyeline.train.start import description_at
from eyeline.train.trackers.trackers import missing
from eyeline.train.trainable import (
    EMBEDDING,
    adapters_of,
    axis_problems,
    checkpointed,
    rank_problems,
    trained_in_full,
)

LOOKED_AT = 100  # samples of a source, for what all of its samples should have


class Finding(NamedTuple):
    """A line about a recipe: a problem, or what is only warned of."""

    text: str
    warns: bool = False


def refuse_problems(run: Run, world_size: int = 1) -> list[str]:
    """Raise Refused with every problem that can be found without reading each sample; else return the warnings. `world_size`: the number
    of ranks that are to train."""
    found = [*findings(run)]
    problems = [line.text for line in found if not line.warns]
    problems += [line for line in problems_of_ranks(run, world_size) if line not in problems] if world_size > 1 else []
    if problems:
        raise Refused(problem_list(run.name, problems))
    return list(dict.fromkeys(line.text for line in found if line.warns))


def problem_list(name: str, found: list[str]) -> str:
    count = counted(len(found), "problem")
    return f"{name} has {count}:\n" + "\n".join(f"  {line}" for line in found)


def settings_problems(run: Run) -> Iterator[str]:
    """Settings against each other, the model, the machine's folders and the sources: one line per problem."""
    yield from (line.text for line in findings(run) if not line.warns)


def findings(run: Run) -> Iterator[Finding]:
    """The same, and what to warn of: of the model, and of the sources."""
    yield from (Finding(line, warns=True) for line in _untrained_parts(run))
    of_sources = [*_source_findings(run)]
    yield from (line for line in of_sources if line.warns)
    yield from map(Finding, _settings_problems(run, [line.text for line in of_sources if not line.warns]))


def problems_of_ranks(run: Run, world_size: int) -> Iterator[str]:
    """What does not fit a number of ranks."""
    of_mesh = [(stage, line) for stage in run.stages for line in mesh_problems(run.mesh, world_size, stage.batch.packs_per_step)]
    yield from dict.fromkeys(f"stages.{stage.name}.{line}" if line.startswith("batch.") else line for stage, line in of_mesh)
    yield from sample_problems(run, world_size)
    yield from rank_problems(run, world_size)


def _random_parts(run: Run) -> list[Part]:
    """Parts that start from random weights."""
    if run.model.config is not None:
        return [part for part in spec_of(run.model.config).parts if part not in run.model.weights]
    return list(run.model.fresh)


def _dora_problems(run: Run) -> Iterator[str]:
    """DoRA where rows of a weight are zero, as random weights have them at the end of each branch: their length would stay zero."""
    for index, stage in enumerate(run.stages):
        before = trained_in_full(run.stages[:index])
        for part, lora in adapters_of(stage).items():
            if lora.quantize != "none" and part in _random_parts(run) and part not in before:
                yield (
                    f"stages.{stage.name}.trains.{part}.quantize: the {part} starts from random weights, which nothing trains any more in "
                    "4 bits. Train it with how: full in a stage before, or give it weights"
                )
            if lora.dora and part in _random_parts(run) and part not in before:
                yield (
                    f"stages.{stage.name}.trains.{part}.dora: the {part} starts from random weights, and where their rows are zero DoRA "
                    "trains nothing. Train it with how: full in a stage before, give it weights, or leave dora out"
                )


def _untrained_parts(run: Run) -> Iterator[str]:
    """Parts that start from random weights and that no stage trains in full."""
    trained = trained_in_full(run.stages)
    for part in _random_parts(run):
        if part not in trained:
            how = "is only adapted" if any(part in stage.trains for stage in run.stages) else "is never trained"
            yield f"model: the {part} starts from random weights and {how}. Train it with how: full in a stage, or give it weights"
    if run.model.add_tokens and not any("language" in stage.trains for stage in run.stages):
        yield "model: add_tokens adds rows to the embedding, and no stage trains the language model: they stay what they start as"


def _settings_problems(run: Run, unreadable: list[str]) -> Iterator[str]:
    """All problems; `unreadable` are those of the sources."""
    yield from mesh_problems(run.mesh, None)
    yield from _dora_problems(run)
    yield from in_backward_problems(run)
    yield from graph_problems(run)
    yield from folder_problems(run_folder(run))
    yield from missing(run.report_to)
    yield from sample_problems(run)
    try:
        bundle = description_at(run, run_folder(run))
        encoder = bundle.encoder()
    except Refused as error:
        if not any(line.endswith(str(error)) for line in unreadable):  # a fresh tokenizer is made from the same sources
            yield f"model: {error}"
    else:
        plan = shape(bundle.config, trains={})
        spec = plan.spec
        if encoder.vocabulary > spec.vocab_size:
            raised = f"raise language.vocab_size to {encoder.vocabulary}, or "
            if "language" in run.model.weights:  # whose embedding has the rows that it has
                raised = "leave template out, or " if run.model.template is not None else ""
            yield (
                f"model: the tokenizer gives ids up to {encoder.vocabulary - 1}, and the language model has {spec.vocab_size} rows; "
                f"{raised}use the tokenizer that belongs to the model"
            )
        if run.mesh.balance_images and spec.vision is None:
            yield "mesh.balance_images: the model reads text only, and has no images to be dealt. Leave it out"
        budgets = [stage.batch.budget.tokens for stage in run.stages if stage.batch.chosen]
        yield from dict.fromkeys(line for budget in budgets for line in model_problems(run.mesh, plan, budget))
        yield from axis_problems(run)
        if run.cuda_graph and (problem := model_problem(plan)):
            yield problem
        for index, stage in enumerate(run.stages):
            yield from _stage_problems(f"stages.{stage.name}", stage, plan)
            yield from _new_token_problems(f"stages.{stage.name}", run, stage, plan)
            if stage.data.prepared is not None:
                try:
                    seed = seed_for(run.seed, "stage", index)
                    sizing_of(reader_of(stage.data, encoder, spec.image, seed, longest=spec.max_positions), stage.batch.budget)
                except Refused as error:
                    if (line := f"stages.{stage.name}.data: {error}") not in unreadable:
                        yield line
    yield from unreadable


def _source_findings(run: Run) -> Iterator[Finding]:
    """Problems of the sources of stages and evaluation: they cannot be opened, nothing is left of them, or images are not read."""
    for stage in run.stages:
        try:
            found = open_sides(stage.data)
            every = (*found.sources, *(() if found.validation is found.sources else found.validation))
            for rows in every:
                if not any(True for _ in rows.kept_rows()):
                    yield Finding(f"stages.{stage.name}.data: {rows.source.path} has no sample left after {rows.source.choice}")
            unseen = [line for rows in every if found.prepared is None for line in _unread_findings(f"stages.{stage.name}.data", rows)]
            yield from unseen
            if stage.distill is not None and not _with_probabilities(found.sources):
                yield Finding(
                    f"stages.{stage.name}.distill: none of the first samples has the token probabilities of a teacher, which "
                    "`eyeline distill --top-logprobs` stores. Distill again, or leave it out"
                )
            need = [part for part in stage.trains if part != "language"]
            if need and all(line.warns for line in unseen) and _without_images(found.sources):
                yield Finding(
                    f"stages.{stage.name}: trains {' and '.join(need)}, which need images, and no sample has one; "
                    "leave them out of trains, or add data with images"
                )
        except Refused as error:
            sources = () if stage.data.prepared else (*stage.data.sources, *stage.data.validation)
            why = _opening_errors(sources, stage.data.read_retries) or [str(error)]
            yield from (Finding(f"stages.{stage.name}.data: {line}") for line in why)
    if run.evaluation:
        try:
            metric_named(run.evaluation.metric)
        except Refused as error:
            yield Finding(f"evaluation.metric: {error}")
        try:
            asked = open_each(run.evaluation.sources)
            if not any(True for rows in asked for _ in rows.kept_rows()):
                yield Finding(f"evaluation: its sources have no question left after {run.evaluation.sources[0].choice}")
            for rows in asked:
                yield from _unread_findings("evaluation", rows)
        except Refused as error:
            yield from (Finding(f"evaluation: {line}") for line in _opening_errors(run.evaluation.sources) or [str(error)])


def _unread_findings(where: str, rows: Rows) -> Iterator[Finding]:
    """Problems of images that rows name and nothing reads."""
    found = unread(rows)
    yield from (Finding(f"{where}: {line}", warns=True) for line in found.warnings)
    if found.refusal is not None:
        yield Finding(f"{where}: {found.refusal}")


def _with_probabilities(sources: Iterable[Rows]) -> bool:
    """Return whether one of the first samples has what its teacher found likely."""
    first = (row for rows in sources for _, _, row in islice(rows.kept_rows(), LOOKED_AT))
    return any(message.likely is not None for row in first if isinstance(row, Sample) for message in row.messages)


def _without_images(sources: Iterable[Rows]) -> bool:
    """Return whether there are samples, and none has an image."""
    seen = False
    for row in (row for rows in sources for _, _, row in rows.kept_rows() if isinstance(row, Sample)):
        seen = True
        if row.media:
            return False
    return seen


def _opening_errors(sources: Iterable[Source], retries: int = RETRIES) -> list[str]:
    """The errors of the sources that cannot be opened."""
    found: list[str] = []
    for source in sources:
        try:
            open_source(source, retries)
        except Refused as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _stage_problems(where: str, stage: Stage, plan: Plan[Model]) -> Iterator[str]:
    spec = plan.spec
    for part, trained in stage.trains.items():
        if part not in spec.parts:
            yield f"{where}: trains {part}, and the model has {', '.join(spec.parts)}"
        elif isinstance(trained, Adapted) and not isinstance(trained.targets, str):
            known = targets_of(plan.model, spec, part)
            for target in trained.targets:
                if target not in known:
                    yield f"{where}.trains.{part}.targets: {unknown_target(target, known)}"
        if part in spec.parts:
            yield from _part_problems(f"{where}.trains.{part}", part, trained, plan)
    for part in checkpointed(stage, plan.blocks):
        if part not in plan.blocks:
            yield f"{where}: gradient_checkpointing names {part}, which has no blocks; {', '.join(plan.blocks)} have"
    if stage.experts is not None and spec.language.experts is None:
        yield f"{where}: experts sets how experts are balanced, and the model has no experts; leave it out"
    if isinstance(stage.experts, Bias) and "language" not in stage.trains:
        yield f"{where}: experts.balance=bias moves biases of the language model, which is frozen; leave experts out, or train language"
    image = spec.image
    if image is None or not stage.batch.chosen:
        return
    batch = stage.batch.budget
    smallest = image.units(1, 1)
    tokens, patches = sum(unit.tokens for unit in smallest), sum(unit.grid.patches for unit in smallest)
    if spec.max_positions <= tokens:
        yield f"{where}: an image has {tokens} tokens, and the language model was made for {spec.max_positions} positions"
    if batch.patches < patches:
        yield f"{where}: batch.max_patches={batch.patches} cannot hold one image, which has {patches} patches"
    if batch.tokens <= tokens:
        yield f"{where}: batch.max_tokens={batch.tokens} cannot hold one image ({tokens} tokens) with any text"


def _new_token_problems(where: str, run: Run, stage: Stage, plan: Plan[Model]) -> Iterator[str]:
    """Rows of new tokens that a stage would train in one of two places."""
    trained = stage.trains.get("language")
    if run.model.add_tokens and isinstance(trained, Adapted):
        named = EMBEDDING & set(trained.modules_to_save)
        if named and (left := EMBEDDING.intersection(savable(plan.model, plan.spec, "language")) - named):
            yield (
                f"{where}.trains.language.modules_to_save: {' and '.join(named)} would train the rows of model.add_tokens, and "
                f"{' and '.join(left)} would not. Name both, or none: then only the new rows train"
            )


def _part_problems(where: str, part: Part, trained: Full | Adapted, plan: Plan[Model]) -> Iterator[str]:
    """Settings of what a part trains that name what it does not have."""
    blocks = [name for name in plan.blocks.get(part, ()) if plan.spec.uses(name)]
    if trained.freeze_layers and not blocks:
        yield f"{where}.freeze_layers={trained.freeze_layers}, and the {part} has no blocks; leave it out"
    elif trained.freeze_layers >= max(len(blocks), 1):
        yield f"{where}.freeze_layers={trained.freeze_layers} leaves none of its {len(blocks)} blocks to train; lower it"
    if isinstance(trained, Adapted):
        yield from (f"{where}.{problem}" for problem in experts_problems(trained))
        if trained.quantize != "none" and not quantizable(plan.model, part):
            yield f"{where}.quantize: no linear layer of the {part} has a multiple of {BLOCK} inputs, which NF4 needs. Leave it out"
        known = savable(plan.model, plan.spec, part)
        for name in trained.modules_to_save:
            if name == "lm_head" and part == "language" and "embed_tokens" in known and name not in known:
                yield (
                    f"{where}.modules_to_save: lm_head is tied to embed_tokens in this model: they are one tensor. Name embed_tokens "
                    "instead, and both train"
                )
            elif name not in known:
                there = f"There are {', '.join(known)}." if known else f"The {part} has none."
                yield f"{where}.modules_to_save: there is no module {name!r} to train in full.{nearest(name, list(known))} {there}"


def folder_problems(folder: Path) -> Iterator[str]:
    """The reasons why this cannot be a run folder."""
    text = str(folder)
    if any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in text):
        yield f"out: {text!r} has control characters, or bytes that are not UTF-8; choose a plain name"
        return
    if any(len(piece.encode()) > 200 for piece in folder.parts):
        yield f"out: a component of {text[:60]}... is longer than 200 bytes; choose a shorter name"
        return
    if text.startswith("~"):
        yield f"out: {text} starts with ~, and this user has no home folder here; write the whole path"
        return
    try:
        real = folder.resolve(strict=False)
        os.stat(folder)
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError) as error:
        yield f"out: {text} cannot be a folder: {error}"
        return
    if real == Path(real.anchor) or real == Path.home():
        yield f"out: {real} is not a folder to put a run in; choose one below it, such as runs/name"
    elif real.exists() and not real.is_dir():
        yield f"out: {text} is a file; choose another name"
    else:
        parent = next(p for p in (real, *real.parents) if p.exists())
        if not parent.is_dir():
            yield f"out: {parent} is a file, and the run folder would be inside it"
        elif not os.access(parent, os.W_OK | os.X_OK):
            yield f"out: {parent} cannot be written to; choose another out="


def untrained_tokens(run: Run, bundle: Bundle) -> Iterator[str]:
    """Control tokens that import added to a pretrained model: what their embedding rows hold means nothing until they are trained."""
    if not bundle.untrained:
        return
    full = [stage.name for stage in run.stages if isinstance(stage.trains.get("language"), Full)]
    if full:
        fate, remedy = f"stage {' and '.join(full)} starts to train them", ""
    else:
        fate = "no stage will, since LoRA leaves embeddings as they are"
        remedy = " Train language with how: full in a stage, or name them in model.add_tokens."
    yield (
        f"model: the template {bundle.template!r} writes {', '.join(bundle.untrained)}, which import added to the tokenizer. Nothing has "
        f"trained their embedding rows, and {fate}.{remedy} Import a model whose own template Eyeline knows without --template"
    )


def evaluation_warnings(run: Run) -> Iterator[str]:
    """Sources of the evaluation that stages learn from; `eyeline data` compares the content of other sources, and `eyeline eval` counts."""
    for asked in run.evaluation.sources if run.evaluation else ():
        learning = [
            stage.name
            for stage in run.stages
            for source in stage.data.sources
            if parse_location(source.path) == parse_location(asked.path) and _share_kinds(source, asked)
        ]
        if learning:
            yield (
                f"evaluation: {asked.path} is trained on in {' and '.join(dict.fromkeys(learning))}, so its score says nothing about new "
                "questions; give evaluation.sources data that no stage trains on"
            )


def _share_kinds(a: Source, b: Source) -> bool:
    return a.categories is None or b.categories is None or bool(set(a.categories) & set(b.categories))


def data_problems(stage: Stage, report: DataReport) -> Iterator[str]:
    """Problems of the examined samples that would stop training."""
    rejected = sum(report.rejects.values())
    if report.examined and rejected == report.examined:
        yield f"{stage.name}: no examined sample can be used ({_causes(report)})"
    elif report.trained_rejected > stage.data.max_reject_rate * report.trained:  # as training counts: each row that is trained on, once
        yield (
            f"{stage.name}: {report.trained_rejected} of {report.trained} examined training samples would be rejected, and "
            f"max_reject_rate is {percent(stage.data.max_reject_rate)} ({_causes(report)}); "
            f"fix them{_longer(report)}, or raise it if dropping them is acceptable"
        )


def _longer(report: DataReport) -> str:
    return (
        ", give too_long ones a larger batch.max_tokens (up to the model's positions) or overlong: drop_turns"
        if "too_long" in report.rejects
        else ""
    )


def _causes(report: DataReport) -> str:
    return ", ".join(f"{cause} {count}" for cause, count in report.rejects.items())
