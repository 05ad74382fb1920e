"""Tiny random models in two builds, transformers' and ours, with the same weights, and prompts that both understand."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig

from eyeline.core.batch import IGNORE, Document, Grid, Image
from eyeline.core.plan import Spec
from eyeline.models import hf, llava, qwen2, siglip2
from eyeline.models.shape import build
from tests.weights import load_into

SIDE, PATCH, IMAGE_TOKEN, VOCABULARY = 4, 8, 200, 211


def configs(tied: bool, longest: int = 512) -> tuple[llava.Config, SiglipVisionConfig, Qwen2Config]:
    """Our config and theirs."""
    ours = llava.Config(
        vision=siglip2.Config(image_size=SIDE * PATCH, patch=PATCH, hidden_size=32, layers=2, heads=2, intermediate_size=48),
        language=qwen2.Config(
            vocab_size=VOCABULARY,
            hidden_size=48,
            layers=3,
            heads=4,
            kv_heads=2,
            intermediate_size=64,
            rope_theta=1e4,
            max_positions=longest,
            tie_embeddings=tied,
        ),
        feature_norm=False,
    )
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE * PATCH, patch_size=PATCH,
        vision_use_head=False,
    )  # fmt: skip
    language = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=longest, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return ours, vision, language


def llava_peers(folder: Path, tied: bool = False) -> tuple[LlavaForConditionalGeneration, llava.Model, Spec]:
    ours, vision, language = configs(tied)
    features = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    config = LlavaConfig(vision_config=vision, text_config=language, image_token_index=IMAGE_TOKEN, tie_word_embeddings=tied, **features)
    peer = LlavaForConditionalGeneration(config).eval()
    randomise(peer)
    peer.save_pretrained(folder)
    model = build(ours, "cpu").eval()
    load_into(
        dict(model.named_parameters(remove_duplicate=False)),
        folder,
        hf.llava.keys(ours, hf.llava.form(ours), {"vision_tower.embeddings.patch_embedding.bias": (1,)}),
        dropped=("vision_tower.post_layernorm.*",),
    )
    return peer, model, llava.spec(ours)


def qwen2_peers(folder: Path, longest: int = 512) -> tuple[Qwen2ForCausalLM, llava.Model, Spec]:
    """The language model alone, tied; our tower and projector are there, and never run."""
    ours, _, language = configs(tied=True, longest=longest)
    peer = Qwen2ForCausalLM(language).eval()
    randomise(peer)
    peer.save_pretrained(folder)
    model = build(ours, "cpu").eval()
    load_into(dict(model.language.named_parameters(remove_duplicate=False)), folder, hf.qwen2.keys(ours.language))
    return peer, model, llava.spec(ours)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Every tensor, zeros and ones of biases and norms included; so large that answers do not repeat one token for ever."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * (0.3 if parameter.ndim > 1 else 1.0))


def image(key: str) -> Image:
    rng = np.random.default_rng(sum(key.encode()))
    patches_PC = rng.integers(0, 256, (SIDE * SIDE, 3 * PATCH * PATCH), np.uint8)
    places_P2 = np.stack(np.divmod(np.arange(SIDE * SIDE, dtype=np.int32), SIDE), 1)
    return Image(key, patches_PC, places_P2, Grid(SIDE, SIDE), 1)


def prompt(name: str, *pieces: int | Image) -> Document:
    """Pieces are a number of random text tokens, or an image."""
    rng = np.random.default_rng(sum(name.encode()))
    tokens: list[int] = []
    visual: list[int] = []
    for piece in pieces:
        if isinstance(piece, Image):
            visual += range(len(tokens), len(tokens) + piece.tokens)
            tokens += [IMAGE_TOKEN] * piece.tokens
        else:
            tokens += rng.integers(0, IMAGE_TOKEN, piece).tolist()
    tokens_T = np.array(tokens, np.int32)
    images = tuple(p for p in pieces if isinstance(p, Image))
    return Document(name, tokens_T, np.full_like(tokens_T, IGNORE), np.array(visual, np.int32), images)


def pixel_values(image: Image) -> Tensor:
    """[1, 3, height, width] as the peer wants them, from patches in rows."""
    cells = torch.from_numpy(image.patches_PC).view(SIDE, SIDE, 3, PATCH, PATCH)
    return (cells.permute(2, 0, 3, 1, 4).reshape(1, 3, SIDE * PATCH, SIDE * PATCH) / 255 - 0.5) / 0.5


def generated(peer: Any, document: Document, max_tokens: int, stop_ids: list[int]) -> list[int]:
    """The peer's greedy answer to one prompt alone, without the stop token."""
    tokens_1T = torch.from_numpy(document.tokens_T.astype(np.int64))[None]
    images = {"pixel_values": torch.cat([pixel_values(i) for i in document.images])} if document.images else {}
    out = peer.generate(
        input_ids=tokens_1T, attention_mask=torch.ones_like(tokens_1T), max_new_tokens=max_tokens, do_sample=False,
        eos_token_id=stop_ids or None, pad_token_id=0, **images,
    )  # fmt: skip
    answer = out[0, tokens_1T.shape[1] :].tolist()
    return answer[:-1] if answer and answer[-1] in stop_ids else answer
