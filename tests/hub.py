"""Tiny checkpoints of the models that shipped recipes name, as their hub folders are, and a user's own data for them.

They are transformers' own classes, every tensor random.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from eyeline.data.text.templates import TEMPLATES
from tests.bundle.tiny import randomise, save_language, save_vision, tokenizer, without_image_token

TEXT: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "depth": 4, "num_heads": 2, "patch_size": 4, "out_hidden_size": 24,
    "num_position_embeddings": 25,
}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
PIXELS = {
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"shortest_edge": 256**2, "longest_edge": 4096**2},
}  # fmt: skip


def save_qwen_vl(
    kind: str, template: str, text: dict[str, Any], vision: dict[str, Any], tied: bool | None = None
) -> Callable[[Path], Path]:
    """A folder of `Qwen3VL...` or `Qwen3_5...ForConditionalGeneration`, in bfloat16 as published."""

    def save(folder: Path) -> Path:
        made = tokenizer(TEMPLATES[template])
        names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
        names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
        ids = {name: made.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
        config = getattr(transformers, f"{kind}Config")(
            text_config=TEXT | {"vocab_size": 384} | text,
            vision_config=VISION | vision,
            tie_word_embeddings="num_experts" not in text if tied is None else tied,
            **ids,
        )
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        randomise(model, 3)
        model.to(torch.bfloat16).save_pretrained(folder)
        made.save_pretrained(str(folder))
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast"} | PIXELS))
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": "Qwen3VLVideoProcessor"} | PIXELS))
        return folder

    return save


QWEN3 = {"head_dim": 8, "rope_parameters": SECTIONS}
QWEN3_5 = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2, **DELTA}
QWEN3_5 |= {"rope_parameters": SECTIONS | {"partial_rotary_factor": 0.5}}
SHARED = {"shared_expert_intermediate_size": 12}


def save_text(kind: str, template: str, whole: bool = True, **more: Any) -> Callable[[Path], Path]:
    """A folder of a `...ForCausalLM`; one that is not `whole` has neither a token for images nor a row to spare."""

    def save(folder: Path) -> Path:
        known = TEMPLATES[template]
        made = tokenizer(known if whole else without_image_token(known))
        rope = {"rope_type": "default", "rope_theta": 1e4}
        config = getattr(transformers, f"{kind}Config")(
            **TEXT | {"vocab_size": 384 if whole else len(made), "rope_parameters": rope, "tie_word_embeddings": True} | more
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        randomise(model, 2)
        model.to(torch.bfloat16).save_pretrained(folder)
        made.save_pretrained(str(folder))
        return folder

    return save


def save_siglip2(folder: Path) -> Path:
    return save_vision(folder, layer_norm_eps=1e-6, num_hidden_layers=4)


HUB: dict[str, Callable[[Path], Path]] = {
    "google/siglip2-base-patch16-224": save_siglip2,
    "google/siglip2-base-patch16-512": save_siglip2,
    "google/siglip2-so400m-patch16-384": save_siglip2,
    "Qwen/Qwen2.5-0.5B-Instruct": save_language,
    "Qwen/Qwen3-1.7B": save_text("Qwen3", "qwen3-thinking", head_dim=16),
    "HuggingFaceTB/SmolLM2-360M-Instruct": save_text("Llama", "smollm2", whole=False),
    "Qwen/Qwen3-VL-2B-Instruct": save_qwen_vl("Qwen3VL", "qwen3", QWEN3, {"deepstack_visual_indexes": [0, 2]}),
    "Qwen/Qwen3-VL-8B-Instruct": save_qwen_vl("Qwen3VL", "qwen3", QWEN3, {"deepstack_visual_indexes": [0, 2]}, tied=False),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": save_qwen_vl("Qwen3VLMoe", "qwen3", QWEN3 | EXPERTS, {"deepstack_visual_indexes": [0, 2]}),
    "Qwen/Qwen3.5-2B": save_qwen_vl("Qwen3_5", "qwen3.5", QWEN3_5, {}),
    "Qwen/Qwen3.5-35B-A3B": save_qwen_vl("Qwen3_5Moe", "qwen3.5-thinking", QWEN3_5 | EXPERTS | SHARED, {}),
}


def write_mine(folder: Path) -> None:
    """A user's own JSON, with paths of images next to it: what `my-data` asks for."""
    rng = np.random.default_rng(2)
    (folder / "images").mkdir()
    rows = []
    for n in range(30):
        pixels = rng.integers(0, 256, (1, 1, 3)) * np.ones((12 + 7 * (n % 3), 16 + 5 * (n % 4), 1))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/{n}.png")
        turns = [{"from": "human", "value": "<image>\nWhich number?"}, {"from": "gpt", "value": f"Number {n}."}]
        rows.append({"id": str(n), "image": f"images/{n}.png", "conversations": turns})
    (folder / "mine.json").write_text(json.dumps(rows))


def resize(preprocessor: Path) -> None:
    """Tiny images, set in the model folder as a head says, where they have no size of their own."""
    if preprocessor.exists():
        settings = json.loads(preprocessor.read_text())
        if "longest_edge" in settings["size"]:
            preprocessor.write_text(
                json.dumps(settings | {"size": {"shortest_edge": 8**2, "longest_edge": 40**2}, "min_pixels": 8**2, "max_pixels": 40**2})
            )
