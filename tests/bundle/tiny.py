"""Tiny checkpoints as the hub has them, made by transformers' own classes, every tensor random, and questions to ask both sides."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipConfig,
    SiglipModel,
    SiglipTextConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from eyeline.bundle.bundle import Bundle
from eyeline.bundle.importing import import_model
from eyeline.core.batch import Document, EncodedImage, Message, Text
from eyeline.core.image_rule import ImageRule
from eyeline.data.fetch.batches import batch_of
from eyeline.data.text.templates import TEMPLATES, Template
from eyeline.data.text.tokenizer import train_bpe
from eyeline.generate.prompts import Prompts
from eyeline.models import llava
from eyeline.models.shape import build

SIDE, PATCH, ROWS = 16, 4, 384  # pixels, pixels, rows of the embedding: more than the tokenizer uses
TEXTS = ["What shape is in the image? A circle.", "Which colour has the square? It is blue.", "how many corners has it, three?"] * 3
PREPROCESSOR = {
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.3, 0.25],
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 0.00392156862745098,
    "do_normalize": True,
}


def randomise(model: nn.Module, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            scale = 0.3 if p.ndim < 2 else 1.2 * p[0].numel() ** -0.5
            p.copy_(noise * scale + (1 if "norm" in name and name.endswith("weight") else 0))


def vision_config(**changes: object) -> SiglipVisionConfig:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    return SiglipVisionConfig(**(shape | {"image_size": SIDE, "patch_size": PATCH, "layer_norm_eps": 1e-5} | changes))


def save_vision(folder: Path, whole: bool = True, **changes: object) -> Path:
    """A SigLIP folder: the whole contrastive model as the hub has it, or the tower alone with its pooling head."""
    if whole:
        text = SiglipTextConfig(
            vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8
        )
        model: nn.Module = SiglipModel(SiglipConfig(text_config=text.to_dict(), vision_config=vision_config(**changes).to_dict()))
    else:
        model = SiglipVisionModel(vision_config(**changes))
    randomise(model, 1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def tokenizer(template: Template = TEMPLATES["qwen2.5"], vocabulary: int = 300) -> PreTrainedTokenizerBase:
    return train_bpe(TEXTS, vocabulary, template)


def without_image_token(template: Template) -> Template:
    return replace(template, controls=tuple(c for c in template.controls if c != template.image))


def save_language(
    folder: Path,
    tied: bool = True,
    rows: int = ROWS,
    tok: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.float32,
    width: int = 24,
) -> Path:
    config = Qwen2Config(
        vocab_size=rows, hidden_size=width, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=512,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    randomise(model, 2)
    model.to(dtype).save_pretrained(folder)
    (tok or tokenizer()).save_pretrained(str(folder))
    return folder


FORMS = {  # name -> settings of an import whose export has that form
    "llava": {"feature_norm": False},
    "lfm2_vl": {"projector": llava.ProjectorConfig(shuffle=2, norm=True, hidden_size=20)},
    "parts": {"projector": llava.ProjectorConfig(kind="linear")},
}


def imported(folder: Path, form: str, tied: bool = True) -> tuple[Path, Bundle]:
    """A parts folder of tiny checkpoints."""
    vision, language = save_vision(folder / "hub-vision"), save_language(folder / "hub-language", tied)
    return folder / "model", import_model(vision, language, folder / "model", **FORMS[form])


def built(bundle: Bundle, seed: int | None = None) -> llava.Model:
    """A model of the bundle's shape; with a seed, every tensor random."""
    model = build(bundle.config, "cpu").eval()
    if seed is not None:
        randomise(model, seed)
    return model


# ---- questions


def drawing(seed: int, size: int = SIDE) -> Pillow.Image:
    return Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8))


def asked(bundle: Bundle, rule: ImageRule | None, folder: Path, size: int = SIDE) -> Document:
    """A conversation with two images in different turns, ready to be answered."""
    for i in (0, 1):
        drawing(i, size).save(folder / f"{i}.png")
    images = [EncodedImage(f"{i}.png", folder / f"{i}.png") for i in (0, 1)]
    messages = (
        Message("user", (images[0], Text("What shape is it?"))),
        Message("assistant", (Text("A circle."),)),
        Message("user", (Text("And here? "), images[1])),
    )
    return Prompts(bundle.encoder(), rule).prompt(messages)


CONVERSATION = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What shape is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A circle."}]},
    {"role": "user", "content": [{"type": "text", "text": "And here? "}, {"type": "image"}]},
]


@torch.no_grad()
def our_logits(model: llava.Model, document: Document) -> Tensor:
    """Logits of every position."""
    batch = batch_of([replace(document, labels_T=np.zeros_like(document.tokens_T))], None)
    return model.eval()(replace(batch, labels_L=None)).out


def save_qwen3(folder: Path, tied: bool, experts: int) -> Path:
    shape = {
        "vocab_size": ROWS, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if experts:
        more = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **more))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    randomise(model, 2)
    model.save_pretrained(folder)
    tokenizer(TEMPLATES["qwen3"]).save_pretrained(str(folder))
    return folder
