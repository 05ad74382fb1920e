"""What is kept for the backward pass where activations are recomputed: with selective recomputation what matrix products and attention
gave, and the inputs of blocks, which may be on the host meanwhile."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# What is kept, by name. In-place ones as well: what they change was kept, and must not be changed a second time.
KEPT = frozenset(
    (
        *("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm", "aten::mul_"),
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


class OnHost(NamedTuple):
    """A tensor that was copied to the host, pinned where it came from a GPU; none for one without memory, which only has a shape."""

    copy: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def on_host(x: Tensor) -> saved_tensors_hooks:
    """While this is entered, autograd keeps a copy of `x` on the host in place of it. Whatever else it keeps stays where it is."""
    memory = x.untyped_storage()._cdata

    def pack(kept: Tensor) -> Tensor | OnHost:
        if kept.untyped_storage()._cdata != memory:
            return kept
        copy = None if kept.is_meta else torch.empty(kept.shape, dtype=kept.dtype, pin_memory=kept.is_cuda).copy_(kept)
        return OnHost(copy, kept.shape, kept.dtype, kept.device)

    def unpack(kept: Tensor | OnHost) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.copy is None:
            return torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        return kept.copy.to(kept.device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)
