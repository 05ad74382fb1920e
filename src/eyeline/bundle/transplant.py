"""A text Qwen3 and a SigLIP (2) tower become a model of Qwen3-VL's shape, to be trained on.

What is the same. Text: the language model computes what it did, since time, row and column are equal there. The tower: blocks map
one to one (norms, biases, tanh GELU, the same eps), and so does the trained table of positions. The patch embedding is spread
over the frames of a patch, a share each, so that a still, which is repeated, is embedded as it was. The tower's last norm becomes the
main merger's, which stands at the same place.

What is not. Queries and keys are turned by the patch's row and column in every block, which SigLIP 2 does not do: features are those
of another function, and the tower must be trained to be of use. Images keep their shape and native size, and the table is stretched
over them, corner on corner (NaFlex towers resize it otherwise); only an image as large as SigLIP 2's square meets the positions as
they were trained. Images are resized by bicubic interpolation. The mergers' layers are fresh; what DeepStack's add to the language
model starts at zero. The pooling head is left behind.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from eyeline.bundle.bundle import Bundle
from eyeline.bundle.folders import about, read_config, read_preprocessor
from eyeline.bundle.importing import take
from eyeline.bundle.places import parameters_by_name
from eyeline.bundle.rows import with_rows
from eyeline.checkpoint.tensors import SHARD_BYTES, entries_in, stream
from eyeline.core.errors import Refused
from eyeline.core.key_rules import prefixed
from eyeline.core.randomness import torch_rng_for
from eyeline.models import hf, qwen3, qwen3_vl, qwen_vision, siglip2
from eyeline.models.hf.config_json import record_of
from eyeline.models.hf.languages import language_from_hf
from eyeline.models.languages import LanguageConfig


def transplant(
    vision: Path,
    language: Path,
    out: Path,
    *,
    deepstack_layers: tuple[int, ...] | None = None,
    template: str | None = None,
    seed: int = 0,
    max_shard_bytes: int = SHARD_BYTES,
) -> Bundle:
    """Write the model into a new folder `out`, in Qwen3-VL's form; weights keep the dtype they are stored in.
    `deepstack_layers` are the blocks of the tower that DeepStack takes; None: three, evenly spread. `template` as in `import_whole`.

    Raises Refused, and writes nothing, when a folder is not what it should be or the parts do not fit.
    """
    towers, preprocessor, texts = read_config(vision), read_preprocessor(vision), read_config(language)
    with about(vision):
        tower = hf.siglip2.from_hf(towers, preprocessor)
    with about(language):
        text = language_from_hf(texts)
    config = transplanted(tower, text, deepstack_layers)

    def weights(rows: int) -> Iterator[tuple[str, Tensor]]:
        yield from _tower(tower, config.vision, vision)
        yield from _mergers(config, seed)
        with torch.device("meta"):
            shape = parameters_by_name(qwen3.Model(config.language))
        for name, x in stream(shape, language, hf.qwen3.keys(config.language), hf.qwen3.DROPPED):
            grows = name in ("embed.weight", "head.weight") and len(x) < rows
            yield f"language.{name}", with_rows(x, rows) if grows else x

    return take(config, hf.qwen3_vl.form(config), weights, language, template, out, max_shard_bytes)


def transplanted(tower: siglip2.Config, text: LanguageConfig, deepstack_layers: tuple[int, ...] | None = None) -> qwen3_vl.Config:
    """The config of the model that the two become. Raises Refused where they cannot."""
    if not isinstance(text, qwen3.Config):
        raise Refused(f"the language model is of family {text.family}; Qwen3-VL's architecture needs a Qwen3, dense or MoE.")
    if tower.eps != qwen_vision.EPS:
        raise Refused(f"the tower's norms have layer_norm_eps={tower.eps}; Qwen3-VL's tower has {qwen_vision.EPS}. Use a SigLIP 2 tower.")
    vision = {
        "patch": tower.patch,
        "hidden_size": tower.hidden_size,
        "layers": tower.layers,
        "heads": tower.heads,
        "intermediate_size": tower.intermediate_size,
        "position_grid": tower.position_grid,
        "deepstack_layers": _deepstack_blocks(tower.layers, text.layers) if deepstack_layers is None else deepstack_layers,
        "mean": tower.mean,
        "std": tower.std,
    }
    half = text.head_dim // 2
    each = half * 5 // 16  # frequencies of the row, and of the column: 20 of 64 in Qwen3-VL
    where = "the transplant"
    sections = {"mrope_section": text.mrope_section or (half - 2 * each, each, each)}
    return record_of(
        where,
        qwen3_vl.Config,
        {
            "vision": record_of(where, qwen_vision.Config, vision),
            "language": record_of(where, qwen3.Config, text.model_dump() | sections),
        },
    )


def _deepstack_blocks(blocks: int, layers: int) -> tuple[int, ...]:
    """Three of a tower's blocks at even distances; fewer where it, or the language model, has too few."""
    return tuple(sorted({i for k in (1, 2, 3) if (i := blocks * k // 4 - 1) >= 0}))[:layers]


def _tower(tower: siglip2.Config, c: qwen_vision.Config, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tower's tensors under the names that they have in Qwen3-VL's shape."""
    with torch.device("meta"):
        shape = parameters_by_name(siglip2.Model(tower))
    whole = any(name.startswith(hf.siglip2.HUB_PREFIX) for name in entries_in(folder))
    rules = prefixed(hf.siglip2.keys(tower), "", hf.siglip2.HUB_PREFIX if whole else "")
    for name, x in stream(shape, folder, rules, hf.siglip2.DROPPED):
        if name == "embed.weight":
            x = per_frame(x, c.temporal_patch)
        yield f"projector.main.{name}" if name.startswith("norm.") else f"vision.{name}", x


def per_frame(weight_DC: Tensor, frames: int) -> Tensor:
    """The embedding of patches of one frame, for patches that repeat it: a share of each weight for each frame."""
    each_D3c = (weight_DC.float() / frames).to(weight_DC.dtype).unflatten(1, (3, -1))
    return each_D3c[:, :, None].expand(-1, -1, frames, -1).flatten(1)


def _mergers(c: qwen3_vl.Config, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Fresh ones, but for the norm that comes with the tower."""
    fresh = qwen_vision.Projector(c.vision, c.language.hidden_size)
    fresh.initialise(torch_rng_for(seed, "projector"))
    yield from ((f"projector.{name}", x.detach()) for name, x in fresh.named_parameters() if not name.startswith("main.norm."))
