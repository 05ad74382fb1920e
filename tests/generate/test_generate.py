"""Answers against transformers' `generate`, token for token, and against our own model without a cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyeline.core.batch import IGNORE, Document
from eyeline.core.errors import Refused
from eyeline.core.plan import Spec
from eyeline.data.fetch.batches import batch_of
from eyeline.generate.generate import Answer, generate, stream
from eyeline.generate.sampling import Sampling
from eyeline.models import llava
from tests.generate.parity import generated, image, llava_peers, prompt, qwen2_peers

LENGTH = 14


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def peers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, llava.Model, Spec]:
    return llava_peers(tmp_path_factory.mktemp("peer"), tied=request.param)


def prompts() -> list[Document]:
    """Text only, an image first, two images in different places, an image shared with another prompt, one token only."""
    a, b = image("a"), image("b")
    return [prompt("text", 9), prompt("one", a, 5), prompt("two", 3, b, 4, a, 2), prompt("shared", 2, a, 11), prompt("single", 1)]


def test_greedy_answers_equal_transformers_token_for_token(peers: tuple[Any, llava.Model, Spec]) -> None:
    peer, model, spec = peers
    expected = [generated(peer, p, LENGTH, []) for p in prompts()]
    assert len({tuple(e) for e in expected}) == len(expected)  # the prompts do matter
    assert all(len(set(e)) > 3 for e in expected)  # and the answers are not one token for ever
    got = generate(model, spec, prompts(), Sampling(max_new_tokens=LENGTH), [])
    assert [list(a.tokens) for a in got] == expected
    assert {a.finish for a in got} == {"length"}


def test_rows_stop_one_by_one_as_they_do_alone(peers: tuple[Any, llava.Model, Spec]) -> None:
    peer, model, spec = peers
    free = [generated(peer, p, LENGTH, []) for p in prompts()]
    stop_ids = [free[0][0], free[2][5]]  # the first row stops at once, the third in the middle
    expected = [generated(peer, p, LENGTH, stop_ids) for p in prompts()]
    got = generate(model, spec, prompts(), Sampling(max_new_tokens=LENGTH), stop_ids)
    assert [list(a.tokens) for a in got] == expected
    assert expected[0] == []
    assert [a.finish for a in got] == ["length" if len(e) == LENGTH else "stop" for e in expected]
    assert len({len(e) for e in expected}) > 2


def test_text_only_answers_equal_qwen2s(tmp_path: Path) -> None:
    peer, model, spec = qwen2_peers(tmp_path)
    documents = [prompt("a", 7), prompt("b", 20), prompt("c", 1)]
    got = generate(model, spec, documents, Sampling(max_new_tokens=20), [])
    assert [list(a.tokens) for a in got] == [generated(peer, d, 20, []) for d in documents]


def test_the_cache_changes_nothing(peers: tuple[Any, llava.Model, Spec]) -> None:
    """Each token of an answer is the one that a forward pass over all before it, without a cache, finds most probable."""
    _, model, spec = peers
    answers = generate(model, spec, prompts(), Sampling(max_new_tokens=6), [])
    for step in range(6):
        grown = [extended(document, answer.tokens[:step]) for document, answer in zip(prompts(), answers, strict=True)]
        with torch.no_grad():
            logits_LV = model(batch_of(grown, None, next_tokens=True)).out
        assert logits_LV.argmax(-1).tolist() == [answer.tokens[step] for answer in answers]


def extended(document: Document, tokens: tuple[int, ...]) -> Document:
    tokens_T = np.concatenate([document.tokens_T, np.array(tokens, np.int32)])
    return Document(document.id, tokens_T, np.full_like(tokens_T, IGNORE), document.visual_M, document.images)


def test_sampled_answers_follow_the_seed_and_not_their_neighbours(peers: tuple[Any, llava.Model, Spec]) -> None:
    _, model, spec = peers
    sampling = Sampling(max_new_tokens=LENGTH, temperature=1.0, top_p=0.95, top_k=50, seed=3)
    together = generate(model, spec, prompts(), sampling, [])
    assert together == generate(model, spec, prompts(), sampling, [])
    assert together[0] == generate(model, spec, prompts()[:1], sampling, [])[0]
    stop = together[1].tokens[2]  # row 1 ends early, and the rows after it move up
    cut = [a.tokens[: a.tokens.index(stop)] if stop in a.tokens else a.tokens for a in together]
    assert [a.tokens for a in generate(model, spec, prompts(), sampling, [stop])] == cut
    other = generate(model, spec, prompts(), sampling.model_copy(update={"seed": 4}), [])
    assert all(a != b for a, b in zip(together, other, strict=True))


def test_images_are_encoded_once_and_only_in_the_prefill(peers: tuple[Any, llava.Model, Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, spec = peers
    seen: list[int] = []
    forward = model.vision.forward
    monkeypatch.setattr(model.vision, "forward", lambda patches_PC, *rest: seen.append(len(patches_PC)) or forward(patches_PC, *rest))
    generate(model, spec, prompts(), Sampling(max_new_tokens=3), [])
    assert seen == [2 * 16]  # images a and b of 16 patches, though a is shown three times


def test_positions_end_the_answer(tmp_path: Path) -> None:
    """A model of 12 positions answers a prompt of 9 tokens with 3, together with a shorter prompt that gets its 5; 12 are refused."""
    _, model, spec = qwen2_peers(tmp_path, longest=12)
    got = generate(model, spec, [prompt("a", 9), prompt("b", 2)], Sampling(max_new_tokens=5), [])
    assert [(len(a.tokens), a.finish) for a in got] == [(3, "length"), (5, "length")]
    with pytest.raises(Refused, match="a prompt has 12 tokens, and the model's context holds 12 with the answer"):
        generate(model, spec, [prompt("full", 12)], Sampling(), [])


def test_no_prompts_no_answers_and_no_dropout(peers: tuple[Any, llava.Model, Spec]) -> None:
    _, model, spec = peers
    assert generate(model, spec, [], Sampling(), []) == []
    model.train()
    try:
        with pytest.raises(AssertionError, match="dropout"):
            generate(model, spec, prompts(), Sampling(), [])
    finally:
        model.eval()


def test_the_stream_is_the_decoded_answer(peers: tuple[Any, llava.Model, Spec]) -> None:
    _, model, spec = peers

    class Letters:
        """Two letters a token: what `stream` needs of an encoder."""

        def __init__(self, stop_ids: list[int]):
            self.stop_ids = stop_ids

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(97 + i // 26) + chr(97 + i % 26) for i in ids)

    one = prompts()[1]
    [whole] = generate(model, spec, [one], Sampling(max_new_tokens=8), [])
    stop = whole.tokens[5]
    [answer] = generate(model, spec, [one], Sampling(max_new_tokens=8), [stop])
    assert answer == Answer(whole.tokens[: whole.tokens.index(stop)], "stop")
    letters = Letters([stop])
    assert list(stream(model, spec, one, Sampling(max_new_tokens=8), letters)) == [letters.decode([t]) for t in answer.tokens]  # type: ignore[arg-type]


def test_images_matter(peers: tuple[Any, llava.Model, Spec]) -> None:
    _, model, spec = peers
    one, other = (generate(model, spec, [prompt("same", shown, 4)], Sampling(max_new_tokens=6), []) for shown in (image("a"), image("b")))
    assert one != other
