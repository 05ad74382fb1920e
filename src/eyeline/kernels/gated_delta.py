"""The gated delta rule within documents that are stored end to end (Yang et al. 2024, "Gated Delta Networks"), and its steps over a cache.

Every value head has a recurrent state S_KJ that maps keys to values and is zero where a document starts. A token decays the state,
corrects the value that it gives for the token's key by the share beta, and reads it with its query:

    S = exp(decay)·S        S = S + beta·k·(v - kᵀS)        out = qᵀS / √K

with q and k made of unit length, and decay at most 0. Each key head serves H/G neighbouring value heads. Float32 inside.

Dims: T tokens  S documents  G heads of queries and keys  H value heads (a multiple of G)  K key dim  J value dim
      C tokens of a chunk  R chunks  B rows of a cache; a Y after R stands for the H/G value heads of one key head
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyeline.core.dims import dims
from eyeline.kernels.fla import OpaqueFla, by_fla
from eyeline.kernels.opaque import opaque

EPS = 1e-6  # under the root of a key's length, as in the reference and in fla
CHUNKS = (16, 32, 64)  # a document is cut into chunks of the smallest that holds it, or of the largest


def gated_delta_rule_plain(
    q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference: one token after another. Returns out_THJ, in v's dtype, and the state after each document."""
    sizes = _check(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH)
    q_THK, k_THK = (_unit(x_TGK)[0].repeat_interleave(sizes["H"] // sizes["G"], 1) for x_TGK in (q_TGK, k_TGK))
    outs, states = [v_THJ[:0].float()], [v_THJ.new_zeros(0, sizes["H"], sizes["K"], sizes["J"], dtype=torch.float32)]
    for start, end in pairwise(cu_S1.tolist()):
        state_HKJ = states[0].new_zeros(states[0].shape[1:])
        for t in range(start, end):
            state_HKJ = state_HKJ * decay_TH[t].float().exp()[:, None, None]
            answer_HJ = (k_THK[t, :, :, None] * state_HKJ).sum(1)
            error_HJ = (v_THJ[t].float() - answer_HJ) * beta_TH[t].float()[:, None]
            state_HKJ = state_HKJ + k_THK[t, :, :, None] * error_HJ[:, None]
            outs.append((q_THK[t, :, :, None] * state_HKJ).sum(1)[None] * sizes["K"] ** -0.5)
        states.append(state_HKJ[None])
    return torch.cat(outs).to(v_THJ.dtype), torch.cat(states)


def gated_delta_rule(
    q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor, fla: bool = False
) -> Tensor:
    """`gated_delta_rule_plain`, fast, without the states. Every token must belong to a document: cu[0] = 0, cu[S] = T.

    In chunks, as one opaque operator, for any layout the same graph. With `fla`, by fla's kernel, for a GPU where `self_test.fla_fault`
    found nothing; in a compiled graph that is opaque, too.
    """
    _check(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH)
    if fla and torch.compiler.is_compiling():
        return OpaqueFla.apply(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1)
    if fla:
        return by_fla(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1, states=False)[0]
    return _InChunks.apply(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1)


class StateCache:
    """The state of a Gated DeltaNet layer for B sequences: a recurrent state per value head, and the last inputs of its convolutions.

    It has the interface of `LayerCache`, but its size does not grow with `lengths`.
    """

    def __init__(
        self,
        rows: int,
        state: tuple[int, int, int],  # H, K, J
        channels: Sequence[int],  # of each convolution
        conv_kernel: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.state_BHKJ = torch.zeros(rows, *state, dtype=torch.float32, device=device)
        self.windows = [torch.zeros(rows, conv_kernel - 1, x, dtype=dtype, device=device) for x in channels]  # [B, W - 1, C]
        self.lengths = [0] * rows

    def keep(self, rows: list[int]) -> None:
        """Continue with these rows only, in this order: the others have finished."""
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.state_BHKJ.device)
        self.state_BHKJ = self.state_BHKJ[index_B]
        self.windows = [window[index_B] for window in self.windows]
        self.lengths = [self.lengths[row] for row in rows]


@torch.no_grad()
def cached_gated_delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THJ: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    cu_S1: Tensor,
    cache: StateCache,
    fla: bool = False,
) -> Tensor:
    """The rule for sequences that are being generated; document s belongs to row s of the cache, whose state continues from there.

    Prefill: an empty cache and any documents, by fla's kernel with `fla`. Afterwards one token per row. Advances `cache.lengths`.
    """
    sizes = _check(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH)
    rows = len(cu_S1) - 1
    assert rows == len(cache.lengths), f"{rows} documents for a cache of {len(cache.lengths)} rows"
    if len(q_TGK) > rows:
        assert not any(cache.lengths), "several tokens per row fit an empty cache only"
        compute = by_fla if fla else _forward
        out_THJ, cache.state_BHKJ = compute(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1)
        cache.lengths = cu_S1.diff().tolist()
        return out_THJ
    q_BHK, k_BHK = (_unit(x_TGK)[0].repeat_interleave(sizes["H"] // sizes["G"], 1) for x_TGK in (q_TGK, k_TGK))
    state_BHKJ = cache.state_BHKJ * decay_TH.float().exp()[:, :, None, None]
    error_BHJ = (v_THJ.float() - torch.einsum("bhk,bhkj->bhj", k_BHK, state_BHKJ)) * beta_TH.float()[:, :, None]
    cache.state_BHKJ = state_BHKJ + k_BHK[..., None] * error_BHJ[:, :, None]
    cache.lengths = [length + 1 for length in cache.lengths]
    return (torch.einsum("bhk,bhkj->bhj", q_BHK, cache.state_BHKJ) * sizes["K"] ** -0.5).to(v_THJ.dtype)


def _check(q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> dict[str, int]:
    sizes = dims("TGK", q_TGK, "TGK", k_TGK, "THJ", v_THJ, "TH", decay_TH, "TH", beta_TH)
    assert sizes["H"] % sizes["G"] == 0, f"{sizes['H']} value heads for {sizes['G']} key heads"
    return sizes


# ---- chunks
#
# Unrolled over a chunk that starts from the state S, the rule is a triangular system (the WY form): with g the sum of decays up to and
# with a token, D_ij = exp(g_i - g_j) for j ≤ i and else 0, and L = 1 + (the part below the diagonal of beta_i·k_i·k_j·D_ij),
#
#     U = L⁻¹(beta·v)    W = L⁻¹(beta·exp(g)·k)    what the tokens write: E = U - W·S
#     out = (exp(g)·q)·S + (q·kᵀ ∘ D)·E            S of the next chunk = exp(g_C)·S + (exp(g_C - g)·k)ᵀ·E
#
# Only S passes from chunk to chunk, so all else is computed for all chunks of all documents at once.


class _Plan(NamedTuple):
    """Chunks of documents that are cut alike: first the first chunk of each document, longest document first; then the second
    chunk of each that has one; and so on. The documents that continue are always the first ones."""

    documents: list[int]
    going_on: list[int]  # how many documents have a first chunk, a second, ...
    rows_RC: Tensor  # the token in each place; after a document's end its last token again, which then
    real_RC: Tensor  # is not real: it neither forgets nor writes


def _plans(cu_S1: Tensor) -> tuple[list[_Plan], Tensor]:
    """The chunks of every document, and where among all their places each token is."""
    bounds = cu_S1.tolist()
    spans = [(end - start, start, s) for s, (start, end) in enumerate(pairwise(bounds)) if end > start]
    plans, place_T, places = [], torch.empty(bounds[-1], dtype=torch.int64), 0
    for i, chunk in enumerate(CHUNKS):
        least, most = ((CHUNKS[i - 1] if i else 0), chunk) if chunk != CHUNKS[-1] else (CHUNKS[i - 1], bounds[-1])
        held = sorted((span for span in spans if least < span[0] <= most), reverse=True)
        if not held:
            continue
        length, start, documents = torch.tensor(held).T
        chunks = -(-length // chunk)
        step = torch.arange(int(chunks[0]))
        step_R, document_R = (step[:, None] < chunks[None]).nonzero().T
        within_RC = step_R[:, None] * chunk + torch.arange(chunk)
        real_RC = within_RC < length[document_R, None]
        rows_RC = start[document_R, None] + torch.minimum(within_RC, length[document_R, None] - 1)
        place_T[rows_RC[real_RC]] = places + real_RC.flatten().nonzero()[:, 0]
        places += real_RC.numel()
        going_on = step_R.bincount().tolist()
        plans.append(_Plan(documents.tolist(), going_on, rows_RC.to(cu_S1.device), real_RC.to(cu_S1.device)))
    return plans, place_T.to(cu_S1.device)


def _unit(x_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """x of unit length, in float32, and one over its length."""
    x_TGK = x_TGK.float()
    inverse_TG1 = torch.rsqrt(x_TGK.square().sum(-1, keepdim=True) + EPS)
    return x_TGK * inverse_TG1, inverse_TG1


def _running_sum(x_RYC: Tensor) -> Tensor:
    """Along a chunk. CUDA's cumsum adds in no fixed order, and raises where deterministic algorithms are asked for."""
    if not torch.are_deterministic_algorithms_enabled():
        return x_RYC.cumsum(-1)
    C = x_RYC.shape[-1]
    return x_RYC @ torch.ones(C, C, device=x_RYC.device, dtype=x_RYC.dtype).triu()


class _Chunks(NamedTuple):
    """Tensors that all chunks of a plan compute before the state is known. [R, G, H/G, ...] where heads of values are many."""

    q_RGCK: Tensor  # scaled
    k_RGCK: Tensor
    v_RYCJ: Tensor
    beta_RYC: Tensor
    grown_RYC: Tensor  # g
    left_RYC: Tensor  # g_C - g
    between_RYCC: Tensor  # D
    kk_RGCC: Tensor
    system_RYCC: Tensor  # L but for its diagonal, which solvers take for ones; nothing is above it
    written_RYCJ: Tensor  # U
    read_RYCK: Tensor  # W
    seen_RYCC: Tensor  # q·kᵀ ∘ D
    q_grown_RYCK: Tensor
    k_left_RYCK: Tensor


def _within(plan: _Plan, q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> _Chunks:
    """q and k are of unit length here."""
    G, K = k_TGK.shape[1:]

    def cut(x: Tensor) -> Tensor:  # [T, heads, ...] -> [R, heads, C, ...]
        return x[plan.rows_RC].transpose(1, 2).float().contiguous()

    q_RGCK, k_RGCK = cut(q_TGK) * K**-0.5, cut(k_TGK)
    v_RYCJ, decay_RYC, beta_RYC = (cut(x).unflatten(1, (G, -1)) for x in (v_THJ, decay_TH, beta_TH))
    real_R11C = plan.real_RC[:, None, None]
    grown_RYC, beta_RYC = _running_sum(decay_RYC * real_R11C), beta_RYC * real_R11C
    left_RYC = grown_RYC[..., -1:] - grown_RYC
    above_CC = torch.ones(q_RGCK.shape[2], q_RGCK.shape[2], dtype=torch.bool, device=q_RGCK.device).triu(1)
    # masked before exp: above the diagonal it would overflow
    between_RYCC = (grown_RYC[..., :, None] - grown_RYC[..., None, :]).masked_fill_(above_CC, -torch.inf).exp_()
    k_RG1CK, q_RG1CK = k_RGCK[:, :, None], q_RGCK[:, :, None]
    kk_RGCC = k_RGCK @ k_RGCK.mT
    system_RYCC = (kk_RGCC[:, :, None] * between_RYCC * beta_RYC[..., None]).tril_(-1)
    wanted = torch.cat((beta_RYC[..., None] * v_RYCJ, (beta_RYC * grown_RYC.exp())[..., None] * k_RG1CK), -1)
    solved = torch.linalg.solve_triangular(system_RYCC, wanted, upper=False, unitriangular=True)
    written_RYCJ, read_RYCK = solved.split([v_RYCJ.shape[-1], K], -1)
    return _Chunks(
        q_RGCK,
        k_RGCK,
        v_RYCJ,
        beta_RYC,
        grown_RYC,
        left_RYC,
        between_RYCC,
        kk_RGCC,
        system_RYCC,
        written_RYCJ.contiguous(),
        read_RYCK.contiguous(),
        (q_RGCK @ k_RGCK.mT)[:, :, None] * between_RYCC,
        grown_RYC.exp()[..., None] * q_RG1CK,
        left_RYC.exp()[..., None] * k_RG1CK,
    )


def _spans(plan: _Plan) -> list[slice]:
    ends = torch.tensor([0, *plan.going_on]).cumsum(0).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


def _token_rows(parts: list[Tensor], place_T: Tensor) -> Tensor:
    """[R, heads, C, ...] of every plan -> [T, heads, ...]."""
    flat = [x.transpose(1, 2).flatten(0, 1) for x in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, place_T)


def _forward(q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor) -> tuple[Tensor, Tensor]:
    """out_THJ and the state after each document."""
    (G, K), (H, J) = k_TGK.shape[1:], v_THJ.shape[1:]
    last_SHKJ = q_TGK.new_zeros(len(cu_S1) - 1, H, K, J, dtype=torch.float32)
    plans, place_T = _plans(cu_S1)
    if not plans:
        return torch.empty_like(v_THJ, memory_format=torch.contiguous_format), last_SHKJ
    q_TGK, k_TGK = _unit(q_TGK)[0], _unit(k_TGK)[0]
    outs = []
    for plan in plans:
        x = _within(plan, q_TGK, k_TGK, v_THJ, decay_TH, beta_TH)
        kept_RY11 = x.grown_RYC[..., -1, None, None].exp()
        out_RYCJ = torch.empty_like(x.written_RYCJ)
        state = x.k_RGCK.new_zeros(len(plan.documents), G, H // G, K, J)
        for span in _spans(plan):
            now = state[: span.stop - span.start]
            new = x.written_RYCJ[span] - x.read_RYCK[span] @ now
            out_RYCJ[span] = x.q_grown_RYCK[span] @ now + x.seen_RYCC[span] @ new
            now.mul_(kept_RY11[span]).add_(x.k_left_RYCK[span].mT @ new)
        last_SHKJ[plan.documents] = state.flatten(1, 2)
        outs.append(out_RYCJ.flatten(1, 2))
    return _token_rows(outs, place_T).to(v_THJ.dtype), last_SHKJ


def _like_values(_q_TGK: Tensor, _k_TGK: Tensor, v_THJ: Tensor, *_: object) -> Tensor:
    return torch.empty_like(v_THJ, memory_format=torch.contiguous_format)


@opaque(_like_values)
def _gated_delta_rule(q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor) -> Tensor:
    return _forward(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1)[0]


def _like_inputs(_dout_THJ: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:5])


@opaque(_like_inputs)
def _gated_delta_rule_backward(
    dout_THJ: Tensor, q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, decay and beta. What the chunks computed is computed again: kept, it would be many times their input."""
    inputs = (q_TGK, k_TGK, v_THJ, decay_TH, beta_TH)
    plans, place_T = _plans(cu_S1)
    if not plans:
        return _like_inputs(dout_THJ, *inputs)  # pyright: ignore[reportReturnType]: five
    (q_unit_TGK, q_inverse_TG1), (k_unit_TGK, k_inverse_TG1) = _unit(q_TGK), _unit(k_TGK)
    made = [_backward_of(plan, dout_THJ, q_unit_TGK, k_unit_TGK, v_THJ, decay_TH, beta_TH) for plan in plans]
    dq, dk, dv, ddecay, dbeta = (_token_rows(list(parts), place_T) for parts in zip(*made, strict=True))
    dq = q_inverse_TG1 * (dq - q_unit_TGK * (q_unit_TGK * dq).sum(-1, keepdim=True))  # through the division by the length
    dk = k_inverse_TG1 * (dk - k_unit_TGK * (k_unit_TGK * dk).sum(-1, keepdim=True))
    return dq.to(q_TGK.dtype), dk.to(k_TGK.dtype), dv.to(v_THJ.dtype), ddecay.to(decay_TH.dtype), dbeta.to(beta_TH.dtype)


def _backward_of(
    plan: _Plan, dout_THJ: Tensor, q_TGK: Tensor, k_TGK: Tensor, v_THJ: Tensor, decay_TH: Tensor, beta_TH: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of one plan's chunks: [R, heads, C, ...] of q and k (of unit length), v, decay and beta."""
    (G, K), J = k_TGK.shape[1:], v_THJ.shape[-1]
    x = _within(plan, q_TGK, k_TGK, v_THJ, decay_TH, beta_TH)
    kept_RY11 = x.grown_RYC[..., -1, None, None].exp()
    dout_RYCJ = dout_THJ[plan.rows_RC].transpose(1, 2).float().unflatten(1, (G, -1)) * plan.real_RC[:, None, None, :, None]

    # the state that each chunk started from, and what it wrote
    state_RYKJ = x.k_RGCK.new_zeros(*x.v_RYCJ.shape[:3], K, J)
    new_RYCJ = torch.empty_like(x.written_RYCJ)
    spans = _spans(plan)
    for span, following in zip(spans, [*spans[1:], slice(0, 0)], strict=True):
        torch.sub(x.written_RYCJ[span], x.read_RYCK[span] @ state_RYKJ[span], out=new_RYCJ[span])
        on = slice(span.start, span.start + following.stop - following.start)
        state_RYKJ[following] = state_RYKJ[on] * kept_RY11[on] + x.k_left_RYCK[on].mT @ new_RYCJ[on]

    # backwards through the chunks: dstate is the gradient of the state after a chunk
    dnew_RYCJ = x.seen_RYCC.mT @ dout_RYCJ
    dmet_RYKJ = x.q_grown_RYCK.mT @ dout_RYCJ
    dstate_RYKJ = torch.zeros_like(state_RYKJ)
    for span, following in zip(reversed(spans), [slice(0, 0), *reversed(spans[1:])], strict=True):
        on = slice(span.start, span.start + following.stop - following.start)
        dstate_RYKJ[on] = dmet_RYKJ[following]
        dnew_RYCJ[span] += x.k_left_RYCK[span] @ dstate_RYKJ[span]
        dmet_RYKJ[span] += kept_RY11[span] * dstate_RYKJ[span] - x.read_RYCK[span].mT @ dnew_RYCJ[span]

    # the rest, for all chunks at once
    dseen_RYCC = dout_RYCJ @ new_RYCJ.mT
    dq_grown_RYCK = dout_RYCJ @ state_RYKJ.mT
    dk_left_RYCK = new_RYCJ @ dstate_RYKJ.mT
    dsolved = torch.cat((dnew_RYCJ, -(dnew_RYCJ @ state_RYKJ.mT)), -1)
    dwanted = torch.linalg.solve_triangular(x.system_RYCC.mT, dsolved, upper=True, unitriangular=True)
    dsystem_RYCC = -(dwanted @ torch.cat((x.written_RYCJ, x.read_RYCK), -1).mT).tril_(-1)
    dwritten_RYCJ, dread_RYCK = dwanted.split([J, K], -1)

    k_RG1CK, grown, left = x.k_RGCK[:, :, None], x.grown_RYC.exp(), x.left_RYC.exp()
    dkk_RGCC = (dsystem_RYCC * x.between_RYCC * x.beta_RYC[..., None]).sum(2)
    dqk_RGCC = (dseen_RYCC * x.between_RYCC).sum(2)
    dq_RGCK = (dqk_RGCC @ x.k_RGCK + (grown[..., None] * dq_grown_RYCK).sum(2)) * K**-0.5
    dk_RGCK = dqk_RGCC.mT @ x.q_RGCK + (dkk_RGCC + dkk_RGCC.mT) @ x.k_RGCK
    dk_RGCK += ((x.beta_RYC * grown)[..., None] * dread_RYCK + left[..., None] * dk_left_RYCK).sum(2)
    dread_k_RYC = (dread_RYCK * k_RG1CK).sum(-1) * grown
    dbeta_RYC = (dwritten_RYCJ * x.v_RYCJ).sum(-1) + dread_k_RYC
    dbeta_RYC += (dsystem_RYCC * x.kk_RGCC[:, :, None] * x.between_RYCC).sum(-1)
    dbetween_RYCC = dsystem_RYCC * x.system_RYCC + dseen_RYCC * x.seen_RYCC  # of g_i - g_j
    dleft_RYC = (dk_left_RYCK * x.k_left_RYCK).sum(-1)
    dgrown_RYC = dbetween_RYCC.sum(-1) - dbetween_RYCC.sum(-2) + (dq_grown_RYCK * x.q_grown_RYCK).sum(-1) + x.beta_RYC * dread_k_RYC
    dgrown_RYC -= dleft_RYC
    dgrown_RYC[..., -1] += dleft_RYC.sum(-1) + (kept_RY11 * state_RYKJ * dstate_RYKJ).sum((-1, -2))
    ddecay_RYC = _running_sum(dgrown_RYC.flip(-1)).flip(-1)
    dv_RYCJ = x.beta_RYC[..., None] * dwritten_RYCJ
    return dq_RGCK, dk_RGCK, dv_RYCJ.flatten(1, 2), ddecay_RYC.flatten(1, 2), dbeta_RYC.flatten(1, 2)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _gated_delta_rule(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_gated_delta_rule_backward(gradients[0], *ctx.saved_tensors), None
