"""The tower of Qwen3-VL and Qwen3.5 and its mergers compute what transformers' compute."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from eyeline.core.batch import Grid
from eyeline.core.errors import Refused
from eyeline.models import hf, qwen_vision
from eyeline.models.layers import EVERY_BLOCK, NEVER
from tests.models.parity import all_close, close, randomise

OUT = 20  # width of a language model
DEEP = qwen_vision.Config(
    patch=3,
    hidden_size=24,
    layers=4,
    heads=3,
    intermediate_size=40,
    position_grid=5,
    deepstack_layers=(0, 2),
    mean=(0.4, 0.5, 0.6),
    std=(0.3, 0.4, 0.5),
)
PLAIN = DEEP.model_copy(update={"deepstack_layers": (), "position_grid": 4, "patch": 4, "heads": 2})
# smaller and larger than the table of positions, a row, a column, the table's own size where merge allows it
GRIDS = [Grid(2, 2), Grid(8, 12), Grid(2, 10), Grid(6, 2), Grid(4, 4), Grid(8, 12)]


def places(grid: Grid, merge: int) -> list[tuple[int, int]]:
    """Row and column of each patch in merge order, by four loops."""
    return [
        (i * merge + y, j * merge + x)
        for i in range(grid.rows // merge)
        for j in range(grid.columns // merge)
        for y in range(merge)
        for x in range(merge)
    ]


def inputs(c: qwen_vision.Config, grids: list[Grid], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """What the tower takes, of random pixels."""
    counts = [g.patches for g in grids]
    patches_PC = torch.randint(0, 256, (sum(counts), 3 * c.temporal_patch * c.patch**2), generator=torch.Generator().manual_seed(seed))
    places_P2 = torch.tensor([place for g in grids for place in places(g, c.merge)]).reshape(-1, 2)
    cu_N1 = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
    return patches_PC.to(torch.uint8), places_P2, torch.tensor(grids).reshape(-1, 2), cu_N1, max(counts, default=0)


def pixel_values(c: qwen_vision.Config, patches_PC: Tensor) -> Tensor:
    """What the reference takes."""
    mean, std = (torch.tensor(x)[:, None] for x in (c.mean, c.std))
    return ((patches_PC.float().unflatten(1, (3, -1)) / 255 - mean) / std).flatten(1)


def reference_of(c: qwen_vision.Config) -> torch.nn.Module:
    settings = hf.qwen_vision.to_hf(c, OUT)
    if c.deepstack_layers:
        reference = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**settings), attn_implementation="eager")
    else:
        del settings["deepstack_visual_indexes"]
        reference = Qwen3_5VisionModel._from_config(Qwen3_5VisionConfig(**settings), attn_implementation="eager")
    randomise(reference)
    return reference


def pair(c: qwen_vision.Config) -> tuple[torch.nn.Module, torch.nn.ModuleDict]:
    """The reference, and ours with its weights."""
    reference = reference_of(c)
    ours = torch.nn.ModuleDict({"vision": qwen_vision.Model(c), "projector": qwen_vision.Projector(c, OUT)})
    ours.load_state_dict(under_our_names(c, dict(reference.named_parameters())))
    return reference, ours


def under_our_names(c: qwen_vision.Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of theirs, by the key rules; each must be used once."""
    found = {}
    for part, rules in (("vision", hf.qwen_vision.keys(c)), ("projector", hf.qwen_vision.projector_keys(c))):
        for rule in rules:
            for i in range(c.layers if "{i}" in rule.theirs else 1):
                value = tensors.pop(rule.theirs.replace("{i}", str(i)), None)
                if value is None and part == "projector":
                    continue  # fewer mergers than blocks
                assert value is not None, rule.theirs
                names = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
                cut = rule.read(value) if rule.read else value
                values = cut if isinstance(cut, tuple) else (cut,)
                assert rule.write is None or torch.equal(rule.write(*values), value)
                found |= {f"{part}.{name.replace('{i}', str(i))}": x for name, x in zip(names, values, strict=True)}
    assert not tensors, tensors.keys()
    return {name: x.detach() for name, x in found.items()}


