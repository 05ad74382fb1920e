"""Training and validation sets of a stage: the `data` of a recipe, opened.

That is before there is a tokenizer, and so before there is an index.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from eyeline.core.batch import Sample, Text
from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import is_url
from eyeline.core.settings import NotNegative, Positive, PositiveFloat, Settings, Share
from eyeline.core.user_code import with_files
from eyeline.core.words import counted
from eyeline.data.containers.container import RETRIES
from eyeline.data.images.image_files import hold_out_draw, names_of
from eyeline.data.images.patches import Augment
from eyeline.data.prepared.folder import Prepared, open_prepared
from eyeline.data.sources.sources import Place, Rows, Source, open_source
from eyeline.data.text.documents import Overlong
from eyeline.data.workers import Workers

ADVISED = 10  # images that a message about validation_fraction proposes to hold out


class Data(Settings):
    """The data of a stage."""

    sources: tuple[Source, ...] = Field(min_length=1)
    # concat: every row once per epoch (`repeat` times, where a source says so). interleave: sources alternate by `weight`
    mix: Literal["concat", "interleave"] = "concat"
    max_samples_per_image: Positive = 1  # samples of one image that are packed together and share its encoding
    validation_fraction: Share = 0.0  # of the images, kept from training and validated on; the same ones in every stage and run
    validation: tuple[Source, ...] = ()  # or sources of their own to validate on
    max_reject_rate: Share = 0.01
    max_length: Positive | None = None  # tokens of a sample; by default what a pack and the model's positions hold
    overlong: Overlong = "reject"  # of samples that are longer. drop_turns: keep as many of the first exchanges as fit
    augment: Augment = Augment()
    workers: NotNegative = 0  # processes that decode; 0: this one. The batches are the same
    read_ahead: Positive = 256  # MiB of batches that workers may make before their turn
    decode_timeout: PositiveFloat = 60.0  # seconds for one sample, with workers; one that takes longer, and again alone, is rejected
    read_timeout: PositiveFloat = 300.0  # seconds for reading one sample, with workers; a store that takes longer stops the run
    read_retries: NotNegative = RETRIES  # of reading from a store that fails, ever later, before the run stops
    cache: str | None = None  # the folder of the indexes; by default one in the run folder. Runs may share one
    prepared: str | None = None  # a folder that `eyeline prepare` made of these sources: they are not touched then

    @property
    def fetching(self) -> Workers:
        return Workers(self.workers, self.read_ahead << 20, self.decode_timeout, self.read_timeout)

    @field_validator("cache")
    @classmethod
    def _here(cls, cache: str | None) -> str | None:
        if cache is not None and is_url(cache):
            raise ValueError("indexes are memory-mapped, so they must be in a local folder, not in a store. Give a local path")
        return cache

    @model_validator(mode="after")
    def _one_validation(self) -> "Data":
        if self.validation_fraction and self.validation:
            raise ValueError("validation_fraction and validation both set what to validate on; give one of them")
        if any(source.repeat > 1 for source in self.validation):
            raise ValueError("repeat sets how often an epoch visits a source, and validation uses each sample once. Leave it out there")
        if self.validation_fraction == 1:
            raise ValueError(
                "validation_fraction: 1 leaves nothing to train on; it is the share of images kept for validation, such as 0.02"
            )
        return self

    @model_validator(mode="after")
    def _one_rule(self) -> "Data":
        if self.mix == "concat" and any(source.weight != 1 for source in (*self.sources, *self.validation)):
            raise ValueError("weight is a share, and mix: concat uses every row once. Set mix: interleave, or use repeat")
        if self.mix == "interleave" and any(source.repeat > 1 for source in self.sources):
            raise ValueError("repeat belongs to mix: concat; with mix: interleave, weight sets the share of a source")
        if any(source.weight != 1 for source in self.validation):
            raise ValueError("validation uses each sample once; leave weight out there")
        return self


def open_each(sources: Iterable[Source], retries: int = RETRIES) -> tuple[Rows, ...]:
    return tuple(open_source(source, retries) for source in sources)


def held_out(rows: Rows, place: Place, found: Sample | BadSample, share: float) -> bool:
    """Return whether a row is kept for validation: when any of its images is held out, so that training never sees one of those."""
    return share > 0 and _draw(rows, place, found) < share


def _draw(rows: Rows, place: Place, found: Sample | BadSample) -> float:
    """The fraction above which a row is held out."""
    return hold_out_draw(names_of(found, rows.id(place), rows.root))


@dataclass(frozen=True, eq=False)
class Divided:
    """The sources of a stage, opened."""

    sources: tuple[Rows, ...]
    validation: tuple[Rows, ...]  # what is validated on: the same ones where a part of them is held out; empty when nothing is
    prepared: Prepared | None = None  # where they are stored, if that is elsewhere


def open_stored(data: Data) -> Prepared | None:
    """The folder that the data were prepared in. Refused when it was made of others."""
    if data.prepared is None:
        return None
    found = open_prepared(data.prepared, data.read_retries)
    found.refuse_other(choice(data), found.manifest.data)
    return found


def choice(data: Data) -> dict[str, Any]:
    """The settings that say which samples there are, and in which order; of code its file's name, since its content is in the identity."""
    named = {"sources", "mix", "max_samples_per_image", "validation_fraction", "validation", "max_length", "overlong"}
    found = with_files(data.model_dump(mode="json", include=named), lambda file: Path(file).name)
    for source in (*found["sources"], *found["validation"]):
        del source["signals"]  # what they say is in the identity of the plan, wherever they are
    return found


