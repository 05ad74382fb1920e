"""`eyeline prepare`: the data of one stage of a recipe, packed offline."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyeline.bundle.two_towers import open_two_towers
from eyeline.core.errors import Refused, nearest
from eyeline.core.files import make_folder
from eyeline.core.log import say
from eyeline.core.randomness import seed_for
from eyeline.core.words import counted
from eyeline.data.prepared.folder import MANIFEST, TOKENIZER
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data, open_each
from eyeline.data.signals import columns as signals
from eyeline.data.sources.sources import Source
from eyeline.data.text.tokenizer import save_tokenizer
from eyeline.models import spec as spec_of
from eyeline.offline.prepare import HERE, INDEXES, pack_offline
from eyeline.offline.report import JOBS
from eyeline.offline.run import Where
from eyeline.offline.signals import write_signals
from eyeline.train.run import Run
from eyeline.train.start import description
from eyeline.train.stop import sole_owner


def write_stage_signals(run: Run, stage: str | None, folder: Path, where: Where = HERE, similarity: Path | None = None) -> None:
    """Write the signals of all rows of a stage's sources, and of those of evaluation and distillation, into `folder`; with the folder of a
    model with two towers, the similarity of images and answers, too. Refused when `folder` holds something else, or several stages could
    be meant."""
    number = _stage_of(run, stage)
    chosen = run.stages[number].data
    if chosen.prepared is not None:
        raise Refused(f"signals are computed from the sources, and stage {run.stages[number].name} reads {chosen.prepared}. Leave it out")
    _refuse_strangers(folder, KNOWN_SIGNALS)
    bundle = description(run)
    spec = spec_of(bundle.config)
    towers = None if similarity is None else open_two_towers(similarity, run.device, run.threads)
    asked = [source for one in (run.evaluation, run.distill) if one is not None for source in one.sources]
    with _owned(folder, where):
        sources = open_each([*chosen.sources, *chosen.validation, *asked], chosen.read_retries)
        made = write_signals(sources, bundle.encoder(), spec.image, folder, where, towers)
    if made is None:
        _say_share_done(folder, where)
        return
    same = f"{made.duplicate:,} are duplicates of an earlier row, {made.near_duplicate:,} near-duplicates (duplicates included)"
    say(f"{folder}: signals of {counted(made.rows, 'row')}. {made.rows - made.usable:,} cannot be used, {same}. To see how they are "
        f"spread: eyeline report {folder}. To choose rows by them: where: of a source, with signals: {folder}")  # fmt: skip


def without_where(run: Run) -> Run:
    """The run with all rows of its sources: signals are computed before they can be chosen by."""

    def of(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        return tuple(source.model_copy(update={"where": None, "signals": None}) for source in sources)

    def data_of(data: Data) -> Data:
        return data.model_copy(update={"sources": of(data.sources), "validation": of(data.validation)})

    stages = tuple(stage.model_copy(update={"data": data_of(stage.data)}) for stage in run.stages)
    asked = {name: one for name in ("evaluation", "distill") if (one := getattr(run, name)) is not None}
    others = {name: one.model_copy(update={"sources": of(one.sources)}) for name, one in asked.items()}
    return run.model_copy(update={"stages": stages, **others})


def prepare_stage(run: Run, stage: str | None, folder: Path, epochs: int = 1, quality: int | None = None, where: Where = HERE) -> None:
    """Write the data of a stage, by name or number, into `folder`. Refused when it holds something else, or several stages could
    be meant."""
    number = _stage_of(run, stage)
    chosen = run.stages[number]
    if chosen.data.prepared is not None:
        raise Refused(f"stage {chosen.name} reads {chosen.data.prepared}, which is prepared already. Leave data.prepared out")
    if chosen.steps is not None and epochs > 1 and chosen.data.mix == "interleave":
        raise Refused("with mix: interleave each source has its own epochs, so --epochs has no meaning. Leave it out")
    if not chosen.batch.chosen:
        raise Refused(
            f"stages.{chosen.name}.batch: auto chooses the size of packs when a run starts, and prepared packs have one. `eyeline check` "
            "shows what it would take: write max_tokens and max_patches"
        )
    _refuse_strangers(folder, KNOWN)
    bundle = description(run)
    spec = spec_of(bundle.config)
    with _owned(folder, where):
        data = chosen.data
        reader = reader_of(data, bundle.encoder(), spec.image, seed_for(run.seed, "stage", number), longest=spec.max_positions)
        packs = chosen.steps * chosen.batch.packs_per_step if chosen.steps is not None and data.mix == "interleave" else None
        if run.model.config is not None and run.model.tokenizer is None:
            save_tokenizer(bundle.tokenizer, folder / TOKENIZER)
        made = pack_offline(reader, chosen.batch.budget, folder, packs=packs, epochs=epochs, quality=quality, where=where)
    if made is None:
        _say_share_done(folder, where)
        return
    size = sum(archive.bytes for archive in made.archives)
    samples = counted(sum(archive.rows for archive in made.archives), "sample")
    say(f"{folder}: {samples} in {counted(len(made.archives), 'archive')}, {size:,} bytes. "
        f"To train from it: stages.{chosen.name}.data.prepared={folder}")  # fmt: skip


KNOWN = {MANIFEST, TOKENIZER, INDEXES, JOBS, "shards", "index", "where", "rejects.jsonl", "lock"}
KNOWN_SIGNALS = {signals.MANIFEST, JOBS, "columns", "lock"}


def _refuse_strangers(folder: Path, known: set[str]) -> None:
    strangers = sorted({p.name for p in folder.iterdir() if not p.name.startswith(".")} - known) if folder.is_dir() else []
    if strangers:
        raise Refused(f"{folder} holds {', '.join(strangers[:5])}, which `eyeline prepare` did not write there. Choose another folder")


@contextmanager
def _owned(folder: Path, where: Where) -> Iterator[None]:
    """Hold the folder, or this command's share of it, for this process alone."""
    own = folder / JOBS / f"shard-{where.shard}-of-{where.shards}" if where.shards > 1 else folder
    make_folder(own)
    with sole_owner(own):
        yield


def _say_share_done(folder: Path, where: Where) -> None:
    say(f"{folder}: the share {where.shard} of {where.shards} is done, as far as it can be before the others' are. When they have "
        "ended, run the same commands again, or one without --shard")  # fmt: skip


def _stage_of(run: Run, stage: str | None) -> int:
    names = [one.name for one in run.stages]
    if stage is None and len(names) == 1:
        return 0
    if stage in names:
        return names.index(stage)
    if stage is not None and stage.isdecimal() and int(stage) < len(names):
        return int(stage)
    asked = "give --stage: the recipe has several, and each is prepared into its own folder" if stage is None else f"no stage {stage!r}"
    raise Refused(f"{asked}.{nearest(stage or '', names)} Stages: {', '.join(names)}")
