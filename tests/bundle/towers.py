"""A tiny checkpoint with an image and a text tower, as the hub has them, and what transformers makes of images and texts with it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast, Siglip2Config, Siglip2Model, SiglipConfig, SiglipImageProcessorPil, SiglipModel
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from tests.bundle.tiny import PATCH, PREPROCESSOR, SIDE, randomise, tokenizer

WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = WIDTHS | {"vocab_size": 320, "max_position_embeddings": 12}
NAFLEX = {"image_processor_type": "Siglip2ImageProcessor", "patch_size": PATCH, "max_num_patches": 20, "resample": 2}


def save_towers(folder: Path, naflex: bool = False, seed: int = 5) -> Path:
    if naflex:
        vision = WIDTHS | {"num_patches": 16, "patch_size": PATCH}
        model = Siglip2Model(Siglip2Config(text_config=TEXT | {"projection_size": 16}, vision_config=vision))
    else:
        model = SiglipModel(SiglipConfig(text_config=TEXT, vision_config=WIDTHS | {"image_size": SIDE, "patch_size": PATCH}))
    randomise(model, seed)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(str(folder))
    (folder / "preprocessor_config.json").write_text(json.dumps(NAFLEX if naflex else PREPROCESSOR))
    return folder


@torch.no_grad()
def wanted_scores(folder: Path, images: Sequence[Path], texts: Sequence[str]) -> np.ndarray:
    """The cosine of each image with each text, by transformers' own classes."""
    naflex = json.loads((folder / "config.json").read_text())["model_type"] == "siglip2"
    model = (Siglip2Model if naflex else SiglipModel).from_pretrained(folder).eval()
    process = (Siglip2ImageProcessorPil if naflex else SiglipImageProcessorPil).from_pretrained(folder)
    tokens = PreTrainedTokenizerFast.from_pretrained(folder)
    length = model.config.text_config.max_position_embeddings
    said = [text.lower() if naflex else text for text in texts]  # as Siglip2Tokenizer does
    ids = tokens(said, padding="max_length", truncation=True, max_length=length, return_tensors="pt")["input_ids"]
    rgb = [Pillow.open(path).convert("RGB") for path in images]
    out = model(input_ids=ids, **process(rgb, return_tensors="pt"))
    return (out.image_embeds @ out.text_embeds.T).numpy()
