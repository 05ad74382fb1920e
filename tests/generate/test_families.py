"""Every family answers as transformers' `generate` does, token for token: with a cache, many prompts at once, images included."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from eyeline.core.batch import IGNORE, Document
from eyeline.generate.generate import generate
from eyeline.generate.sampling import Sampling
from tests.models import parity
from tests.models.cases import each_case, each_typical_case
from tests.models.parity import Case

LENGTH = 12


def answered(case: Case, peer: parity.PreTrainedModel, prompt: Document) -> list[int]:
    """The peer's greedy answer to one prompt alone."""
    inputs = case.inputs(prompt)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])  # else every 0 in the prompt would be taken for padding
    out = peer.generate(**inputs, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@each_typical_case
def test_greedy_answers_equal_transformers(case: Case, tmp_path: Path) -> None:
    peer, model = parity.pair(case, tmp_path)
    expected = [answered(case, peer, d) for d in case.documents]
    assert len({tuple(e) for e in expected}) > len(expected) // 2, "the prompts do matter"
    assert any(len(set(e)) > 2 for e in expected), "and the answers are not one token for ever"
    got = generate(model, case.spec, case.documents, Sampling(max_new_tokens=LENGTH), [])
    assert [list(a.tokens) for a in got] == expected


@each_case
def test_rows_that_end_leave_the_others_as_they_were(case: Case) -> None:
    """Stopping at a token of the second answer cuts answers; what is left of each is what it was."""
    model = parity.randomised(case).eval()
    free = generate(model, case.spec, case.documents, Sampling(max_new_tokens=LENGTH), [])
    stop = free[1].tokens[2]
    cut = [a.tokens[: a.tokens.index(stop)] if stop in a.tokens else a.tokens for a in free]
    assert len({len(c) for c in cut}) > 1
    assert [a.tokens for a in generate(model, case.spec, case.documents, Sampling(max_new_tokens=LENGTH), [stop])] == cut


@each_case
def test_the_cache_changes_nothing(case: Case) -> None:
    """Each token of an answer is the one that a forward pass over all before it, without a cache, finds most probable."""
    model = parity.randomised(case).eval()
    answers = generate(model, case.spec, case.documents, Sampling(max_new_tokens=5), [])
    for step in range(5):
        grown = [extended(d, a.tokens[:step]) for d, a in zip(case.documents, answers, strict=True)]
        logits_LV = model(parity.batch_of(grown, None, next_tokens=True)).out
        assert logits_LV.argmax(-1).tolist() == [a.tokens[step] for a in answers]


def extended(d: Document, tokens: tuple[int, ...]) -> Document:
    """The document with an answer behind it; its positions continue from the largest."""
    more = np.array(tokens, np.int32)
    positions_T3 = d.positions_T3
    if positions_T3 is not None:
        after = positions_T3.max() + 1 + np.arange(len(more), dtype=np.int32)
        positions_T3 = np.concatenate([positions_T3, np.repeat(after[:, None], 3, 1)])
    labels_T = np.full(len(d.tokens_T) + len(more), IGNORE, np.int32)
    return replace(d, tokens_T=np.concatenate([d.tokens_T, more]), labels_T=labels_T, positions_T3=positions_T3)
