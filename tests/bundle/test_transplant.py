"""A text Qwen3 and a SigLIP tower in Qwen3-VL's shape: what is said to be the same is the same."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.fill import load
from eyeline.bundle.transplant import per_frame, transplant, transplanted
from eyeline.core.batch import Document, EncodedImage, Grid, Image, Message, Text
from eyeline.core.errors import Refused
from eyeline.data.fetch.batches import batch_of
from eyeline.generate.prompts import Prompts
from eyeline.models import qwen3, qwen_vision, qwen_vl, siglip2, spec
from tests.bundle.tiny import PATCH, SIDE, drawing, randomise, save_language, save_qwen3, save_vision
from tests.command import Command

RATIO = SIDE // PATCH  # patches per side


@pytest.fixture(params=[(True, 0), (False, 6)], ids=["dense", "experts"])
def folders(request, tmp_path) -> tuple[Path, Path, Path]:
    vision = save_vision(tmp_path / "vision", layer_norm_eps=1e-6, num_hidden_layers=4)
    language = save_qwen3(tmp_path / "language", *request.param)
    transplant(vision, language, tmp_path / "model")
    return vision, language, tmp_path / "model"


def test_limits_of_pixels_are_imported(folders: tuple[Path, Path, Path], tmp_path: Path, eyeline: Command) -> None:
    """Limits apply to any model of native sizes; other settings of the folder stay."""
    vision, language, model = folders
    before = open_bundle(model).bundle.config.vision
    done = eyeline("import", "small", "--model", str(model), "--max-pixels", "90000")
    assert done.code == 0, done.err
    assert open_bundle(tmp_path / "small").bundle.config.vision == before.model_copy(update={"max_pixels": 90000})
    stored = json.loads((tmp_path / "small" / "preprocessor_config.json").read_text())
    assert stored["size"] == {"shortest_edge": before.min_pixels, "longest_edge": 90000}
    parts = ("--vision", str(vision), "--language", str(language), "--transplant")
    refused = {
        ("--model", str(model), "--max-pixels", "100"): "min_pixels=65536 are more than max_pixels=100",
        ("--model", str(language), "--min-pixels", "100"): "this one is of family text",
        (*parts, "--max-pixels", "90000"): "need --model: they set the image limits of a complete model",
    }
    for options, message in refused.items():
        done = eyeline("import", "other", *options)
        assert (done.code, message in done.err) == (2, True), done.err
        assert not (tmp_path / "other").exists()


def save_naflex(folder: Path) -> Path:
    """A tower that takes images of any grid, its table as large as the fixed one's."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": PATCH}
    config = transformers.Siglip2VisionConfig(**shape, num_patches=RATIO**2, layer_norm_eps=1e-6, vision_use_head=False)
    model = transformers.Siglip2VisionModel(config)
    randomise(model, 1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.25]}))
    return folder


def opened(folder: Path) -> qwen_vl.Model:
    found = open_bundle(folder)
    model = load(found, "cpu").model
    assert isinstance(model, qwen_vl.Model)
    return model.eval()


