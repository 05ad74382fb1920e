"""The convolution of packed documents against torch's own, each document alone; the cache against whole sequences."""

import pytest
import torch
from torch import Tensor

from eyeline.kernels.causal_conv import cached_causal_conv, causal_conv, causal_conv_plain

C, W = 5, 4
LAYOUTS = {
    "one": [9],
    "one token": [1],
    "shorter than the taps": [1, 2, 3, 1, 2],
    "mixed": [4, 1, 7, 3, 5],
    "empty documents": [0, 3, 0, 0, 6, 0],
    "no tokens": [0],
}


def tensors(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, C, generator=rng).requires_grad_(), torch.randn(C, W, generator=rng).requires_grad_()


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_by_hand():
    """Two documents, one channel: taps 1, 10, 100, 1000 from the oldest to the newest input."""
    x_TC, weight_CW = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    want = torch.tensor([[1000.0], [2100.0], [3000.0]])  # silu is the identity out here
    for conv in (causal_conv, causal_conv_plain):
        torch.testing.assert_close(conv(x_TC, weight_CW, bounds([2, 1])), want)


@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
def test_output_and_gradients(lengths):
    x, weight = tensors(sum(lengths))
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    want = torch.cat([causal_conv_plain(part, weight, bounds([len(part)])) for part in x.split(lengths)])
    want_gradients = torch.autograd.grad((want * direction).sum(), (x, weight), allow_unused=True, materialize_grads=True)
    for conv in (causal_conv, causal_conv_plain):
        got = conv(x, weight, bounds(lengths))
        torch.testing.assert_close(got, want)
        gradients = torch.autograd.grad((got * direction).sum(), (x, weight), allow_unused=True, materialize_grads=True)
        for a, b in zip(gradients, want_gradients, strict=True):
            torch.testing.assert_close(a, b)


def test_bfloat16_is_near_float32():
    x, weight = tensors(12)
    got = causal_conv(x.bfloat16(), weight, bounds([5, 7]))
    assert got.dtype == torch.bfloat16
    want = causal_conv_plain(x.bfloat16().float(), weight, bounds([5, 7]))
    torch.testing.assert_close(got.float(), want, atol=1e-6, rtol=2**-8)  # only the result is rounded


def test_operators_are_sound():
    x, weight = (tensor.detach() for tensor in tensors(9))
    torch.library.opcheck(torch.ops.eyeline.causal_conv.default, (x, weight, bounds([4, 1, 4])))
    torch.library.opcheck(torch.ops.eyeline.causal_conv_backward.default, (x, x, weight, bounds([4, 1, 4])))


def test_decoding_equals_the_whole_sequence():
    """Prompts of 5, 1 and 2 tokens, then four steps."""
    prompts, steps = [5, 1, 2], 4
    _, weight = tensors(1)
    whole = [tensors(n + steps, seed=s)[0].detach() for s, n in enumerate(prompts)]
    want = [causal_conv_plain(x, weight, bounds([len(x)])).detach() for x in whole]
    window = torch.zeros(3, W - 1, C)
    got = cached_causal_conv(torch.cat([x[:n] for x, n in zip(whole, prompts, strict=True)]), weight, bounds(prompts), window)
    torch.testing.assert_close(got, torch.cat([w[:n] for w, n in zip(want, prompts, strict=True)]))
    for step in range(steps):
        at = [(row, n + step) for row, n in enumerate(prompts)]
        got = cached_causal_conv(torch.stack([whole[row][t] for row, t in at]), weight, bounds([1, 1, 1]), window)
        torch.testing.assert_close(got, torch.stack([want[row][t] for row, t in at]))
