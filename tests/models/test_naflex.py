"""SigLIP 2 in NaFlex mode against `Siglip2VisionModel`: grids larger and smaller than the table of positions, all gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Pillow
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from eyeline.checkpoint.tensors import renamed
from eyeline.core.batch import EncodedImage, Image
from eyeline.core.image_rule import Patches, Tiles
from eyeline.core.randomness import rng_for
from eyeline.data.images.patches import image_patches
from eyeline.models import hf, llava, siglip2
from eyeline.models.flops import Tally
from tests.models import parity
from tests.models.cases.llava import language
from tests.weights import load_into

VISION = siglip2.Config(image_size=12, patch=3, hidden_size=16, layers=2, heads=2, intermediate_size=24, eps=1e-3, patches=40)
SIZES = {"as the table": (12, 12), "wide": (3, 30), "tall": (40, 5), "larger": (17, 19), "tiny": (1, 1)}


def images(c: siglip2.Config, folder: Path, merge: int = 1) -> list[Image]:
    out = []
    for n, (height, width) in enumerate(SIZES.values()):
        pixels = rng_for(n, "pixels").integers(0, 256, (height, width, 3), dtype=np.uint8)
        Pillow.fromarray(pixels).save(folder / f"{n}.png")
        out += image_patches(EncodedImage(str(n), folder / f"{n}.png"), c.rule(merge))
    return out


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_tower_equals_the_reference(tmp_path: Path) -> None:
    reference = transformers.Siglip2VisionModel._from_config(
        transformers.Siglip2VisionConfig(**hf.siglip2.to_hf(VISION)), attn_implementation="eager"
    )
    parity.randomise(reference)
    reference.save_pretrained(tmp_path / "hub")
    ours = siglip2.Model(VISION)
    load_into(dict(ours.named_parameters()), tmp_path / "hub", hf.siglip2.keys(VISION))
    shown = images(VISION, tmp_path)
    assert {image.grid.patches for image in shown} > {36}
    assert min(image.grid.rows for image in shown) < VISION.position_grid < max(image.grid.columns for image in shown)

    longest = max(image.grid.patches for image in shown)
    pixels_NPC = torch.zeros(len(shown), longest, 27)
    mask_NP = torch.zeros(len(shown), longest, dtype=torch.int64)
    for n, image in enumerate(shown):
        patches = torch.from_numpy(image.patches_PC)
        assert VISION.mean == VISION.std == (0.5, 0.5, 0.5)
        pixels_NPC[n, : len(patches)] = ((patches / 255 - 0.5) / 0.5).unflatten(1, (3, 3, 3)).permute(0, 2, 3, 1).flatten(1)
        mask_NP[n, : len(patches)] = 1
    want_NPD = reference(pixels_NPC, mask_NP, torch.tensor([image.grid for image in shown])).last_hidden_state
    want_PD = torch.cat([want_NPD[n, : image.grid.patches] for n, image in enumerate(shown)])

    batch = parity.batch_of([parity.document("images", *shown)], None)
    got_PD = ours(batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
    same(got_PD, want_PD)
    direction = torch.randn(want_PD.shape, generator=torch.Generator().manual_seed(1))
    (want_PD * direction).sum().backward()
    (got_PD * direction).sum().backward()
    theirs = {n: p.grad for n, p in reference.named_parameters() if not n.startswith("head.")}
    parity.all_close(dict(renamed(((n, p.grad) for n, p in ours.named_parameters()), hf.siglip2.keys(VISION))), theirs)


@pytest.mark.parametrize("grid", [(4, 4), (2, 9), (1, 1), (7, 3), (4, 11)])
def test_positions_are_those_of_interpolation(grid: tuple[int, int]) -> None:
    """What released checkpoints were trained with: bilinear with antialias."""
    table_SSD = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    rows, columns = grid
    places_P2 = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).reshape(-1, 2)
    got = siglip2.resized(table_SSD, places_P2, torch.tensor([grid]), torch.tensor([0, rows * columns]), 4)
    square = table_SSD.unflatten(0, (4, 4)).permute(2, 0, 1)[None]
    want = F.interpolate(square, size=grid, mode="bilinear", align_corners=False, antialias=True)[0].flatten(1).T
    same(got, want)


def test_on_the_tables_own_grid_it_is_the_fixed_tower(tmp_path: Path) -> None:
    fixed, naflex = VISION.model_copy(update={"patches": None}), VISION.model_copy(update={"patches": 16})
    one, other = siglip2.Model(fixed), siglip2.Model(naflex)
    parity.randomise(one)
    other.load_state_dict(one.state_dict())
    shown = images(naflex, tmp_path)[:1]
    assert shown[0].grid == (4, 4)
    batch = parity.batch_of([parity.document("images", *shown)], None)
    inputs = (batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
    same(other(*inputs), one(*inputs))


def test_no_images_give_no_features_and_zero_gradients() -> None:
    model = siglip2.Model(VISION)
    parity.randomise(model)
    none = torch.empty(0, 2, dtype=torch.int64)
    features_PD = model(torch.empty(0, 0, dtype=torch.uint8), none, none, torch.zeros(1, dtype=torch.int32), 0)
    assert features_PD.shape == (0, 16)
    features_PD.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_rules_and_refusals() -> None:
    assert VISION.rule(2).resize == Patches(40)
    tiled = VISION.model_copy(update={"patches": None, "tiles": 5})
    assert tiled.rule(1).resize == Tiles(12, 5)
    with pytest.raises(ValueError, match="give one of them"):
        siglip2.Config(**VISION.model_dump() | {"tiles": 5})
    with pytest.raises(ValueError, match="tiles=6 squares per image are more than 5"):
        siglip2.Config(**VISION.model_dump() | {"patches": None, "tiles": 6})
    with pytest.raises(ValueError, match=r"projector\.shuffle=7 joins 7×7 patches"):
        llava.Config(vision=VISION, language=language(tie_embeddings=True), projector=llava.ProjectorConfig(shuffle=7))


@pytest.mark.parametrize("vision", [VISION, VISION.model_copy(update={"patches": None, "tiles": 5})], ids=["NaFlex", "tiles"])
def test_a_whole_model_runs_and_exports_as_parts(vision: siglip2.Config, tmp_path: Path) -> None:
    """Shapes that the projector's shuffle fits, packed and alone the same."""
    c = llava.Config(vision=vision, language=language(tie_embeddings=True), projector=llava.ProjectorConfig(shuffle=2))
    assert hf.llava.form(c).name == "parts"
    model = llava.Model(c)
    parity.randomise(model)
    shown = images(vision, tmp_path, merge=2)
    documents = [parity.document(f"d{n}", *shown[n : n + 2]) for n in range(0, len(shown) - 1, 2)]
    together = model(parity.batch_of(documents, None)).out
    apart = sum(model(parity.batch_of([d], None)).out for d in documents)
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize("trains", [True, False])
def test_what_naflex_costs_more_is_its_product_with_the_table(trains: bool, tmp_path: Path) -> None:

    shown = images(VISION, tmp_path)
    batch = parity.batch_of([parity.document("images", *shown)], None)
    tallies = []
    for c in (VISION, VISION.model_copy(update={"patches": None})):
        model = siglip2.Model(c).requires_grad_(trains)
        tallies.append(tally := Tally())
        with tally.within("vision"):
            model.count(tally)
    table = torch.nn.Parameter(torch.randn(16, 16), requires_grad=trains)
    with FlopCounterMode(display=False) as counter:
        out = siglip2.resized(table, batch.places_P2, batch.grids_N2, batch.cu_N1, 4)
        if trains:
            out.sum().backward()
    more = [ours.forward["vision", "patch"] + ours.backward["vision", "patch"] for ours in tallies]
    assert (more[0] - more[1]) * batch.counts.patches == counter.get_total_flops()
