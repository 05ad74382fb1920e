"""Language models alone, by their own classes."""

from typing import Any

from eyeline.models import llama, qwen2, qwen3, text
from eyeline.models.forms import MediaTokens
from eyeline.models.moe import Experts
from tests.models.twins import IMAGE_TOKEN, VOCABULARY, Case, texts, token_inputs, twin_of

SHAPE: dict[str, Any] = {
    "vocabulary": VOCABULARY, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2, "feed_forward": 40, "eps": 1e-3, "rope_theta": 100.0
}  # fmt: skip
QWEN2 = qwen2.Config(**SHAPE, head_dim=8, tied=True)
SPARSE = qwen3.Config(**SHAPE, head_dim=8, experts=Experts(count=5, active=2, feed_forward=8), tied=False)
CONFIGS = {
    "qwen2 tied": QWEN2,
    "qwen2 untied": QWEN2.model_copy(update={"tied": False}),
    "qwen3 tied": qwen3.Config(**SHAPE, head_dim=10, tied=True),
    "qwen3 of experts": SPARSE,
    "qwen3, some layers of experts": qwen3.Config(
        **SHAPE | {"layers": 4},
        head_dim=8,
        experts=Experts(count=5, active=3, feed_forward=8, normalised=False),
        sparse_every=2,
        dense_layers=(3,),
        tied=True,
    ),
    "llama": llama.Config(**SHAPE, tied=False),
    "llama, stretched": llama.Config(**SHAPE, head_dim=8, stretch=llama.Stretched(factor=4, original=12), tied=True),
}


def case(id: str, c: text.Config) -> Case:
    form = text.form(c)
    files = text.to_hf(c, form, MediaTokens(IMAGE_TOKEN, "<|image_pad|>"))
    return Case(id, c, lambda: twin_of(files["config.json"]), token_inputs, text.keys(c, form), texts())


CASES = [case(id, text.Config(language=c)) for id, c in CONFIGS.items()]