@pytest.mark.parametrize("c", [DEEP, PLAIN], ids=["deepstack", "plain"])
def test_features_and_gradients(c):
    reference, ours = pair(c)
    args = inputs(c, GRIDS)
    grid_thw = torch.tensor([(1, *g) for g in GRIDS])
    want = reference(pixel_values(c, args[0]), grid_thw=grid_thw)
    features = ours["vision"](*args)
    tokens_MD, deep = ours["projector"](features)

    close(features[0], want.last_hidden_state, "features")
    close(tokens_MD, want.pooler_output, "tokens")
    outputs, wanted = [tokens_MD, *deep], [want.pooler_output, *(want.deepstack_features if c.deepstack_layers else [])]
    for got, expected in zip(outputs, wanted, strict=True):
        close(got, expected, "tokens of a merger")

    directions = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(wanted)]
    sum((x * d).sum() for x, d in zip(wanted, directions, strict=True)).backward()
    sum((x * d).sum() for x, d in zip(outputs, directions, strict=True)).backward()
    theirs = under_our_names(c, {name: p.grad for name, p in reference.named_parameters()})
    all_close({name: p.grad for name, p in ours.named_parameters()}, theirs)


def test_slices_of_a_video_do_not_see_each_other():
    """The reference takes a video as one grid of three slices; we take three images."""
    reference, ours = pair(DEEP)
    args = inputs(DEEP, [Grid(4, 6)] * 3)
    want = reference(pixel_values(DEEP, args[0]), grid_thw=torch.tensor([[3, 4, 6]]))
    tokens_MD, deep = ours["projector"](ours["vision"](*args))
    close(tokens_MD, want.pooler_output, "tokens")
    close(deep[1], want.deepstack_features[1], "deep tokens")


def test_several_images_are_as_each_alone():
    _, ours = pair(DEEP)
    together, _ = ours["projector"](ours["vision"](*inputs(DEEP, GRIDS)))
    patches_PC, start, alone = inputs(DEEP, GRIDS)[0], 0, []
    for grid in GRIDS:
        _, *args = inputs(DEEP, [grid])
        alone.append(ours["projector"](ours["vision"](patches_PC[start : start + grid.patches], *args))[0])
        start += grid.patches
    close(together, torch.cat(alone), "tokens")


def test_no_images_give_every_weight_a_gradient_of_zeros():
    """Also where there is none of an image's columns, as in a batch of texts."""
    _, ours = pair(DEEP)
    _, *args = inputs(DEEP, [])
    tokens_MD, deep = ours["projector"](ours["vision"](torch.empty(0, 0, dtype=torch.uint8), *args))
    assert tokens_MD.shape == (0, OUT) and [x.shape for x in deep] == [(0, OUT)] * 2
    (tokens_MD.sum() + sum(x.sum() for x in deep)).backward()
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())


def test_pixels_of_the_reference_processor():
    """Patches are ordered (channel, frame, row, column), and normalised as it does."""
    c = PLAIN.model_copy(update={"min_pixels": 1, "max_pixels": 10**6})
    image = np.random.default_rng(0).integers(0, 256, (3, 16, 24), dtype=np.uint8)
    want = Qwen2VLImageProcessorPil(**hf.qwen_vision.to_preprocessor(c))(torch.from_numpy(image), return_tensors="pt")
    assert want["image_grid_thw"].tolist() == [[1, 4, 6]]
    patches = [image[:, None, y * 4 : y * 4 + 4, x * 4 : x * 4 + 4].repeat(2, 1).flatten() for y, x in places(Grid(4, 6), 2)]
    close(qwen_vision.normalised(torch.from_numpy(np.stack(patches)), c.mean, c.std), want["pixel_values"], "pixels")


def test_recomputation_changes_nothing():
    _, ours = pair(DEEP)
    results = []
    for recompute in (NEVER, EVERY_BLOCK):
        ours["vision"].recompute = recompute
        ours.zero_grad()
        tokens_MD, deep = ours["projector"](ours["vision"](*inputs(DEEP, GRIDS)))
        (tokens_MD.square().sum() + deep[0].square().sum()).backward()
        results.append([p.grad.clone() if p.grad is not None else None for p in ours.parameters()])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- settings


def read(c: qwen_vision.Config, vision: dict | None = None, still: dict | None = None, video: dict | None = None) -> qwen_vision.Config:
    files = (hf.qwen_vision.to_hf(c, OUT), hf.qwen_vision.to_preprocessor(c), hf.qwen_vision.to_video_preprocessor(c))
    vision, still, video = (file | (changes or {}) for file, changes in zip(files, (vision, still, video), strict=True))
    return hf.qwen_vision.from_hf(vision, still, video, "vision_config", (8, 16, 24))


