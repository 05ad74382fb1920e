"""fla (flash-linear-attention): its Triton kernel of the gated delta rule, for GPUs in half precision. Optional: `kernels/gated_delta.py`
computes the same in chunks of plain PyTorch.

Whether it computes the same *here* depends on its version, on Triton's and on the GPU: some together give wrong gradients of decay and
beta and say nothing, some raise in the first backward pass. So nothing of it is used before `kernels/self_test.py` has compared the two.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

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


def by_fla(q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule_plain` by fla: out_THJ and the state after each document.

    Older versions of fla want as many key heads as value heads; all scale by 1/√K and take bounds of one row of documents. fla derives the
    chunks of documents from the bounds, which waits for the GPU, and remembers them by the tensor: so every layer must give the same one.
    """
    q_THK, k_THK = (x_TGK.repeat_interleave(v_THJ.shape[1] // x_TGK.shape[1], 1) for x_TGK in (q_TGK, k_TGK))
    out_1THJ, state_SHKJ = kernel()(
        q=q_THK[None],
        k=k_THK[None],
        v=v_THJ[None],
        g=decay_TH.float()[None],
        beta=beta_TH.float()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_S1,
    )
    return out_1THJ[0], state_SHKJ
