"""A batch against one made by hand, and every index against what it points at."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from eyeline.core.batch import IGNORE, Budget, Counts, Document, Grid, Image
from eyeline.data.fetch.batches import batch_of


def image(key: str, tokens: int, fill: int) -> Image:
    """`tokens` visual tokens of 2×2 patches with C=3; patch p is filled with fill + p."""
    count = 4 * tokens
    patches_PC = np.repeat(np.arange(fill, fill + count, dtype=np.uint8)[:, None], 3, 1)
    places_P2 = np.stack([np.arange(count), np.arange(count) + 50], 1).astype(np.int32)
    return Image(key, patches_PC, places_P2, Grid(2, 2 * tokens), 2)


def document(id: str, tokens: list[int], labels: list[int], visual: list[int], *images: Image) -> Document:
    return Document(id, np.array(tokens, np.int32), np.array(labels, np.int32), np.array(visual, np.int32), images)


A, B = image("a", 2, 0), image("b", 1, 100)
X = IGNORE
DOCUMENTS = [
    document("one", [9, 9, 1, 2, 3], [X, X, 2, 3, X], [0, 1], A),
    document("text", [4, 5], [5, X], []),
    document("two", [6, 9, 9, 9, 7], [X, X, X, 7, X], [1, 2, 3], A, B),  # shows a again
]


def test_a_batch_by_hand() -> None:
    batch = batch_of(DOCUMENTS, Budget(16, 12))
    assert batch.tokens_T.tolist() == [9, 9, 1, 2, 3, 4, 5, 6, 9, 9, 9, 7, 0, 0, 0, 0]
    positions = [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.positions_T3.tolist() == [[p] * 3 for p in positions]
    assert batch.cu_S1.tolist() == [0, 5, 7, 12, 16]
    assert batch.longest == 5
    assert batch.rows_L.tolist() == [2, 3, 5, 10]
    assert batch.labels_L is not None
    assert batch.labels_L.tolist() == [2, 3, 5, 7]
    assert batch.visual_M.tolist() == [0, 1, 8, 9, 10]
    assert batch.sources_M.tolist() == [0, 1, 0, 1, 2]  # the second document reads a's rows, then b's
    assert batch.patches_PC[:, 0].tolist() == [*range(8), *range(100, 104)]
    assert batch.places_P2[:, 1].tolist() == [*range(50, 58), *range(50, 54)]
    assert batch.cu_N1.tolist() == [0, 8, 12]
    assert batch.longest_image == 8
    assert batch.counts == Counts(slots=16, real=12, visual=5, text=7, supervised=4, documents=3, images=2, patches=12)
    assert batch.ids == ("one", "text", "two")


def test_types_are_those_that_the_record_states() -> None:
    for batch in (batch_of(DOCUMENTS, Budget(16, 12)), batch_of(DOCUMENTS[1:2], None), batch_of([], Budget(4, 4))):
        for name in ("tokens_T", "positions_T3", "rows_L", "labels_L", "visual_M", "sources_M", "places_P2"):
            assert getattr(batch, name).dtype == torch.int64, name
        assert (batch.cu_S1.dtype, batch.cu_N1.dtype, batch.patches_PC.dtype) == (torch.int32, torch.int32, torch.uint8)
        assert (batch.positions_T3.ndim, batch.places_P2.ndim, batch.patches_PC.ndim) == (2, 2, 2)


def test_without_a_budget_nothing_is_padded() -> None:
    padded, bare = batch_of(DOCUMENTS, Budget(16, 99)), batch_of(DOCUMENTS, None)
    assert bare.counts.slots == bare.counts.real == len(bare.tokens_T) == 12
    assert bare.cu_S1.tolist() == padded.cu_S1.tolist()[:-1]
    assert_close(bare.tokens_T, padded.tokens_T[:12])


def test_a_full_batch_has_no_padding_document() -> None:
    assert batch_of(DOCUMENTS, Budget(12, 12)).cu_S1.tolist() == [0, 5, 7, 12]


def test_next_tokens_are_asked_after_each_document() -> None:
    batch = batch_of(DOCUMENTS, None, next_tokens=True)
    assert batch.labels_L is None
    assert batch.rows_L.tolist() == [4, 6, 11]
    assert batch.counts.supervised == 0


def test_a_batch_of_text_has_no_patches() -> None:
    batch = batch_of(DOCUMENTS[1:2], Budget(3, 0))
    assert (len(batch.patches_PC), len(batch.visual_M), batch.cu_N1.tolist(), batch.longest_image) == (0, 0, [0], 0)


def test_the_same_image_twice_in_one_document() -> None:
    batch = batch_of([document("d", [9, 9, 9, 9], [X] * 4, [0, 1, 2, 3], A, A)], None)
    assert batch.sources_M.tolist() == [0, 1, 0, 1]
    assert (batch.counts.images, batch.counts.patches, batch.counts.visual) == (1, 8, 4)


def test_more_than_the_budget_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="12 tokens do not fit a budget of 11"):
        batch_of(DOCUMENTS, Budget(11, 12))
    with pytest.raises(AssertionError, match="12 patches do not fit a budget of 11"):
        batch_of(DOCUMENTS, Budget(12, 11))


def test_token_zero_is_a_token() -> None:
    """In some tokenizers it is "!". What is padding is told by lengths alone."""
    batch = batch_of([document("!", [5, 0, 0], [0, 0, X], [])], Budget(6, 0))
    assert (batch.cu_S1.tolist(), batch.counts.real, batch.counts.supervised) == ([0, 3, 6], 3, 2)
    assert batch.labels_L is not None
    assert (batch.rows_L.tolist(), batch.labels_L.tolist()) == ([0, 1], [0, 0])


def test_random_documents_point_at_their_own_pixels() -> None:
    """Every visual token finds the patches of its image, every labelled row its label."""
    rng = np.random.default_rng(0)
    pool = [image(str(n), int(rng.integers(1, 4)), 20 * n) for n in range(6)]
    documents = []
    for n in range(12):
        shown = [pool[i] for i in rng.integers(0, 6, rng.integers(0, 3))]
        visual = sum(i.tokens for i in shown)
        length = visual + int(rng.integers(1, 6))
        where = np.sort(rng.choice(length, visual, replace=False)).tolist()
        labels = np.where(rng.random(length) < 0.5, rng.integers(0, 99, length), IGNORE).tolist()
        documents.append(document(str(n), rng.integers(0, 99, length).tolist(), labels, where, *shown))
    batch = batch_of(documents, Budget(300, 1000))
    assert batch.labels_L is not None
    merged = batch.patches_PC.view(-1, 4, 3)[:, 0, 0]
    values = dict(zip(batch.visual_M.tolist(), merged[batch.sources_M].tolist(), strict=True))
    labels = dict(zip(batch.rows_L.tolist(), batch.labels_L.tolist(), strict=True))
    for start, d in zip(batch.cu_S1.tolist(), documents, strict=False):
        pixels = np.concatenate([i.patches_PC[::4, 0] for i in d.images] or [[]]).tolist()
        assert [values.pop(start + v) for v in d.visual_M.tolist()] == pixels
        for t, label in enumerate(d.labels_T.tolist()):
            assert labels.pop(start + t, IGNORE) == label
    assert not values
    assert not labels


def test_patches_that_lie_end_to_end_are_not_moved() -> None:
    """And others are joined: in another order, with one left out, or from another place."""
    room_PC = np.empty((20, 12), np.uint8)
    room_PC[:] = np.arange(20 * 12).reshape(20, 12)
    slices = {"a": slice(2, 6), "b": slice(6, 10), "c": slice(10, 18)}
    images = {key: replace(image(key, (at.stop - at.start) // 4, 0), patches_PC=room_PC[at]) for key, at in slices.items()}
    images["d"] = replace(image("d", 1, 0), patches_PC=room_PC[6:10].copy())
    for order, moved in {"abc": False, "bc": False, "abab": False, "ba": True, "ac": True, "ad": True, "d": True}.items():
        shown = [images[key] for key in order]
        tokens = sum(one.tokens for one in shown)
        batch = batch_of([document("x", [1] * tokens, [IGNORE] * tokens, list(range(tokens)), *shown)], None)
        wanted_PC = np.concatenate([images[key].patches_PC for key in dict.fromkeys(order)])
        assert (batch.patches_PC.numpy() == wanted_PC).all()
        assert np.shares_memory(batch.patches_PC.numpy(), room_PC) != moved