@pytest.mark.parametrize(
    "c", [DEEP, PLAIN.model_copy(update={"min_pixels": 5, "max_pixels": 77, "video_min_pixels": 6, "video_max_pixels": 78})]
)
def test_settings_come_back(c):
    assert read(c) == c


def test_old_names_of_the_limits_go_before():
    assert (read(DEEP, still={"min_pixels": 9}).min_pixels, read(DEEP, still={"max_pixels": 99_999}).max_pixels) == (9, 99_999)
    none = {"min_pixels": None, "max_pixels": None}
    inside = read(DEEP, still={**none, "size": {"min_pixels": 9, "max_pixels": 99_999}})
    assert (inside.min_pixels, inside.max_pixels) == (9, 99_999)
    assert read(DEEP, still={**none, "size": {"min_pixels": 9, "longest_edge": 99_999}, "min_pixels": 9}) == inside


@pytest.mark.parametrize("limits", [(9, 99_999), (9, None), (None, 99_999), (None, None)])
@pytest.mark.parametrize("old", [False, True])
def test_limits_are_those_of_the_reference(limits, old):
    """In the size of a file, or as the older names next to it; a name that is missing has the class's value."""
    names = ("min_pixels", "max_pixels") if old else ("shortest_edge", "longest_edge")
    given = {name: value for name, value in zip(names, limits, strict=True) if value is not None}
    file = hf.qwen_vision.to_preprocessor(DEEP)
    file = {key: value for key, value in file.items() if key not in ("size", "min_pixels", "max_pixels")} | (
        given if old else {"size": given} if len(given) != 1 else {}
    )
    wanted = Qwen2VLImageProcessorPil(**{key: value for key, value in file.items() if key != "image_processor_type" and value != {}}).size
    found = hf.qwen_vision.from_hf(hf.qwen_vision.to_hf(DEEP, OUT), file, None, "vision_config", (8, 16, 24))
    assert (found.min_pixels, found.max_pixels) == (wanted["shortest_edge"], wanted["longest_edge"])


@pytest.mark.parametrize(
    ("vision", "still", "video", "says"),
    [
        ({"hidden_act": "gelu"}, {}, {}, "hidden_act='gelu'"),
        ({"in_channels": 1}, {}, {}, "in_channels=1"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 5.0}}, {}, {}, "rope_theta=5.0"),
        ({"num_position_embeddings": 24}, {}, {}, "square"),
        ({"deepstack_visual_indexes": [2, 0]}, {}, {}, "ascending"),
        ({"deepstack_visual_indexes": [9]}, {}, {}, "below layers=4"),
        ({"num_heads": 5}, {}, {}, "multiple of 4"),
        ({}, {"patch_size": 14}, {}, "patch_size=14"),
        ({}, {"merge_size": 1}, {}, "merge_size=1"),
        ({}, {"do_resize": False}, {}, "do_resize=False"),
        ({}, {"rescale_factor": 1.0}, {}, "1/255"),
        ({}, {"image_mean": [0.5]}, {}, "three numbers"),
        ({}, {"size": {"shortest_edge": 9, "longest_edge": 4}, "min_pixels": None, "max_pixels": None}, {}, "min_pixels=9"),
        ({}, {"size": {"height": 224, "width": 224}}, {}, "not height, width"),
        ({}, {"size": {"shortest_edge": 9, "max_height": 50}}, {}, "not max_height"),
        ({}, {"size": {"min_pixels": 8}, "min_pixels": 9}, {}, "min_pixels twice"),
        ({}, {"size": {"longest_edge": 0}, "max_pixels": None}, {}, "longest_edge=0"),
        ({}, {"size": [9, 99]}, {}, "size="),
        ({}, {"size": 224}, {}, "size=224"),
        ({}, {}, {"max_pixels": 5_000}, "max_pixels=5000, which transformers does not read there"),
        ({}, {}, {"size": {"height": 9, "width": 9}}, "not height, width"),
        ({}, {}, {"cap_pixels_per_frame": True}, "cap_pixels_per_frame"),
        ({}, {}, {"image_mean": [0.5, 0.5, 0.5]}, "both in the same way"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(vision, still, video, says):
    with pytest.raises(Refused, match=says):
        read(DEEP, vision, still, video)
