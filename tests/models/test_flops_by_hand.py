"""The cases that docs/flops.md writes out, one per family: numbers derived by hand there, and what the code counts."""

from dataclasses import replace
from pathlib import Path

from eyeline.core.batch import Document
from eyeline.data.fetch.batches import batch_of
from eyeline.models import (
    Config,
    Model,
    flops,
    llava,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_vl,
    qwen3_vl,
    qwen_vision,
    siglip2,
    spec,
    text,
)
from eyeline.models.lora import LoRA, wrap
from eyeline.models.moe import Experts
from eyeline.models.shape import build
from tests.models.parity import document, image

DOCS = (Path(__file__).parents[2] / "docs" / "flops.md").read_text("utf-8")
QWEN2 = qwen2.Config(vocab_size=53, hidden_size=24, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=40, tie_embeddings=False)


def counted(c: Config, model: Model, documents: list[Document], labels: int) -> dict[str, int]:
    """FLOPs by part, for documents with `labels` labels together. Each number must be in the text."""
    batch = batch_of(documents, None)
    batch = replace(batch, counts=replace(batch.counts, supervised=labels))
    done = {part: n for part, n in flops.count(model, spec(c).image).of(batch).by_part.items() if n}
    assert all(f"**{n:,}**" in DOCS for n in done.values()), done
    return done


def test_text():
    c = text.Config(language=QWEN2)
    done = counted(c, build(c, "meta"), [document("a", 9), document("b", 12)], labels=7)
    assert done == {"language": 3 * 466_944, "head": 3 * 17_808}


def test_text_with_a_memory():
    delta = qwen3_5.Delta(key_heads=2, value_heads=6, key_dim=8, value_dim=6)
    sizes = {
        "vocab_size": 53,
        "hidden_size": 24,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "mrope_section": (2, 1, 1),
        "delta": delta,
    }
    kinds = ("linear_attention", "full_attention")
    c = text.Config(language=qwen3_5.Config(**sizes, layers=2, layer_types=kinds, intermediate_size=40, tie_embeddings=False))
    done = counted(c, build(c, "meta"), [document("a", 9), document("b", 12)], labels=7)
    assert done == {"language": 3 * 720_960, "head": 3 * 17_808}


def test_llava():
    vision = siglip2.Config(image_size=12, patch=3, hidden_size=16, layers=1, heads=2, intermediate_size=24)
    c = llava.Config(vision=vision, projector=llava.ProjectorConfig(shuffle=2, hidden_size=20), language=QWEN2)
    model = build(c, "meta")
    model.requires_grad_(False)
    model.projector.requires_grad_(True)
    wrap(model, spec(c), "language", LoRA(rank=2, alpha=2, targets=("q_proj", "v_proj")))
    shown = document("shown", 2, image("cat", 4, 4, 3, 2), 4)
    done = counted(c, model, [shown], labels=3)
    assert done == {"vision": 87_552, "projector": 32_000, "language": 480_000, "head": 15_264}


VISION = qwen_vision.Config(patch=3, hidden_size=16, layers=1, heads=2, intermediate_size=24, position_grid=4, deepstack_layers=(0,))
SHOWN = document("shown", 2, image("cat", 4, 4, 3, 2, 2), 4, positions="grid")


def test_qwen3_vl():
    language = qwen3.Config(
        vocab_size=53,
        hidden_size=24,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=40,
        experts=Experts(num_experts=6, experts_per_token=2, intermediate_size=8),
        mrope_section=(2, 1, 1),
        tie_embeddings=True,
    )
    c = qwen3_vl.Config(vision=VISION, language=language)
    done = counted(c, build(c, "meta"), [SHOWN], labels=3)
    assert done == {"vision": 276_480, "projector": 270_336, "language": 474_240, "head": 22_896}


def test_qwen3_5_vl():
    language = qwen3_5.Config(
        vocab_size=53,
        hidden_size=24,
        layers=2,
        layer_types=("linear_attention", "full_attention"),
        heads=4,
        kv_heads=2,
        head_dim=16,
        partial_rotary_factor=0.5,
        mrope_section=(2, 1, 1),
        delta=qwen3_5.Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
        intermediate_size=40,
        tie_embeddings=True,
    )
    c = qwen3_5_vl.Config(vision=VISION.model_copy(update={"deepstack_layers": ()}), language=language)
    model = build(c, "meta")
    model.vision.requires_grad_(False)
    model.projector.requires_grad_(False)
    done = counted(c, model, [SHOWN], labels=3)
    assert done == {"vision": 101_376, "projector": 45_056, "language": 952_320, "head": 22_896}
