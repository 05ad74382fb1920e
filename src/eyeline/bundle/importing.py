"""Two checkpoints of transformers, a tower and a language model, become one bundle with a fresh projector."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from eyeline.bundle.bundle import (
    PROJECTOR,
    Bundle,
    recognised,
    refuse_misfit,
    stop_settings,
    vision_rules,
    write_description,
)
from eyeline.bundle.folders import new_folder, read_config, read_preprocessor
from eyeline.checkpoint.tensors import SHARD_BYTES, renamed, stream, write_file, write_folder
from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule
from eyeline.core.files import write_json
from eyeline.core.log import say, warn
from eyeline.core.randomness import torch_rng_for
from eyeline.data.templates import template_named
from eyeline.data.tokenizer import add_tokens, load_tokenizer, save_tokenizer
from eyeline.models import llava, qwen2, siglip2
from eyeline.models.decoder import Decoder

ROWS = 64  # an embedding that must grow grows to a multiple of this, which matrix units like


def import_model(
    vision: Path,
    language: Path,
    out: Path,
    *,
    projector: llava.ProjectorConfig | None = None,
    feature_layer: int = -1,
    feature_norm: bool = True,
    template: str | None = None,
    seed: int = 0,
    max_shard_bytes: int = SHARD_BYTES,
) -> Bundle:
    """Join a SigLIP (2) folder and a Qwen2 (2.5) folder into a new bundle folder `out`; weights keep the dtype they are stored in.

    `template` None takes the one that the tokenizer's own chat template is equal to. Control tokens that the template writes
    and the tokenizer lacks are added, in rows that the embedding has free; it grows only when it has none, and never shrinks.

    Raises Refused, and writes nothing, when a folder is not what it should be or the parts do not fit.
    """
    preprocessor = read_preprocessor(vision)
    if preprocessor is None:
        warn(f"{vision} has no preprocessor_config.json; pictures will be prepared as SigLIP 2 does by default.")
    tower = siglip2.from_hf(read_config(vision), preprocessor)
    text = qwen2.from_hf(read_config(language))
    tokenizer = load_tokenizer(language)
    if template is None:
        template = recognised(tokenizer, language)
    added = add_tokens(tokenizer, template_named(template))
    rows = text.vocabulary
    needed = 1 + max(tokenizer.get_vocab().values())
    if needed > rows:
        text = text.model_copy(update={"vocabulary": -(-needed // ROWS) * ROWS})
    try:
        config = llava.Config(
            vision=tower,
            projector=projector or llava.ProjectorConfig(),
            language=text,
            feature_layer=feature_layer,
            feature_norm=feature_norm,
        )
    except ValidationError as error:
        raise Refused("; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())) from error
    bundle = Bundle(config, tokenizer, template)
    refuse_misfit(bundle)

    with torch.device("meta"):
        shape = llava.Model(config)
    with new_folder(out) as folder:
        _copy(shape.vision, vision, folder / "vision", vision_rules(vision), siglip2.KEYS, siglip2.DROPPED, max_shard_bytes)
        _copy_language(shape.language, qwen2.keys(config.language), language, folder / "language", rows, max_shard_bytes)
        write_projector(fresh_projector(config, seed), folder)
        write_parts_settings(bundle, folder)
    if added:
        where = f"rows {needed - len(added)} to {needed - 1}" + (
            f" of an embedding that grew from {rows} to {text.vocabulary}" if needed > rows else ""
        )
        say(f"added to the tokenizer: {', '.join(added)} ({where})")
    form = llava.form(config)
    say(f"{out}: an export of this model will have the form {form.name} ({form.reason})")
    return bundle


def fresh_projector(config: llava.Config, seed: int) -> llava.Projector:
    """A projector from scratch."""
    made = llava.Projector(config)
    made.initialise(torch_rng_for(seed, "projector"))
    return made


def _copy(
    shape: torch.nn.Module,
    source: Path,
    target: Path,
    read: Sequence[KeyRule],
    write: Sequence[KeyRule],
    dropped: Sequence[str],
    max_shard_bytes: int,
) -> None:
    """Copy a part tensor by tensor, in the dtypes it is stored in; `shape` says what it must have."""
    target.mkdir()
    wanted = dict(shape.named_parameters(remove_duplicate=False))
    write_folder(target, renamed(stream(wanted, source, read, dropped), write), max_shard_bytes)


def _copy_language(shape: Decoder, rules: Sequence[KeyRule], source: Path, target: Path, rows: int, max_shard_bytes: int) -> None:
    """The same for the language model, whose embedding (and head) has `rows` rows there and may have more here."""
    target.mkdir()
    wanted = dict(shape.named_parameters(remove_duplicate=False))
    grows = {name for name, x in wanted.items() if name in ("embed.weight", "head.weight") and len(x) != rows}
    there = {id(wanted[name]): torch.empty(rows, wanted[name].shape[1], device="meta") for name in grows}
    wanted = {name: there.get(id(x), x) for name, x in wanted.items()}

    def grown() -> Iterator[tuple[str, Tensor]]:
        for name, x in stream(wanted, source, rules):
            yield name, with_rows(x, len(shape.embed.weight)) if name in grows else x

    write_folder(target, renamed(grown(), rules), max_shard_bytes)


def with_rows(x_VD: Tensor, rows: int) -> Tensor:
    """An embedding with more rows: each new one is the mean of the old ones, so that a new token is like any other at first."""
    mean_D = x_VD.float().mean(0).to(x_VD.dtype)
    return torch.cat([x_VD, mean_D.expand(rows - len(x_VD), -1)])


def write_projector(projector: llava.Projector, folder: Path) -> None:
    """projector.safetensors, under our own names."""
    write_file(folder / PROJECTOR, dict(projector.named_parameters()), {"format": "pt"})


def write_parts_settings(bundle: Bundle, folder: Path, dtype: str | None = None) -> None:
    """Everything but the weights of a parts folder: settings for transformers' classes, the tokenizer, the description.

    `dtype` is transformers' name of the one that all weights have; None where they differ, or are as they came.
    """
    c = bundle.config
    named = {} if dtype is None else {"dtype": dtype}
    write_json(folder / "vision" / "config.json", siglip2.to_hf(c.vision) | named)
    write_json(folder / "vision" / "preprocessor_config.json", siglip2.to_preprocessor(c.vision))
    stops: dict[str, Any] = dict(stop_settings(bundle))
    write_json(folder / "language" / "config.json", qwen2.to_hf(c.language) | stops | named)
    write_json(folder / "language" / "generation_config.json", stops)
    save_tokenizer(bundle.tokenizer, folder / "language")
    _warn_if_read_otherwise(bundle, folder / "language")
    write_description(bundle, folder)


PROBE = "I'll ask: 1234 cafe\u0301s?\n\n  \ufb01ne, \u00c5ngstr\u00f6m"  # contractions, digits, spaces, text that normalisation changes


def _warn_if_read_otherwise(bundle: Bundle, folder: Path) -> None:
    """See `load_tokenizer`: Eyeline reads the file to the letter, users of transformers may get something else."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if theirs.encode(PROBE) != bundle.tokenizer.encode(PROBE):
        warn(
            f"transformers' AutoTokenizer splits text in {folder.name}/ as Qwen2 does, unlike this model's tokenizer; load it there with "
            "PreTrainedTokenizerFast.from_pretrained."
        )