def prepared_sides(data: Data, found: Prepared) -> Divided:
    """The sources as a prepared folder stores them."""
    about = found.manifest
    sources, validation = found.rows(about.sources, data.sources), found.rows(about.validation, data.validation)
    return Divided(sources, validation or (sources if data.validation_fraction else ()), found)


def open_sides(data: Data) -> Divided:
    """Open the sources. Refused for kinds that are not there, and when nothing is left on a side that is asked for.

    Rows are read until that is known, which is soon in all data that will do.
    """
    found = open_stored(data)
    if found is not None:
        return prepared_sides(data, found)
    sources, validation = open_each(data.sources, data.read_retries), open_each(data.validation, data.read_retries)
    for rows in (*sources, *validation):
        _refuse_absent_kinds(rows)
    _refuse_empty_side(sources, data.validation_fraction)
    return Divided(sources, validation or (sources if data.validation_fraction else ()))


def _refuse_empty_side(sources: Sequence[Rows], fraction: float) -> None:
    """Refused when nothing is left to train on, or nothing is held out; with a fraction that does both, where there is one."""
    looked, trains, least = 0, False, list[float]()  # the smallest draws, one per image
    for rows in sources:
        for place, _, found in rows.kept_rows():
            looked += 1
            draw = _draw(rows, place, found) if fraction else 1.0
            trains |= draw >= fraction
            if draw not in least:
                insort(least, draw)
                del least[2 * ADVISED + 1 :]
            if trains and (not fraction or least[0] < fraction):
                return
    if not looked:
        raise Refused("no sample is left to train on: " + ", ".join(f"{r.path} has 0 after {r.source.choice}" for r in sources))
    held = f"none of {counted(looked, 'sample')}" if trains else f"all {counted(looked, 'sample')}, and none is left to train on"
    said = f"validation_fraction={fraction} holds out {held}"
    if len(least) == 1:
        one_side = "Samples that show the same image are all on one side, so these cannot be divided"
        raise Refused(f"{said}. {one_side}. Leave it out, and give validation: sources of its own")
    count = min(ADVISED, len(least) // 2)
    share = _shortest_above(least[count - 1], least[count])
    of_them = f"{counted(count, 'image')} with all samples that show {'it' if count == 1 else 'them'}"
    raise Refused(f"{said}. {'Raise' if trains else 'Lower'} it: {share:g} holds out {of_them} (a sample without an image counts as one)")


def _shortest_above(low: float, high: float) -> float:
    """The number of the fewest digits that is larger than `low`, and not larger than `high`."""
    values = (round(floor(low * 10**digits + 1) / 10**digits, digits) for digits in range(1, 17))
    return next((value for value in values if low < value <= high), high)


def _refuse_absent_kinds(rows: Rows) -> None:
    source = rows.source
    if source.categories is None or source.limit is not None:
        return
    missing, others = set(source.categories), set()
    for shard in range(len(rows.shards)):
        for _, kind, _ in rows.rows_in(shard):
            missing.discard(kind or "")
            if kind is not None:
                others.add(kind)
            if not missing:
                return
    absent = [kind for kind in source.categories if kind in missing]
    raise Refused(f"{source.path} has no samples of kind {', '.join(absent)}; it has {', '.join(sorted(k or '(none)' for k in others))}")


def training_samples(data: Data) -> Iterator[Sample]:
    """Every sample that training visits, once, in the sources' order, or as they are prepared. Rows that cannot be used are skipped."""
    found = open_stored(data)
    if found is not None:
        yield from found.samples()
        return
    for rows in open_each(data.sources, data.read_retries):
        for place, _, found in rows.kept_rows():
            if isinstance(found, Sample) and not held_out(rows, place, found, data.validation_fraction):  # bad ones are counted in training
                yield found


def training_texts(data: Data) -> Iterator[str]:
    """Every text that training shows, for a tokenizer to be made from."""
    for sample in training_samples(data):
        yield from texts(sample)


def texts(sample: Sample) -> Iterator[str]:
    """The texts of a conversation in order."""
    return (part.text for message in sample.messages for part in message.parts if isinstance(part, Text))