def image() -> tuple[np.ndarray, Image]:
    """One of SigLIP's own size: its pixels, and as the transplanted tower takes it."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE), np.uint8)
    cells = [(y, x) for y in range(0, RATIO, 2) for x in range(0, RATIO, 2)]
    places = [(y + j, x + i) for y, x in cells for j in range(2) for i in range(2)]
    cut = [pixels[:, None, y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH].repeat(2, 1).flatten() for y, x in places]
    return pixels, Image("image", np.stack(cut), np.array(places, np.int32), Grid(RATIO, RATIO), 2)


def document(images: tuple[Image, ...], tokens: int) -> Document:
    tokens_T = np.random.default_rng(1).integers(0, 200, tokens).astype(np.int32)
    visual = np.arange(sum(i.tokens for i in images), dtype=np.int32)
    return Document("one", tokens_T, np.zeros_like(tokens_T), visual, images)


@torch.no_grad()
def test_text_is_computed_as_before(folders):
    _, language, model = folders
    reference = transformers.AutoModelForCausalLM.from_pretrained(language)
    d = document((), 20)
    want_TV = reference(input_ids=torch.from_numpy(d.tokens_T).long()[None]).logits[0]
    got_TV = opened(model)(replace(batch_of([d], None), labels_L=None)).out
    torch.testing.assert_close(got_TV, want_TV, rtol=1e-4, atol=1e-4)


def normed() -> tuple[Tensor, Image, list[int]]:
    """The image as SigLIP takes it, as the transplanted tower does, and where the patches of the one are in the other."""
    pixels, one = image()
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.5, 0.4, 0.6], [0.5, 0.3, 0.25]))
    return (torch.from_numpy(pixels).float() / 255 - mean) / std, one, [int(y) * RATIO + int(x) for y, x in one.places_P2]


@torch.no_grad()
def test_the_tower_is_siglips_but_for_its_rotations(folders, monkeypatch):
    vision, _, folder = folders
    reference = transformers.SiglipModel.from_pretrained(vision).vision_model
    pixels, image, places = normed()
    compare_without_rotations(folder, image, reference(pixels[None]).last_hidden_state[0][places], monkeypatch)


@torch.no_grad()
def test_a_naflex_tower_is_too(tmp_path, monkeypatch):
    vision, language = save_naflex(tmp_path / "vision"), save_qwen3(tmp_path / "language", True, 0)
    transplant(vision, language, tmp_path / "model")
    pixels, image, places = normed()
    rows = pixels.unflatten(2, (RATIO, PATCH)).unflatten(1, (RATIO, PATCH)).permute(1, 3, 2, 4, 0).reshape(1, RATIO**2, -1)
    mask, shapes = torch.ones(1, RATIO**2, dtype=torch.int64), torch.tensor([[RATIO, RATIO]])
    reference = transformers.Siglip2VisionModel.from_pretrained(vision)
    want_PD = reference(pixel_values=rows, pixel_attention_mask=mask, spatial_shapes=shapes).last_hidden_state[0][places]
    compare_without_rotations(tmp_path / "model", image, want_PD, monkeypatch)


def compare_without_rotations(folder: Path, image: Image, want_PD: Tensor, monkeypatch) -> None:
    """With the rotations off, on an image of the tower's own size, the main merger's norm gives the tower's normed features."""
    model, batch = opened(folder), batch_of([document((image,), 9)], None)
    inputs = (batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
    assert (model.projector.main.norm(model.vision(*inputs)[0]) - want_PD).abs().max() > 0.1, "rotations do change it"

    def still(places_P2: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        return torch.ones(len(places_P2), head_dim), torch.zeros(len(places_P2), head_dim)

    monkeypatch.setattr(qwen_vision, "axial_tables", still)
    torch.testing.assert_close(model.projector.main.norm(model.vision(*inputs)[0]), want_PD, rtol=1e-4, atol=1e-4)
    assert not any(x.any() for x in model.projector(model.vision(*inputs))[1]), "DeepStack starts at zero"


def test_transformers_loads_it(folders):
    _, _, folder = folders
    config = json.loads((folder / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    _, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert config["vision_config"]["deepstack_visual_indexes"] == [0, 1, 2]


@torch.no_grad()
def test_a_conversation_is_read_as_transformers_reads_it(folders, tmp_path):
    """Images of odd sizes through our data path, and through the processor that the folder's settings make: the same logits."""
    _, _, folder = folders
    found = open_bundle(folder)
    images = [drawing(0, 61).crop((0, 0, 61, 33)), drawing(1, 300).crop((0, 0, 171, 300))]
    for i, one in enumerate(images):
        one.save(tmp_path / f"{i}.png")
    first, second = (EncodedImage(f"{i}.png", tmp_path / f"{i}.png") for i in (0, 1))
    asked = (
        Message("user", (first, Text("What shape is it?"))),
        Message("assistant", (Text("A circle."),)),
        Message("user", (Text("And here? "), second)),
    )
    d = Prompts(found.bundle.encoder(), spec(found.bundle.config).image).prompt(asked)
    got_TV = opened(folder)(replace(batch_of([replace(d, labels_T=np.zeros_like(d.tokens_T))], None), labels_L=None)).out

    prepared = transformers.AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt")
    config = json.loads((folder / "config.json").read_text())
    tokens_1T = torch.from_numpy(d.tokens_T).long()[None]
    reference = getattr(transformers, config["architectures"][0]).from_pretrained(folder)
    want_TV = reference(input_ids=tokens_1T, mm_token_type_ids=(tokens_1T == config["image_token_id"]).int(), **prepared).logits[0]
    torch.testing.assert_close(got_TV, want_TV, rtol=1e-3, atol=1e-3)


def test_a_still_is_embedded_as_it_was():
    rng = torch.Generator().manual_seed(0)
    weight, patch = torch.randn(5, 12, generator=rng), torch.randn(7, 3, 1, 4, generator=rng)
    want = patch.flatten(1) @ weight.T
    for frames in (1, 2, 3):
        still = patch.expand(-1, -1, frames, -1).flatten(1)
        torch.testing.assert_close(still @ per_frame(weight, frames).T, want)


@pytest.mark.parametrize(("blocks", "layers", "deep"), [(27, 36, (5, 12, 19)), (3, 3, (0, 1)), (2, 3, (0,)), (1, 3, ()), (4, 2, (0, 1))])
def test_deepstack_takes_evenly_spread_blocks(blocks, layers, deep):
    tower = siglip2.Config(image_size=16, patch=4, hidden_size=16, layers=blocks, heads=2, intermediate_size=24)
    text = qwen3.Config(
        vocab_size=9, hidden_size=8, layers=layers, heads=2, kv_heads=1, head_dim=16, intermediate_size=8, tie_embeddings=True
    )
    assert transplanted(tower, text).vision.deepstack_layers == deep


def test_parts_that_cannot_become_one_are_refused(tmp_path):
    vision, other = save_vision(tmp_path / "vision", layer_norm_eps=1e-6), save_vision(tmp_path / "other", layer_norm_eps=1e-5)
    language, qwen2 = save_qwen3(tmp_path / "language", True, 0), save_language(tmp_path / "qwen2")
    with pytest.raises(Refused, match="family qwen2"):
        transplant(vision, qwen2, tmp_path / "out")
    with pytest.raises(Refused, match="layer_norm_eps=1e-05"):
        transplant(other, language, tmp_path / "out")
    with pytest.raises(Refused, match="ascending"):
        transplant(vision, language, tmp_path / "out", deepstack_layers=(7,))
    assert not (tmp_path / "out").exists()
