"""Published sizes, as our configs: for planning, and for tests that build them on the meta device.

Each is what the checkpoint's own config.json says. Towers and language models are parts, to be composed; MODELS are whole.
"""

from typing import Any

from eyeline.models import llama, llava, qwen2, qwen3, qwen3_5, qwen3_5_vl, qwen3_vl, qwen_vision, siglip2
from eyeline.models.languages import LanguageConfig
from eyeline.models.moe import Experts

# ---- vision towers


def _siglip2(image_size: int, patch: int, width: int, layers: int, heads: int, feed_forward: int) -> siglip2.Config:
    return siglip2.Config(
        image_size=image_size, patch=patch, width=width, layers=layers, heads=heads, feed_forward=feed_forward, resample="bilinear"
    )


TOWERS: dict[str, siglip2.Config] = {
    "google/siglip2-base-patch16-224": _siglip2(224, 16, 768, 12, 12, 3072),
    "google/siglip2-base-patch16-512": _siglip2(512, 16, 768, 12, 12, 3072),
    "google/siglip2-large-patch16-256": _siglip2(256, 16, 1024, 24, 16, 4096),
    "google/siglip2-so400m-patch14-384": _siglip2(384, 14, 1152, 27, 16, 4304),
    "google/siglip2-so400m-patch16-384": _siglip2(384, 16, 1152, 27, 16, 4304),
    "google/siglip2-so400m-patch16-512": _siglip2(512, 16, 1152, 27, 16, 4304),
}

# ---- language models


def _qwen2_5(width: int, layers: int, heads: int, kv_heads: int, feed_forward: int, tied: bool, vocabulary: int = 151936) -> qwen2.Config:
    sizes: dict[str, Any] = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads, "feed_forward": feed_forward}
    return qwen2.Config(vocabulary=vocabulary, tied=tied, **sizes)


def _qwen3(
    width: int, layers: int, heads: int, kv_heads: int, feed_forward: int, tied: bool, experts: Experts | None = None, **more: Any
) -> qwen3.Config:
    sizes: dict[str, Any] = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads, "feed_forward": feed_forward}
    return qwen3.Config(vocabulary=151936, experts=experts, tied=tied, **sizes, **more)


def _qwen3_5(width: int, layers: int, heads: int, kv_heads: int, memories: int, tied: bool, **more: Any) -> qwen3_5.Config:
    sizes: dict[str, Any] = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    return qwen3_5.Config(vocabulary=248320, delta=qwen3_5.Delta(value_heads=memories), tied=tied, **sizes, **more)


def _smollm2(width: int, layers: int, heads: int, kv_heads: int, feed_forward: int, rope_theta: float, vocabulary: int) -> llama.Config:
    sizes: dict[str, Any] = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads, "feed_forward": feed_forward}
    return llama.Config(vocabulary=vocabulary, eps=1e-5, rope_theta=rope_theta, longest=8192, tied=True, **sizes)


def _experts(count: int, active: int, feed_forward: int) -> Experts:
    return Experts(count=count, active=active, feed_forward=feed_forward)


