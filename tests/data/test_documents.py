"""What is measured is what is made; what is too long loses whole exchanges, never a part of one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyeline.core.batch import IGNORE, Grid, Image, Message, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.core.image_rule import ImageRule, Square
from eyeline.data.images.patches import grey_images
from eyeline.data.text import documents
from eyeline.data.text.documents import Measured, Tokenised, assemble, document_of, fit_to_limits, measure, tokenise
from eyeline.data.text.tokenizer import Encoder
from tests.data.short_samples import DOT, sample

SIZES = [(12, 20)] * 3
THREE = sample((DOT, "one?"), "1", ("two?", DOT), "2", "three?", "3")


@pytest.mark.parametrize("conversation", [THREE, sample("hi", "ho"), sample((DOT, DOT), "two dots", system="Look!")])
def test_measures_are_those_of_the_document(qwen: Encoder, rule: ImageRule, conversation: Sample) -> None:
    size = measure(conversation, SIZES[: len(conversation.media)], qwen, rule)
    document = document_of(conversation, qwen, rule, [grey_images(rule)] * len(conversation.images))
    assert size.tokens == len(document.tokens_T)
    assert size.visual == len(document.visual_M) == 4 * len(conversation.images)
    assert size.supervised == (document.labels_T != IGNORE).sum()
    assert size.patches == 16 * len(conversation.images)


MARK = "<|image_pad|>"  # of a tile: any control token that every tokenizer has
units = st.builds(
    lambda rows, columns, mark: Image("", np.empty((4 * rows * columns, 0), np.uint8), np.empty(0), Grid(2 * rows, 2 * columns), 2, mark),
    *(st.integers(1, 3), st.integers(1, 3), st.sampled_from([None, MARK])),
)
shows = st.tuples(
    st.booleans(), st.lists(units, min_size=1, max_size=4)
)  # whether it is a video, its images: of a still, tiles at one place
texts = st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=6)


@settings(max_examples=300, deadline=None)
@given(start=texts, rest=st.lists(st.tuples(shows, st.lists(texts, min_size=4, max_size=4)), max_size=4))
def test_a_document_is_as_if_written_token_by_token(qwen: Encoder, start: list, rest: list) -> None:
    """Tiles stand at one place, slices of a video apart; each image has its mark before it; labels are the next token's."""
    ids, wanted, places, visual = [*start], [*start], [], []
    for (video, images), between in rest:
        for n, image in enumerate(images):
            if video or n == 0:
                places.append(len(ids))
                ids.append((100, False))
            wanted += [(qwen.controls[MARK], False)] * (image.mark is not None)
            visual += range(len(wanted), len(wanted) + image.tokens)
            wanted += [(100, False)] * image.tokens
            if video or n == len(images) - 1:
                ids += between[n % 4]
                wanted += between[n % 4]
    known = Tokenised(
        *(np.array([id for id, _ in ids], np.int32), np.array([trained for _, trained in ids], np.bool_), np.array(places, np.int32)),
        tuple(len(images) if video else 1 for (video, images), _ in rest),
    )
    made = assemble("", known, [images for (_, images), _ in rest], qwen, None)
    assert made.tokens_T.tolist() == [id for id, _ in wanted]
    assert made.labels_T.tolist() == [id if trained else IGNORE for id, trained in wanted[1:]] + [IGNORE] * bool(wanted)
    assert made.visual_M.tolist() == visual
    assert {made.tokens_T.dtype, made.labels_T.dtype, made.visual_M.dtype} == {np.dtype(np.int32)}
    assert not made.tokens_T.flags.writeable and not made.labels_T.flags.writeable


