"""Published models by their sizes, for a roofline without their files: what `config.json` of each says, in our settings."""

from typing import Any

from eyeline.core.errors import Refused, nearest
from eyeline.models import CONFIG, Config

SMALL_TOWER = {"hidden_size": 1024, "layers": 24, "heads": 16, "intermediate_size": 4096}
LARGE_TOWER = {"hidden_size": 1152, "layers": 27, "heads": 16, "intermediate_size": 4304}
SO400M = LARGE_TOWER | {"image_size": 384, "patch": 14}
QWEN3 = {"family": "qwen3", "vocab_size": 151936, "mrope_section": (24, 20, 20), "rope_theta": 5e6, "max_positions": 262144}
QWEN3_5 = {"family": "qwen3_5", "vocab_size": 248320}


def _qwen3_vl(tower: dict[str, Any], deep: tuple[int, ...], **language: Any) -> dict[str, Any]:
    return {"family": "qwen3_vl", "vision": tower | {"deepstack_layers": deep}, "language": QWEN3 | language}


def _qwen3_5(tower: dict[str, Any], **language: Any) -> dict[str, Any]:
    return {"family": "qwen3_5_vl", "vision": tower, "language": QWEN3_5 | language}


def _experts(count: int, size: int) -> dict[str, int]:
    return {"num_experts": count, "experts_per_token": 8, "intermediate_size": size}


SIZES: dict[str, dict[str, Any]] = {
    "so400m-qwen2.5-0.5b": {
        "family": "llava",
        "vision": SO400M,
        "language": {
            "family": "qwen2", "vocab_size": 151936, "hidden_size": 896, "layers": 24, "heads": 14, "kv_heads": 2,
            "intermediate_size": 4864, "tie_embeddings": True,
        },
    },
    "qwen3-vl-2b": _qwen3_vl(
        SMALL_TOWER, (5, 11, 17), hidden_size=2048, layers=28, heads=16, kv_heads=8, intermediate_size=6144, tie_embeddings=True
    ),
    "qwen3-vl-8b": _qwen3_vl(
        LARGE_TOWER, (8, 16, 24), hidden_size=4096, layers=36, heads=32, kv_heads=8, intermediate_size=12288, tie_embeddings=False
    ),
    "qwen3-vl-30b-a3b": _qwen3_vl(
        LARGE_TOWER, (8, 16, 24), hidden_size=2048, layers=48, heads=32, kv_heads=4, intermediate_size=6144, tie_embeddings=False,
        experts=_experts(128, 768),
    ),
    "qwen3.5-2b": _qwen3_5(
        SMALL_TOWER, hidden_size=2048, layers=24, heads=8, kv_heads=2, intermediate_size=6144, tie_embeddings=True,
        delta={"key_heads": 16, "value_heads": 16},
    ),
    "qwen3.5-35b-a3b": _qwen3_5(
        LARGE_TOWER, hidden_size=2048, layers=40, heads=16, kv_heads=2, tie_embeddings=False, experts=_experts(256, 512),
        shared_expert_size=512, delta={"key_heads": 16, "value_heads": 32},
    ),
}  # fmt: skip


def config_of(size: str) -> Config:
    """The config of a published size. Refused for one that is not in the table."""
    if size not in SIZES:
        raise Refused(f"--size {size!r} is not known.{nearest(size, list(SIZES))} Known: {', '.join(SIZES)}")
    return CONFIG.validate_python(SIZES[size])