LANGUAGES: dict[str, LanguageConfig] = {
    "Qwen/Qwen2.5-0.5B": _qwen2_5(896, 24, 14, 2, 4864, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2_5(1536, 28, 12, 2, 8960, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2_5(2048, 36, 16, 2, 11008, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2_5(3584, 28, 28, 4, 18944, tied=False, vocabulary=152064),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 8, 17408, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 8, 25600, tied=False),
    "Qwen/Qwen3-30B-A3B": _qwen3(2048, 48, 32, 4, 6144, tied=False, experts=_experts(128, 8, 768)),
    "Qwen/Qwen3-235B-A22B": _qwen3(4096, 94, 64, 4, 12288, tied=False, experts=_experts(128, 8, 1536)),
    "HuggingFaceTB/SmolLM2-135M": _smollm2(576, 30, 9, 3, 1536, 1e5, 49152),
    "HuggingFaceTB/SmolLM2-360M": _smollm2(960, 32, 15, 5, 2560, 1e5, 49152),
    "HuggingFaceTB/SmolLM2-1.7B": _smollm2(2048, 24, 32, 32, 8192, 1.3e5, 49152),
}

# ---- whole models

_SMALL = qwen_vision.Config(width=768, layers=12, heads=12, feed_forward=3072)
_MIDDLE = qwen_vision.Config(width=1024, layers=24, heads=16, feed_forward=4096)
_LARGE = qwen_vision.Config(width=1152, layers=27, heads=16, feed_forward=4304)
_DEEP = {24: (5, 11, 17), 27: (8, 16, 24)}  # DeepStack's blocks, by the depth of the tower


def _qwen3_vl(vision: qwen_vision.Config, *sizes: Any, **more: Any) -> qwen3_vl.Config:
    language = _qwen3(*sizes, **more, rope_theta=5e6, sections=(24, 20, 20), longest=262144)
    return qwen3_vl.Config(vision=vision.model_copy(update={"deep": _DEEP[vision.layers]}), language=language)


def _qwen3_5_vl(vision: qwen_vision.Config, *sizes: Any, **more: Any) -> qwen3_5_vl.Config:
    return qwen3_5_vl.Config(vision=vision, language=_qwen3_5(*sizes, **more))


def _sparse(count: int, active: int, feed_forward: int) -> dict[str, Any]:
    """Experts of Qwen3.5: the shared one is as wide as another."""
    return {"experts": _experts(count, active, feed_forward), "shared": feed_forward}


MODELS: dict[str, qwen3_vl.Config | qwen3_5_vl.Config | llava.Config] = {
    "Qwen/Qwen3-VL-2B-Instruct": _qwen3_vl(_MIDDLE, 2048, 28, 16, 8, 6144, tied=True),
    "Qwen/Qwen3-VL-4B-Instruct": _qwen3_vl(_MIDDLE, 2560, 36, 32, 8, 9728, tied=True),
    "Qwen/Qwen3-VL-8B-Instruct": _qwen3_vl(_LARGE, 4096, 36, 32, 8, 12288, tied=False),
    "Qwen/Qwen3-VL-32B-Instruct": _qwen3_vl(_LARGE, 5120, 64, 64, 8, 25600, tied=False),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _qwen3_vl(_LARGE, 2048, 48, 32, 4, 6144, tied=False, experts=_experts(128, 8, 768)),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": _qwen3_vl(_LARGE, 4096, 94, 64, 4, 12288, tied=False, experts=_experts(128, 8, 1536)),
    "Qwen/Qwen3.5-0.8B": _qwen3_5_vl(_SMALL, 1024, 24, 8, 2, 16, tied=True, feed_forward=3584),
    "Qwen/Qwen3.5-2B": _qwen3_5_vl(_MIDDLE, 2048, 24, 8, 2, 16, tied=True, feed_forward=6144),
    "Qwen/Qwen3.5-4B": _qwen3_5_vl(_MIDDLE, 2560, 32, 16, 4, 32, tied=True, feed_forward=9216),
    "Qwen/Qwen3.5-9B": _qwen3_5_vl(_LARGE, 4096, 32, 16, 4, 32, tied=False, feed_forward=12288),
    "Qwen/Qwen3.5-27B": _qwen3_5_vl(_LARGE, 5120, 64, 24, 4, 48, tied=False, feed_forward=17408),
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5_vl(_LARGE, 2048, 40, 16, 2, 32, tied=False, **_sparse(256, 8, 512)),
    "Qwen/Qwen3.5-122B-A10B": _qwen3_5_vl(_LARGE, 3072, 48, 32, 2, 64, tied=False, **_sparse(256, 8, 1024)),
    "Qwen/Qwen3.5-397B-A17B": _qwen3_5_vl(_LARGE, 4096, 60, 32, 2, 64, tied=False, **_sparse(512, 10, 1024)),
    # Its shape; its projector has no bias. 66 rows of the embedding are for the marks of tiles.
    "lusxvr/nanoVLM-460M-8k": llava.Config(
        vision=TOWERS["google/siglip2-base-patch16-512"],
        projector=llava.ProjectorConfig(kind="linear", shuffle=4),
        language=_smollm2(960, 32, 15, 5, 2560, 1e5, 49152 + 66),
    ),
}
