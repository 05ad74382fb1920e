"""Qwen3-VL, dense and with experts: images of several native sizes, slices of a video, DeepStack, M-RoPE."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyeline.core.batch import Document
from eyeline.models import hf, qwen3, qwen3_vl, qwen_vision
from eyeline.models.hf.forms import MediaTokens
from eyeline.models.moe import Experts
from tests.models.parity import IMAGE_TOKEN, VOCABULARY, Case, document, documents, image, normalised, peer_of, token_inputs

TOKENS = MediaTokens(image=IMAGE_TOKEN, written="<image>", video=IMAGE_TOKEN + 1, start=0, end=1)
# the table of positions is larger than one image, smaller than another
VISION = qwen_vision.Config(
    patch=3,
    hidden_size=16,
    layers=3,
    heads=2,
    intermediate_size=24,
    position_grid=5,
    deepstack_layers=(0, 2),
    mean=(0.4, 0.5, 0.6),
    std=(0.3, 0.4, 0.5),
)
ONE_DEEP = VISION.model_copy(update={"deepstack_layers": (1,), "position_grid": 4, "temporal_patch": 1})
SPARSE = Experts(num_experts=6, experts_per_token=2, intermediate_size=8)


def language(tie_embeddings: bool, **more: Any) -> qwen3.Config:
    return qwen3.Config(
        vocab_size=VOCABULARY,
        hidden_size=24,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=40,
        eps=1e-3,
        rope_theta=100.0,
        mrope_section=(2, 1, 1),
        tie_embeddings=tie_embeddings,
        **more,
    )


def inputs_of(vision: qwen_vision.Config) -> Callable[[Document], dict[str, Tensor]]:
    """Images, and a video where images bear the video's name, as the class takes them; it finds positions itself."""

    def inputs(d: Document) -> dict[str, Tensor]:
        if not d.images:
            return token_inputs(d)
        kind_T = torch.zeros(len(d.tokens_T), dtype=torch.int32)
        kind_T[torch.from_numpy(d.visual_M).long()] = 1
        tokens = token_inputs(d) | {"mm_token_type_ids": kind_T[None]}
        stills = [i for i in d.images if not i.key.startswith("video")]
        slices = [i for i in d.images if i.key.startswith("video")]
        if stills:
            grids = torch.tensor([(1, *i.grid) for i in stills])
            tokens |= {"pixel_values": normalised(stills, vision.mean, vision.std), "image_grid_thw": grids}
        if slices:  # one video of as many slices, behind the stills
            places = np.concatenate([np.full(i.tokens, i in slices) for i in d.images])
            kind_T[torch.from_numpy(d.visual_M[places]).long()] = 2
            tokens["input_ids"] = torch.where(kind_T == 2, IMAGE_TOKEN + 1, tokens["input_ids"])
            grid = torch.tensor([(len(slices), *slices[0].grid)])
            tokens |= {"pixel_values_videos": normalised(slices, vision.mean, vision.std), "video_grid_thw": grid}
        return tokens

    return inputs


def shown(vision: qwen_vision.Config) -> tuple[Document, ...]:
    """As every family's, but with a token or more between images: the class takes visual tokens that touch for one image's.
    And a still before a video of two slices, which text keeps apart as timestamps do."""
    how = {"patch": vision.patch, "merge": vision.merge, "frames": vision.temporal_patch}
    cat, dog, cow = image("cat", 4, 6, **how), image("dog", 2, 2, **how), image("cow", 8, 4, **how)
    first, second = image("video 0", 4, 2, **how), image("video 1", 4, 2, **how)
    how = {"positions": "grid"}
    return (
        *(d for d in documents(cat, dog, cow, **how) if d.id != "neighbours"),
        document("neighbours", 2, dog, 1, cow, 3, **how),
        document("video", 2, dog, 3, first, 2, second, 4, **how),
    )


def case(id: str, c: qwen3_vl.Config, **more: Any) -> Case:
    form = hf.qwen3_vl.form(c)
    config_json = dict(hf.qwen3_vl.to_hf(c, form, TOKENS)["config.json"])
    # what transformers 5 writes; the hub's layout has a test of its own
    saved = {".experts.gate_up_proj": (6, 16, 24), ".experts.down_proj": (6, 24, 8)}
    return Case(id, c, lambda: peer_of(config_json), inputs_of(c.vision), hf.qwen3_vl.keys(c, form, saved), shown(c.vision), **more)


SOME = language(tie_embeddings=True, experts=SPARSE, sparse_every=2)
CASES = [
    case("tied", qwen3_vl.Config(vision=VISION, language=language(tie_embeddings=True))),
    case("untied, one frame a patch", qwen3_vl.Config(vision=ONE_DEEP, language=language(tie_embeddings=False))),
    case("experts", qwen3_vl.Config(vision=VISION, language=language(tie_embeddings=False, experts=SPARSE))),
    case("experts in every second layer, tied", qwen3_vl.Config(vision=VISION, language=SOME)),
]
