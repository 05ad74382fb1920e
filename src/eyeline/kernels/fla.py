"""fla (flash-linear-attention): its Triton kernel of the gated delta rule, for GPUs in half precision. Optional: `kernels/gated_delta.py`
computes the same in chunks of plain PyTorch.

Whether it computes the same *here* depends on its version, on Triton's and on the GPU: some together give wrong gradients of decay and
beta and say nothing, some raise in the first backward pass. So nothing of it is used before `kernels/self_test.py` has compared the two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from eyeline.kernels.opaque import opaque

PACKAGES = ("flash-linear-attention", "fla-core", "triton")  # fla-core holds the kernels; older versions were one package
Kernel = Callable[..., tuple[Tensor, Tensor]]


def installed() -> bool:
    return find_spec("fla") is not None


def versions() -> str:
    """`flash-linear-attention 0.5.2, triton 3.6.0`: what a difference may depend on."""
    found = [f"{name} {number}" for name in PACKAGES if (number := _version(name))]
    return ", ".join([*found, f"torch {torch.__version__}"])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kernel() -> Kernel:
    """fla's function. Importing it starts Triton."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]: optional, CUDA only

    return chunk_gated_delta_rule


def by_fla(
    q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor, states: bool = True
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule_plain` by fla: out_THJ and, with `states`, the state after each document.

    Older versions of fla want as many key heads as value heads; all scale by 1/√K and take bounds of one row of documents.
    """
    q_THK, k_THK = (x_TGK.repeat_interleave(v_THJ.shape[1] // x_TGK.shape[1], 1) for x_TGK in (q_TGK, k_TGK))
    out_1THJ, state_SHKJ = kernel()(
        q=q_THK[None],
        k=k_THK[None],
        v=v_THJ[None],
        g=decay_TH.float()[None],
        beta=beta_TH.float()[None],
        output_final_state=states,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=first_of(cu_S1),
    )
    return out_1THJ[0], state_SHKJ


_BOUNDS: list[Tensor] = []  # those that fla has seen last


def first_of(cu_S1: Tensor) -> Tensor:
    """The tensor of these bounds that fla has seen first. It derives the chunks of documents from them, which waits for the GPU, and
    remembers them by the tensor object: so every layer must give the same one, and autograd and compiled graphs may hand over others of
    the same memory. What is remembered here is kept, so that no other bounds can have its memory."""
    if not _BOUNDS or (_BOUNDS[0].data_ptr(), _BOUNDS[0].shape, _BOUNDS[0].dtype) != (cu_S1.data_ptr(), cu_S1.shape, cu_S1.dtype):
        _BOUNDS[:] = [cu_S1]
    return _BOUNDS[0]


# ---- in a compiled graph: opaque, since the compiler does not look into fla, which would cut the graph in two


def _like_values(_q_TGK: Tensor, _k_TGK: Tensor, v_THJ: Tensor, *_: object) -> Tensor:
    return torch.empty_like(v_THJ, memory_format=torch.contiguous_format)


@opaque(_like_values)
def _fla_delta_rule(q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor) -> Tensor:
    with torch.no_grad():
        return by_fla(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1, states=False)[0].contiguous()


@contextmanager
def _differentiable() -> Iterator[None]:
    """Record what runs inside for gradients, also within an operator, where torch does not dispatch to autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def _like_inputs(_dout_THJ: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:5])


@opaque(_like_inputs)
def _fla_delta_rule_backward(
    dout_THJ: Tensor, q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, decay and beta, by fla's own backward pass. Its forward pass runs again for that: what it keeps for the
    backward pass differs from version to version, so that no graph can hand it on."""
    with _differentiable():
        leaves = [x.detach().requires_grad_() for x in (q_TGK, k_TGK, v_THJ, decay_TH, beta_TH)]
        out_THJ, _ = by_fla(*leaves, cu_S1, states=False)  # pyright: ignore[reportCallIssue]: five leaves
        made = torch.autograd.grad(out_THJ, leaves, dout_THJ)
    return tuple(x.contiguous() for x in made)  # pyright: ignore[reportReturnType]: five


class OpaqueFla(torch.autograd.Function):
    """`by_fla` as a compiled graph takes it, without the states."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _fla_delta_rule(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_fla_delta_rule_backward(gradients[0], *ctx.saved_tensors), None
