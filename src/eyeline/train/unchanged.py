"""The share of weights that an update leaves as they are in bfloat16, the precision that products read them in.

A bfloat16 number has eight significant bits: an update of less than about 1/500 of a weight changes nothing that the next step computes
with. Weights that train are kept in float32, where such updates add up; where they are kept in bfloat16 they are lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eyeline.core.shards import is_sharded

SAMPLES = 1 << 14  # of each tensor at most, evenly spaced


class Same(NamedTuple):
    """Weights that an update left as they were, and weights in all, estimated from samples."""

    unchanged: float
    weights: float

    @property
    def share(self) -> float | None:
        return self.unchanged / self.weights if self.weights else None


NOT_SAMPLED = Same(0.0, 0.0)


@dataclass(frozen=True, eq=False)
class SampledWeights:
    """Some weights of every tensor that trains, in bfloat16."""

    of: Sequence[Tensor]  # of each tensor
    sizes: Sequence[int]  # of the whole tensors


def sampled_weights(model: nn.Module) -> SampledWeights:
    """The weights of this rank: of a sharded tensor its own shard."""
    parameters = [_local(p) for p in model.parameters() if p.requires_grad]
    return SampledWeights([_sample(p) for p in parameters], [p.numel() for p in parameters])


def unchanged_since(before: SampledWeights, model: nn.Module) -> Same:
    """The weights that are the same as before: each sample stands for its share of its tensor."""
    after = sampled_weights(model)
    same = [(a == b).float().mean() if len(a) else torch.zeros((), device=a.device) for a, b in zip(before.of, after.of, strict=True)]
    shares = torch.stack(same).tolist() if same else []
    return Same(sum(share * size for share, size in zip(shares, before.sizes, strict=True)), float(sum(before.sizes)))


def _sample(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return flat[:: max(1, -(-len(flat) // SAMPLES))].to(torch.bfloat16, copy=True)


@torch.no_grad()
def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if is_sharded(parameter) else parameter.detach()  # type: ignore[attr-defined]  # a DTensor has it
