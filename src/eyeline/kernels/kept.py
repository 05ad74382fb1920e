"""Selective recomputation: in the backward pass everything is made again but what matrix products and attention gave."""

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# What is kept, by name. In-place ones as well: what they change was kept, and must not be changed a second time.
KEPT = frozenset(
    (
        *("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::mul_"),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        *(
            "torch_attn::_varlen_attn",
            "eyeline::packed_attention",
            "eyeline::gated_delta_rule",
            "eyeline::fla_delta_rule",
            "eyeline::grouped_swiglu",
        ),
    )
)


def keeping_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a block's forward pass and of its recomputation."""
    return create_selective_checkpoint_contexts(_policy, allow_cache_entry_mutation=True)


def _policy(_context: Any, function: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if function._schema.name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
