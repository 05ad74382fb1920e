"""Which linear layers of a model compute in FP8: those of the language model's blocks. What is exact or small stays as it is."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from eyeline.kernels.float8 import MULTIPLE
from eyeline.models.layers import Linear
from eyeline.models.moe import ExpertWeights

RATES = ("delta_a_proj", "delta_b_proj")  # of the gated delta rule: how fast a state fades, and how much is written


class Float8Layers(NamedTuple):
    """The layers that can compute in FP8, and those of the same blocks that cannot."""

    layers: tuple[Linear, ...]
    names: tuple[str, ...]  # as recipes call them
    others: tuple[str, ...]  # with the reason


def float8_layers(model: nn.Module, blocks: Sequence[str]) -> Float8Layers:
    """Find the layers of these blocks that can."""
    layers, names, others = list[Linear](), dict[str, None](), dict[str, None]()
    for module in (module for block in blocks for module in model.get_submodule(block).modules()):
        if isinstance(module, ExpertWeights):
            others["experts (a grouped product)"] = None
        if not isinstance(module, Linear) or module.target is None:
            continue
        sizes = module.in_features, module.out_features
        if module.target in RATES:
            others[f"{module.target} (rates of the recurrent state)"] = None
        elif any(size % MULTIPLE for size in sizes):
            others[f"{module.target} ({sizes[0]} × {sizes[1]}, not multiples of {MULTIPLE})"] = None
        else:
            layers.append(module)
            names[module.target] = None
    return Float8Layers(tuple(layers), tuple(names), tuple(others))
