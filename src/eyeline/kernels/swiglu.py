"""silu(gate) · up: the middle of a gated feed-forward layer (Shazeer 2020).

Dims: T rows  F feed-forward
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.kernels.gpu import pays
from eyeline.kernels.one_kernel import one_kernel


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) · up. GPU: one pass forward and one backward, in float32 within a pass, with nothing kept but gate and up. CPU: PyTorch's
    own operators, two passes each way."""
    return _OneKernel.apply(gate_TF, up_TF) if pays(gate_TF) else F.silu(gate_TF) * up_TF


@one_kernel
def swiglu_forward(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    return (F.silu(gate_TF.float()) * up_TF.float()).to(gate_TF.dtype)


@one_kernel
def swiglu_backward(dout_TF: Tensor, gate_TF: Tensor, up_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    sigmoid_TF = gate_TF.float().sigmoid()
    dgate_TF = dout_TF.float() * up_TF.float() * sigmoid_TF * (1 + gate_TF.float() * (1 - sigmoid_TF))
    return dgate_TF.to(gate_TF.dtype), (dout_TF.float() * gate_TF.float() * sigmoid_TF).to(up_TF.dtype)


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        return swiglu_forward(gate_TF, up_TF)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu_backward(gradients[0], *ctx.saved_tensors)
