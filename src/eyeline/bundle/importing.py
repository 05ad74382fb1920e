"""Checkpoints of transformers become bundles: a whole one as it is, or a tower and a language model with a fresh projector."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from eyeline.bundle.bundle import (
    DESCRIPTION,
    Bundle,
    classes,
    read_generation,
    read_shape,
    read_untrained,
    refuse_misfit,
    template_name,
    write_settings,
)
from eyeline.bundle.exporting import write_model
from eyeline.bundle.folders import about, new_folder, read_config, read_preprocessor
from eyeline.bundle.places import parameters_by_name, places, stream_place
from eyeline.bundle.rows import EMBEDDINGS, grown, with_rows
from eyeline.checkpoint.tensors import SHARD_BYTES
from eyeline.core.errors import Refused
from eyeline.core.log import say, warn
from eyeline.core.problems import lines_of
from eyeline.core.randomness import torch_rng_for
from eyeline.data.text.templates import VIDEO, template_named
from eyeline.data.text.tokenizer import add_tokens, load_tokenizer
from eyeline.models import Config, family_of, hf, llava, qwen3_5_vl, qwen3_vl, qwen_vision, siglip2, spec
from eyeline.models.hf import mapping_of
from eyeline.models.hf.config_json import record_of
from eyeline.models.hf.forms import Form
from eyeline.models.hf.languages import language_from_hf


def import_model(
    vision: Path,
    language: Path,
    out: Path,
    *,
    projector: llava.ProjectorConfig | None = None,
    feature_layer: int = -1,
    feature_norm: bool = True,
    tiles: int = 1,
    template: str | None = None,
    seed: int = 0,
    max_shard_bytes: int = SHARD_BYTES,
) -> Bundle:
    """Join the folders of a SigLIP (2) tower and of a language model into a new bundle folder `out`, with a fresh projector; weights
    keep the dtype they are stored in. `template` as in `import_whole`.

    Raises Refused, and writes nothing, when a folder is not what it should be or the parts do not fit.
    """
    preprocessor = read_preprocessor(vision)
    if preprocessor is None:
        warn(f"{vision} has no preprocessor_config.json; images will be resized and normalised with SigLIP 2's defaults.")
    towers, texts = read_config(vision), read_config(language)
    with about(vision):
        tower = hf.siglip2.from_hf(towers, preprocessor)
    with about(language):
        text = language_from_hf(texts)
    try:
        config = llava.Config(
            vision=siglip2.Config.model_validate(tower.model_dump() | {"tiles": tiles}),
            projector=projector or llava.ProjectorConfig(),
            language=text,
            feature_layer=feature_layer,
            feature_norm=feature_norm,
        )
    except ValidationError as error:
        raise Refused("; ".join(lines_of(llava.Config, None, error))) from error
    weights = partial(_weights, config, hf.llava.PARTS, {"vision": vision, "language": language}, seed)
    return take(config, hf.llava.PARTS, weights, language, template, out, max_shard_bytes)


def import_whole(
    model: Path,
    out: Path,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    template: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Bundle:
    """Take a checkpoint of transformers, of any family, into a new folder `out` of the same form; weights keep the dtype they are
    stored in.

    `min_pixels` and `max_pixels` take the place of the limits that the folder has for the pixels of an image of native size.

    `template` None takes the one that the tokenizer's own chat template is equal to. Control tokens that the template writes
    and the tokenizer lacks are added, in rows that the embedding has free; it grows only when it has none, and never shrinks.

    Raises Refused, and writes nothing, when the folder is not what it should be.
    """
    if (model / DESCRIPTION).exists():
        raise Refused(f"{model} is a model of parts that Eyeline wrote. Use it as it is: train from it (model.path), or chat with it.")
    if (model / "recipe.yaml").exists() and not (model / "config.json").exists():
        raise Refused(f"{model} is a run folder. Use it as it is: train from it (model.path), chat with it, or export it.")
    config, form = read_shape(model)
    config = with_pixel_limits(config, min_pixels, max_pixels)
    weights = partial(_weights, config, form, dict.fromkeys(places(config, form), model), 0)
    return take(config, form, weights, model, template, out, max_shard_bytes)


def with_pixel_limits(config: Config, min_pixels: int | None, max_pixels: int | None) -> Config:
    """The config with these limits for the pixels of an image. Raises Refused for a model without, and where they contradict."""
    given = {name: value for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)) if value is not None}
    if not given:
        return config
    if not isinstance(config, qwen3_vl.Config | qwen3_5_vl.Config):
        raise Refused(
            f"--min-pixels and --max-pixels are for models that take images of native size within limits (Qwen3-VL, Qwen3.5), and this "
            f"one is of family {config.family}. Leave them out."
        )
    vision = record_of("--min-pixels and --max-pixels", qwen_vision.Config, config.vision.model_dump() | given)
    return config.model_copy(update={"vision": vision})


def take(
    config: Config,
    form: Form,
    weights: Callable[[int], Iterator[tuple[str, Tensor]]],
    tokenizers: Path,
    template: str | None,
    out: Path,
    max_shard_bytes: int,
) -> Bundle:
    """Write a bundle of these weights, which are asked for with the rows that the embedding must have."""
    tokenizer = load_tokenizer(tokenizers)
    if template is None:
        template = template_name(tokenizer, tokenizers)
    rule = spec(config).image
    added = add_tokens(tokenizer, template_named(template), rule.marks if rule else None)
    rows, needed = config.language.vocab_size, 1 + max(tokenizer.get_vocab().values())
    enlarged = grown(config, needed)
    # image and video tokens are placeholders: visual features replace their embeddings, so training is not needed
    placeholders = (template_named(template).image, VIDEO)
    untrained = (*read_untrained(tokenizers), *(token for token in added if token not in placeholders))
    bundle = Bundle(enlarged, tokenizer, template, read_generation(tokenizers), untrained)
    refuse_misfit(bundle)
    with new_folder(out) as folder:
        write_model(bundle, weights(enlarged.language.vocab_size), folder, form, max_shard_bytes)
        write_settings(bundle, folder, form)
    if added:
        where = f"rows {needed - len(added)} to {needed - 1}" + (
            f" of an embedding that grew from {rows} to {enlarged.language.vocab_size}" if needed > rows else ""
        )
        say(f"added to the tokenizer: {', '.join(added)} ({where})")
    best = mapping_of(enlarged).form(enlarged)
    say(f"{out}: an export of this model will have the form {best.name}, for {classes(bundle, best)} ({best.reason})")
    return bundle


def _weights(config: Config, form: Form, sources: dict[str, Path], seed: int, rows: int) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model of this config, one at a time, from `sources`, by place; a part that has none is fresh. The embedding
    (and head) has `rows` rows."""
    with torch.device("meta"):
        shape = family_of(config).Model(config, torch.float32)
    tensors = parameters_by_name(shape)
    for place in places(config, form):
        if place not in sources:
            yield from fresh_projector(config, seed)
            continue
        for name, x in stream_place(tensors, config, form, place, sources[place]):
            grows = name in EMBEDDINGS and len(x) < rows
            yield name, with_rows(x, rows) if grows else x


def fresh_projector(config: Config, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a projector from scratch."""
    assert isinstance(config, llava.Config), f"{config.family} has no projector that is stored apart"
    made = llava.Projector(config)
    made.initialise(torch_rng_for(seed, "projector"))
    yield from ((f"projector.{name}", x.detach()) for name, x in made.named_parameters())
