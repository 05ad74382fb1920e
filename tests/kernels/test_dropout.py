"""Dropout's masks against the formula in whole numbers, against independent draws, and against those of a batch that is cut."""

import numpy as np
import pytest
import torch
from torch import Tensor

from eyeline.core.randomness import rng_for, seed_for
from eyeline.kernels.dropout import dropout_mask

ADDRESS = torch.tensor(seed_for(0, "language.blocks.3.mlp.down"))
RATES = (0.05, 0.1, 0.5, 0.9)


def draws(rows: int, pack: int = 0) -> Tensor:
    bits_T2 = rng_for(0, "rows", pack).integers(-(2**31), 2**31, (rows, 2), np.int32)
    return torch.from_numpy(bits_T2 | np.array([1, 0], np.int32))


def noise(rate: float, rows: int = 1024, columns: int = 1024, pack: int = 0, address: Tensor = ADDRESS) -> Tensor:
    """The mask, less its mean and over its deviation: of independent draws every sum of n entries has the variance n."""
    mask_TD = dropout_mask(draws(rows, pack), address, columns, rate)
    return (mask_TD.double() - rate) / (rate * (1 - rate)) ** 0.5


def test_mask_is_the_formula_in_whole_numbers() -> None:
    draws_T2, columns = draws(7), 9
    mask = dropout_mask(draws_T2, ADDRESS, columns, 0.3).tolist()
    odd = int(ADDRESS) | 1

    def signed(x: int, bits: int = 64) -> int:
        return (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)

    for t, (a, b) in enumerate(draws_T2.tolist()):
        for d in range(columns):
            first = signed((d + 1) * odd)
            c = signed((first ^ (first >> 32)) * odd) >> 32
            assert mask[t][d] == (signed(a * c + b, 32) < round(0.3 * 2**32) - 2**31)


@pytest.mark.parametrize("rate", RATES)
def test_rates_of_rows_columns_and_all_are_those_of_independent_draws(rate: float) -> None:
    noise_TD = noise(rate)
    assert abs(float(noise_TD.sum())) < 4 * noise_TD.numel() ** 0.5
    for dim in (0, 1):
        sums = noise_TD.sum(dim) / noise_TD.shape[dim] ** 0.5
        assert float(sums.abs().max()) < 6
        assert float(sums.var()) == pytest.approx(1, abs=0.25)  # of 1024: five deviations


@pytest.mark.parametrize("rate", RATES)
def test_entries_do_not_depend_on_one_another(rate: float) -> None:
    """Correlations over all distances in both directions, by Fourier; over the corners of rectangles; between packs and modules."""
    noise_TD = noise(rate)
    spectrum = torch.fft.fft2(noise_TD).abs().square() / noise_TD.numel()
    shifted = torch.fft.ifft2(spectrum).real.flatten()  # correlations; the first is the variance
    assert float(shifted[0]) == pytest.approx(1, abs=0.02)
    assert float(shifted[1:].abs().max()) * noise_TD.numel() ** 0.5 < 6.5
    corners = noise_TD[:-1, :-1] * noise_TD[1:, :-1] * noise_TD[:-1, 1:] * noise_TD[1:, 1:]
    assert abs(float(corners.sum())) < 5 * float(corners.square().sum()) ** 0.5
    for other in (noise(rate, pack=1), noise(rate, address=torch.tensor(seed_for(0, "language.blocks.3.mlp.up")))):
        assert abs(float((noise_TD * other).sum())) < 5 * noise_TD.numel() ** 0.5


def test_cut_rows_drop_what_they_drop_in_the_whole() -> None:
    draws_T2 = draws(96)
    whole = dropout_mask(draws_T2, ADDRESS, 40, 0.2)
    zigzag = torch.cat([torch.arange(24), torch.arange(72, 96)])
    for rows in (slice(0, 48), slice(5, 6), zigzag):
        assert torch.equal(dropout_mask(draws_T2[rows], ADDRESS, 40, 0.2), whole[rows])


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.9999999999])
def test_rates_at_the_ends_are_kept(rate: float) -> None:
    assert float(dropout_mask(draws(200), ADDRESS, 200, rate).double().mean()) == pytest.approx(rate, abs=1e-4)
