"""Case `head`: from hidden states to the loss and its gradients, labelled rows only and in chunks, against full logits."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, interleaved, peak_bytes, timed
from eyeline.core.batch import IGNORE
from eyeline.core.errors import Refused
from eyeline.core.randomness import torch_rng_for
from eyeline.kernels.cross_entropy import summed_cross_entropy

ROWS, VOCABULARY, WIDTH = 2048, 32_768, 256
LIMITS = {0.25: {"time": 0.35, "memory": 0.35}, 1.0: {"time": 2.0, "memory": 0.40}}  # by the share of rows that have a label
TOLERANCE = 1e-5

Side = Callable[[], tuple[Tensor, ...]]  # the summed loss, and its gradients by the hidden states and the weight


def run(pairs: int = LEAST_PAIRS, rows: int = ROWS, vocabulary: int = VOCABULARY) -> Result:
    """Check that both sides give the same loss and gradients, then time them in pairs and compare their peaks of memory."""
    conditions = Conditions()
    comparisons: list[Comparison] = []
    facts: list[Fact] = []
    worst = 0.0
    for share, limits in LIMITS.items():
        ours, peer = sides(share, rows, vocabulary)
        worst = max(worst, difference(ours(), peer()))
        if worst > TOLERANCE:
            raise Refused(f"loss or gradients of the two sides differ by {worst:.2g} of the largest (at most {TOLERANCE}).")
        times = interleaved({"ours": timed(ours), "peer": timed(peer)}, pairs, f"head, {share:.0%} labelled")
        comparisons.append(
            Comparison(
                name=f"{share:.0%} of the rows labelled", unit="rows", amount=rows, ours=times["ours"], peer=times["peer"],
                limit=limits["time"], judged="time",
            )
        )  # fmt: skip
        peaks = {name: peak_bytes(side) for name, side in (("ours", ours), ("peer", peer))}
        ratio = peaks["ours"] / peaks["peer"]
        megabytes = f"{peaks['ours'] / 2**20:.0f} ÷ {peaks['peer'] / 2**20:.0f} MiB"
        facts.append(
            Fact(
                name=f"peak memory above the inputs, {share:.0%} labelled: {megabytes}", value=ratio, limit=f"≤ {limits['memory']}",
                met=ratio <= limits["memory"],
            )
        )  # fmt: skip
    return Result(
        case="head",
        command="python -m bench head",
        work=f"{rows:,} rows of width {WIDTH}, a vocabulary of {vocabulary:,}, fp32: the summed cross-entropy of the labelled rows, "
        "forward and backward. Peer: all logits at once, `F.cross_entropy` over all rows. Peak memory: resident, above that before.",
        agreement=f"loss and gradients agree within {worst:.1e} of the largest value",
        comparisons=tuple(comparisons),
        facts=tuple(facts),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )


def sides(share: float, rows: int, vocabulary: int) -> tuple[Side, Side]:
    """Ours and the peer's, on the same hidden states, weight and labels, of which `share` of the rows have one."""
    rng = torch_rng_for(0, "bench head")
    x_TD = torch.randn(rows, WIDTH, generator=rng).requires_grad_()
    weight_VD = (torch.randn(vocabulary, WIDTH, generator=rng) * WIDTH**-0.5).requires_grad_()
    labels_T = torch.randint(vocabulary, (rows,), generator=rng)
    labels_T[torch.randperm(rows, generator=rng)[round(share * rows) :]] = IGNORE
    rows_L = (labels_T != IGNORE).nonzero()[:, 0]
    labels_L = labels_T[rows_L]

    def ours() -> tuple[Tensor, ...]:
        loss = summed_cross_entropy(x_TD[rows_L], weight_VD, labels_L)
        return loss.detach(), *torch.autograd.grad(loss, (x_TD, weight_VD))

    def peer() -> tuple[Tensor, ...]:
        loss = F.cross_entropy(x_TD @ weight_VD.T, labels_T, ignore_index=IGNORE, reduction="sum")
        return loss.detach(), *torch.autograd.grad(loss, (x_TD, weight_VD))

    return ours, peer


def difference(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """The largest difference of any value, as a share of the largest value of its tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, theirs, strict=True))
