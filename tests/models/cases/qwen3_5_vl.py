"""Qwen3.5 with its tower, dense and with experts: Gated DeltaNet, gated attention, no DeepStack."""

from typing import Any

from eyeline.models import hf, qwen3_5, qwen3_5_vl
from tests.models.cases.qwen3_vl import SPARSE, TOKENS, VISION, inputs_of, shown
from tests.models.parity import VOCABULARY, Case, peer_of

PLAIN = VISION.model_copy(update={"deepstack_layers": ()})


def language(tie_embeddings: bool, **more: Any) -> qwen3_5.Config:
    return qwen3_5.Config(
        vocab_size=VOCABULARY,
        hidden_size=24,
        layers=2,
        layer_types=("linear_attention", "full_attention"),
        heads=4,
        kv_heads=2,
        head_dim=16,
        delta=qwen3_5.Delta(key_heads=2, value_heads=4, key_dim=16, value_dim=6),  # keys of few dims are alike: ill-conditioned
        eps=2e-3,
        rope_theta=100.0,
        partial_rotary_factor=0.5,
        mrope_section=(2, 1, 1),
        tie_embeddings=tie_embeddings,
        **more,
    )


def case(id: str, c: qwen3_5_vl.Config) -> Case:
    form = hf.qwen3_5_vl.form(c)
    config_json = dict(hf.qwen3_5_vl.to_hf(c, form, TOKENS)["config.json"])
    # what transformers 5 writes; the hub's layout has a test of its own
    saved = {"model.language_model.layers.0.mlp.experts.0.gate_proj.weight": (8, 24)}
    keys = hf.qwen3_5_vl.keys(c, form, saved)
    # norms of what a memory answers magnify its rounding, and a rounded token may choose another expert
    half = 0.08 if c.language.experts is None else 0.15
    return Case(id, c, lambda: peer_of(config_json), inputs_of(c.vision), keys, shown(c.vision), hf.qwen3_5_vl.dropped(c, form), half)


CASES = [
    case("tied", qwen3_5_vl.Config(vision=PLAIN, language=language(tie_embeddings=True, intermediate_size=40))),
    case("experts", qwen3_5_vl.Config(vision=PLAIN, language=language(tie_embeddings=False, experts=SPARSE, shared_expert_size=12))),
]