def test_a_remembered_document_is_not_another_ones(qwen: Encoder, rule: ImageRule) -> None:
    """Same texts with the image elsewhere, another role, another size of image: other documents."""
    unmerged = ImageRule(8, 1, rule.mean, rule.std, "bicubic", Square(32))
    seen = [
        document_of(sample((DOT, "a"), "b"), qwen, rule, [grey_images(rule)]).tokens_T.tolist(),
        document_of(sample(("a", DOT), "b"), qwen, rule, [grey_images(rule)]).tokens_T.tolist(),
        document_of(sample((DOT, "a"), "b"), qwen, unmerged, [grey_images(unmerged)]).tokens_T.tolist(),
        document_of(sample("a", "b"), qwen, rule, []).tokens_T.tolist(),
        document_of(sample("a", "b", system="a"), qwen, rule, []).tokens_T.tolist(),
    ]
    assert len({tuple(tokens) for tokens in seen}) == 5
    by_role = [tokenise((Message(role, (Text("a"),)),), qwen, rule, True).ids_U.tolist() for role in ("user", "system")]
    assert by_role[0] != by_role[1]
    again = sample((DOT, "a"), "b")
    assert document_of(again, qwen, rule, [grey_images(rule)]).tokens_T.tolist() == seen[0]
    with pytest.raises(ValueError, match="read-only"):
        tokenise(again.messages, qwen, rule).ids_U[0] = 5


def test_too_long_is_rejected_or_shrunk_by_whole_exchanges(plain: Encoder, rule: ImageRule) -> None:
    sizes = [measure(Sample("", THREE.messages[:n]), SIZES[: min(2, n // 2)], plain, rule) for n in (2, 4, 6)]
    for kept, size in zip((2, 4, 6), sizes, strict=True):
        for room in (0, 1):
            shrunk, found = fit_to_limits(THREE, SIZES[:2], size.tokens + room, 99, "drop_turns", plain, rule)
            assert (shrunk.messages, found) == (THREE.messages[:kept], size)
    assert fit_to_limits(THREE, SIZES[:2], 999, 16, "drop_turns", plain, rule)[0].messages == THREE.messages[:2]  # patches bind as well
    assert fit_to_limits(THREE, SIZES[:2], sizes[2].tokens, 32, "reject", plain, rule)[0] is THREE
    for tokens, patches, policy in [(sizes[2].tokens - 1, 99, "reject"), (sizes[0].tokens - 1, 99, "drop_turns"), (999, 15, "drop_turns")]:
        with pytest.raises(BadSample, match=r"needs \d+ tokens \(of at most \d+\) and \d+ patches") as caught:
            fit_to_limits(THREE, SIZES[:2], tokens, patches, policy, plain, rule)  # type: ignore[arg-type]
        assert caught.value.cause == "too_long"


def test_a_conversation_of_thousands_is_shrunk_in_few_looks(plain: Encoder, rule: ImageRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping one exchange at a time would read it as often as it has exchanges."""
    looks = 0

    def counted(*arguments: Any) -> Measured:
        nonlocal looks
        looks += 1
        return measure(*arguments)

    monkeypatch.setattr(documents, "measure", counted)
    many = sample(*(word for n in range(500) for word in (f"and {n}?", "yes")))
    size = measure(Sample("", many.messages[:246]), [], plain, rule)
    assert fit_to_limits(many, [], size.tokens, 99, "drop_turns", plain, rule) == (Sample(many.id, many.messages[:246], many.kind), size)
    assert looks < 15


@pytest.mark.parametrize("empty", [sample("a", ""), sample("a", " \n"), sample("a", "b", "c", ""), sample("a")])
def test_row_without_answer_is_rejected(plain: Encoder, rule: ImageRule, empty: Sample) -> None:
    for make in (lambda: measure(empty, [], plain, rule), lambda: document_of(empty, plain, rule, [])):
        with pytest.raises(BadSample) as caught:
            make()
        assert caught.value.cause == "no_target"


def test_an_image_without_a_tower_is_rejected(plain: Encoder) -> None:
    with pytest.raises(BadSample) as caught:
        measure(THREE, [], plain, None)
    assert caught.value.cause == "image_without_tower"
    assert measure(sample("a", "b"), [], plain, None).patches == 0
