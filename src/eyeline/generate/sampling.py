"""From logits to the next token.

Dims: B rows that still continue  V vocabulary
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from eyeline.core.randomness import rng_for
from eyeline.core.settings import NotNegative, Positive, Settings


class Sampling(Settings):
    """The sampling settings. The defaults are greedy."""

    max_new_tokens: Positive = 256  # of an answer, which is cut there
    temperature: Annotated[float, Field(ge=0)] = 0.0  # 0: always the most probable token
    top_k: NotNegative = 0  # only the k most probable tokens; 0: all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # only the most probable tokens that together reach p
    seed: NotNegative = 0


def filter_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The logits divided by the temperature and -inf where a token may not be sampled, in transformers' order:
    temperature, top-k, top-p. Of equal logits at the border top-k keeps all."""
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k:
        least_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        rising_BV, order_BV = logits_BV.sort()
        dropped_BV = rising_BV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        dropped_BV[:, -1] = False  # the most probable one always stays
        logits_BV = logits_BV.masked_fill(torch.empty_like(dropped_BV).scatter_(1, order_BV, dropped_BV), -torch.inf)
    return logits_BV


def next_tokens(logits_BV: Tensor, sampling: Sampling, rows: Sequence[int], step: int, seeds: Sequence[int] | None = None) -> list[int]:
    """One token a row. `rows` are the prompts' numbers and `step` the place in the answer: with the seed they address the
    randomness, so that an answer depends neither on its neighbours nor on when they finish. `seeds`, one a prompt, take the place of the
    seed and the prompt's number.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    # inverse of the cumulative distribution at one uniform number a row: the same on every device, up to rounding
    upto_BV = filter_logits(logits_BV, sampling).double().softmax(-1).cumsum(-1)
    addresses = [(sampling.seed, row) if seeds is None else (seeds[row], 0) for row in rows]
    uniform = [rng_for(seed, "generate", row, step).random() for seed, row in addresses]
    at_B1 = torch.tensor(uniform, dtype=torch.float64, device=logits_BV.device)[:, None] * upto_BV[:, -1:]
    drawn_B = torch.searchsorted(upto_BV, at_B1, right=True)[:, 0]
    last_B = (upto_BV < upto_BV[:, -1:]).sum(-1)  # where rounding put the product at the very end: the last token with a share
    return drawn_B.minimum(last_B).tolist()
