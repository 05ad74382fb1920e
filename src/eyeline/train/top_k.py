"""How sure the model is: the probabilities of its most likely tokens, where a token is in the loss.

On steps that are logged the head computes full logits for a few rows of each micro-batch, in addition to its loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eyeline.core.batch import IGNORE

HEAD = "language.head"
ROWS = 256  # of a micro-batch, evenly spaced


class TopK:
    """Sums of the probabilities of the first, second, … most likely token, over the rows that were seen."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._sums_K1: Tensor | None = None  # the number of rows is the last one

    @torch.no_grad()
    def see(self, head: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Take some rows of what the head is about to compute the loss of: x_TD, rows_L, labels_L."""
        x_TD, rows_L, labels_L, *_ = inputs
        every = max(1, -(-len(rows_L) // ROWS))
        wanted_R1 = (labels_L[::every] != IGNORE)[:, None]
        logits_RV = head.forward(x_TD, rows_L[::every], None)
        top_RK = logits_RV.softmax(-1).topk(min(self._k, logits_RV.shape[1]), -1).values
        sums_K1 = torch.cat([(top_RK * wanted_R1).sum(0), wanted_R1.sum().float()[None]])
        self._sums_K1 = sums_K1 if self._sums_K1 is None else self._sums_K1 + sums_K1

    def means(self) -> dict[str, float] | None:
        """The mean of each by its place in the order: "1" is the most likely token. None where no row was seen. Waits for the device."""
        *sums, rows = [0.0] if self._sums_K1 is None else self._sums_K1.tolist()
        return {str(n): total / rows for n, total in enumerate(sums, 1)} if rows else None


@contextmanager
def seeing(model: nn.Module, k: int) -> Iterator[TopK]:
    """See what the model's head computes, as long as this lasts; nothing if `k` is 0."""
    found = TopK(k)
    handle = model.get_submodule(HEAD).register_forward_pre_hook(found.see) if k else None
    try:
        yield found
    finally:
        if handle is not None:
            handle.remove()
