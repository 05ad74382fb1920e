"""Filters against transformers' logits warpers; drawing against the distribution it should have."""

import pytest
import torch
from pydantic import ValidationError
from torch.testing import assert_close
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eyeline.generate.generate import pieces
from eyeline.generate.sampling import Sampling, filter_logits, next_tokens


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
def test_filters_equal_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits_BV = 3 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    logits_BV[1, 10:20] = logits_BV[1].max()  # ties at the top
    logits_BV[2] = 0.0  # all tied
    expected_BV = TemperatureLogitsWarper(temperature)(None, logits_BV.clone())  # type: ignore[arg-type]  # the ids are not looked at
    if top_k:
        expected_BV = TopKLogitsWarper(top_k)(None, expected_BV)  # type: ignore[arg-type]
    if top_p < 1:
        expected_BV = TopPLogitsWarper(top_p)(None, expected_BV)  # type: ignore[arg-type]
    assert_close(filter_logits(logits_BV, Sampling(temperature=temperature, top_k=top_k, top_p=top_p)), expected_BV, rtol=0, atol=0)


def test_drawn_tokens_have_the_probabilities_of_the_logits() -> None:
    probability_V = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = 4000
    drawn = next_tokens(probability_V.log().repeat(draws, 1), Sampling(temperature=1.0), range(draws), step=3)
    counts_V = torch.bincount(torch.tensor(drawn), minlength=4) / draws
    assert counts_V[1] == 0
    assert_close(counts_V, probability_V, rtol=0, atol=0.03)  # four standard deviations of the worst: 4·√(.25/4000) = 0.032


def test_a_draw_depends_on_its_own_address_alone() -> None:
    logits_BV = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=1.0, seed=5)
    together = next_tokens(logits_BV, sampling, range(6), step=2)
    alone = [next_tokens(logits_BV[row : row + 1], sampling, [row], step=2)[0] for row in range(6)]
    assert together == alone
    assert together != next_tokens(logits_BV, sampling, range(6), step=3)
    assert len({*next_tokens(logits_BV[:1].expand(6, -1), sampling, range(6), step=2)}) > 1, "each row draws a number of its own"
    assert together != next_tokens(logits_BV, Sampling(temperature=1.0, seed=6), range(6), step=2)


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (0.49, 1), (0.51, 3), (1.0, 3)])
def test_no_uniform_number_draws_a_token_without_a_share(monkeypatch: pytest.MonkeyPatch, uniform: float, expected: int) -> None:
    """Tokens 1 and 3 have a half each, 0, 2 and 4 nothing; 1.0 stands for a number so near to it that its product rounds up."""

    class Fixed:
        def random(self) -> float:
            return uniform

    monkeypatch.setattr("eyeline.generate.sampling.rng_for", lambda *_: Fixed())
    logits_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).log()
    assert next_tokens(logits_BV, Sampling(temperature=1.0), [0], step=0) == [expected]


def test_only_the_most_probable_token_is_left_at_the_extremes() -> None:
    logits_BV = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    greedy = next_tokens(logits_BV, Sampling(), range(4), step=0)
    assert greedy == logits_BV.argmax(-1).tolist()
    assert next_tokens(logits_BV, Sampling(temperature=1.0, top_k=1), range(4), step=0) == greedy
    assert next_tokens(logits_BV, Sampling(temperature=1.0, top_p=1e-6), range(4), step=0) == greedy


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"max_new_tokens": 0}, {"temprature": 1}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_pieces_never_split_a_character() -> None:
    """Tokens are single bytes here: the worst case for characters of two, three and four bytes, and for bytes that are none."""
    data = "aé€😀b".encode() + b"\xff\xe2\x82" + b"c\xf0"

    def decode(ids: object) -> str:
        return bytes(ids).decode("utf-8", errors="replace")  # type: ignore[call-overload]

    out = list(pieces(iter(data), decode))
    assert "".join(out) == decode(data)
    assert out[:5] == ["a", "é", "€", "😀", "b"]
    assert list(pieces(iter(b""), decode)) == []
