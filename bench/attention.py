"""Case `attention`: causal attention of documents end to end, against padding them and against one block mask.

Dims: T tokens  S documents  H query heads  G key/value heads  K head dim  L tokens of the longest document
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.head import difference
from bench.measure import LEAST_PAIRS, Comparison, Conditions, Result, interleaved, timed
from eyeline.core.errors import Refused
from eyeline.core.randomness import torch_rng_for
from eyeline.kernels.attention import packed_attention

LENGTHS = (640, 448, 320, 224, 160, 128, 80, 48)  # 2,048 tokens, the longest 2.5 times the mean, as data sets have it
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
REPEATS = 4  # of forward and backward in one timed pass
LIMITS = {"padded": 0.35, "block mask": 0.30}
TOLERANCE = 1e-5

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q_THK, k_TGK, v_TGK -> out_THK


def run(pairs: int = LEAST_PAIRS, lengths: Sequence[int] = LENGTHS) -> Result:
    """Check that all sides give the same output and gradients, then time them in turn."""
    conditions = Conditions()
    sides = {"ours": packed(lengths), "padded": padded(lengths), "block mask": masked(lengths)}
    inputs = made(sum(lengths))
    results = {name: once(side, *inputs) for name, side in sides.items()}
    worst = max(difference(results["ours"], results[name]) for name in LIMITS)
    if worst > TOLERANCE:
        raise Refused(f"outputs or gradients of the sides differ by {worst:.2g} of the largest (at most {TOLERANCE}).")

    def repeated(side: Attention) -> Callable[[], None]:
        def several() -> None:
            for _ in range(REPEATS):
                once(side, *inputs)

        return several

    times = interleaved({name: timed(repeated(side)) for name, side in sides.items()}, pairs, "attention")
    return Result(
        case="attention",
        command="python -m bench attention",
        work=f"{REPEATS} times causal attention, forward and backward, of {len(lengths)} documents of {', '.join(map(str, lengths))} "
        f"tokens; {HEADS} query heads, {KV_HEADS} key heads of {HEAD_DIM}, fp32. Peers: the documents padded to the longest, and all of "
        "them in one row with a mask of blocks, each by PyTorch's own scaled_dot_product_attention; laying out is inside the time.",
        agreement=f"outputs and gradients agree within {worst:.1e} of the largest value",
        comparisons=tuple(
            Comparison(
                name=f"against {name}", unit="tokens", amount=REPEATS * sum(lengths), ours=times["ours"], peer=times[name], limit=limit,
                judged="time",
            )
            for name, limit in LIMITS.items()
        ),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )  # fmt: skip


def made(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and the direction in which outputs are summed, so that gradients differ everywhere."""
    rng = torch_rng_for(0, "bench attention")
    q_THK, k_TGK, v_TGK = (torch.randn(tokens, n, HEAD_DIM, generator=rng).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS))
    return q_THK, k_TGK, v_TGK, torch.randn(q_THK.shape, generator=rng)


def once(side: Attention, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, direction_THK: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the output, and the gradients of queries, keys and values."""
    out_THK = side(q_THK, k_TGK, v_TGK)
    return out_THK.detach(), *torch.autograd.grad(out_THK, (q_THK, k_TGK, v_TGK), direction_THK)


def packed(lengths: Sequence[int]) -> Attention:
    cu_S1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return lambda q, k, v: packed_attention(q, k, v, cu_S1, max(lengths), causal=True)


def padded(lengths: Sequence[int]) -> Attention:
    """Documents as rows of the longest's length. Causal and padded on the right: no real token sees padding, so no mask is
    needed, and SDPA takes its fastest way."""
    rows_T = torch.cat([torch.arange(n) + s * max(lengths) for s, n in enumerate(lengths)])

    def attend(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        q, k, v = (
            x.new_zeros(len(lengths) * max(lengths), *x.shape[1:]).index_copy(0, rows_T, x).unflatten(0, (len(lengths), -1)).transpose(1, 2)
            for x in (q_THK, k_TGK, v_TGK)
        )
        out_SHLK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out_SHLK.transpose(1, 2).flatten(0, 1)[rows_T]

    return attend


def masked(lengths: Sequence[int]) -> Attention:
    """All documents in one row, with a mask that lets each token see its own document up to itself."""
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask_TT = (document_T[:, None] == document_T) & torch.ones(len(document_T), len(document_T), dtype=torch.bool).tril()

    def attend(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT, enable_gqa=True)[0].transpose(0, 1)

    return attend
