"""Language models alone, by their own classes."""

from typing import Any

from eyeline.models import hf, llama, qwen2, qwen3, qwen3_5, text
from eyeline.models.hf.forms import MediaTokens
from eyeline.models.moe import Experts
from tests.models.parity import IMAGE_TOKEN, VOCABULARY, Case, peer_of, texts, token_inputs

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 40, "eps": 1e-3,
    "rope_theta": 100.0,
}  # fmt: skip
QWEN2 = qwen2.Config(**SHAPE, head_dim=8, tie_embeddings=True)
SPARSE = qwen3.Config(**SHAPE, head_dim=8, experts=Experts(num_experts=5, experts_per_token=2, intermediate_size=8), tie_embeddings=False)
DELTA = SHAPE | {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "mrope_section": (2, 1, 1),
    "delta": qwen3_5.Delta(key_heads=2, value_heads=6, key_dim=16, value_dim=6),  # keys of few dims are alike: ill-conditioned
    "eps": 2e-3,
}
CONFIGS = {
    "qwen2 tied": QWEN2,
    "qwen2 untied": QWEN2.model_copy(update={"tie_embeddings": False}),
    "qwen3 tied": qwen3.Config(**SHAPE, head_dim=10, tie_embeddings=True),
    "qwen3 of experts": SPARSE,
    "qwen3, some layers of experts": qwen3.Config(
        **SHAPE | {"layers": 4},
        head_dim=8,
        experts=Experts(num_experts=5, experts_per_token=3, intermediate_size=8, norm_topk_prob=False),
        sparse_every=2,
        dense_layers=(3,),
        tie_embeddings=True,
    ),
    "qwen3_5": qwen3_5.Config(
        **DELTA | {"layers": 3}, layer_types=("linear_attention", "full_attention", "linear_attention"), tie_embeddings=True
    ),
    "qwen3_5 of experts": qwen3_5.Config(
        **DELTA | {"intermediate_size": None},
        layer_types=("linear_attention", "full_attention"),
        experts=Experts(num_experts=6, experts_per_token=2, intermediate_size=8),
        shared_expert_size=20,
        tie_embeddings=False,
    ),
    "llama": llama.Config(**SHAPE, tie_embeddings=False),
    "llama, stretched": llama.Config(
        **SHAPE, head_dim=8, rope_scaling=llama.RopeScaling(factor=4, original_max_positions=12), tie_embeddings=True
    ),
}


def case(id: str, c: text.Config) -> Case:
    form = hf.text.form(c)
    files = hf.text.to_hf(c, form, MediaTokens(IMAGE_TOKEN, "<|image_pad|>"))
    half = 0.08 if c.language.family == "qwen3_5" else 0.07  # norms of what a memory answers magnify its rounding
    return Case(id, c, lambda: peer_of(files["config.json"]), token_inputs, hf.text.keys(c, form), texts(), half=half)


CASES = [case(id, text.Config(language=c)) for id, c in CONFIGS.items()]
