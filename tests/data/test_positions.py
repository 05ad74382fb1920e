"""Positions, ids and visual rows of documents with images of any size and videos, against transformers' Qwen3-VL and Qwen3.5."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from eyeline.core.batch import Budget, Document, EncodedImage, Video
from eyeline.core.errors import Refused
from eyeline.core.image_rule import Area, ImageRule, Tiles, VideoLimits
from eyeline.data.fetch.batches import batch_of
from eyeline.data.images.decode import Size
from eyeline.data.images.patches import grey_images
from eyeline.data.text.documents import document_of, measure, prompt_of
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder, add_tokens, train_bpe
from tests.data.short_samples import sample

HALF = (0.5, 0.5, 0.5)
RULE = ImageRule(4, 2, HALF, HALF, "bicubic", Area(64, 8 * 8 * 30), frames=2, positions="grid", video=VideoLimits(64, 8 * 8 * 60))
DOT = EncodedImage("dot", b"never opened")

Rope = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module", params=[Qwen3VLModel, Qwen3_5Model])
def rope_index(request: pytest.FixtureRequest) -> Rope:
    """The reference's method, without its model."""
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = partial(request.param.get_vision_position_ids, model)
    return partial(request.param.get_rope_index, model)


@pytest.fixture(scope="module")
def encoder(tokenizers: dict[str, PreTrainedTokenizerFast]) -> Encoder:
    return Encoder(tokenizers["qwen3"], TEMPLATES["qwen3"])


def theirs(rope_index: Rope, encoder: Encoder, document: Document, sizes: list[Size]) -> np.ndarray:
    image, video = encoder.controls["<|image_pad|>"], encoder.controls["<|video_pad|>"]
    ids = torch.from_numpy(document.tokens_T.astype(np.int64))[None]
    kinds = (ids == image).int() + 2 * (ids == video).int()
    grids = {2: [], 3: []}  # by the length of a size: stills, videos
    images = iter(document.images)
    for size in sizes:
        slices = [next(images) for _ in range(1 if len(size) == 2 else -(-size[0] // 2))]
        grids[len(size)].append([len(slices), *slices[0].grid])
    stills, videos = (torch.tensor(grid) if grid else None for grid in grids.values())
    positions_3BT, delta_B1 = rope_index(ids, kinds, image_grid_thw=stills, video_grid_thw=videos)
    assert delta_B1.item() == document.positions_T3.max() + 1 - len(document.tokens_T)  # type: ignore[union-attr]
    return positions_3BT[:, 0].T.numpy()


def video(frames: int) -> Video:
    return Video("f", (DOT,) * frames, tuple(n / 2 for n in range(frames)))


sizes = st.lists(st.one_of(st.tuples(*[st.integers(1, 90)] * 2), st.tuples(st.integers(1, 7), *[st.integers(4, 60)] * 2)), max_size=4)


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans(), st.booleans())
def test_positions_equal_the_reference(rope_index: Rope, encoder: Encoder, sizes: list[Size], together: bool, prompt: bool) -> None:
    """Text alone, one image, several of different sizes side by side or apart, videos, and mixtures."""
    media = [DOT if len(size) == 2 else video(size[0]) for size in sizes]
    turns = [(*media, "what?"), "this", "more?", "no"] if together else ["hi", "ho", *(x for m in media for x in (("see", m, "?"), "ok"))]
    asked = sample(*turns)
    shown = [grey_images(RULE, size) for size in sizes]
    document = (prompt_of if prompt else document_of)(asked, encoder, RULE, shown)
    assert document.positions_T3.tolist() == theirs(rope_index, encoder, document, sizes).tolist()  # type: ignore[union-attr]
    if not prompt:
        assert measure(asked, sizes, encoder, RULE).tokens == len(document.tokens_T)
        assert measure(asked, sizes, encoder, RULE).visual == len(document.visual_M)
        assert measure(asked, sizes, encoder, RULE).patches == sum(image.grid.patches for image in document.images)
    kinds = {encoder.controls["<|image_pad|>"], encoder.controls["<|video_pad|>"]}
    assert document.visual_M.tolist() == [t for t, token in enumerate(document.tokens_T.tolist()) if token in kinds]


def test_one_document_by_hand(encoder: Encoder) -> None:
    """An image of 3×2 tokens between texts: the text continues after the longer side."""
    document = document_of(sample((DOT, "?"), "a"), encoder, RULE, [grey_images(RULE, (24, 16))])
    start = int(document.visual_M[0])
    assert document.images[0].grid == (6, 4)
    assert document.positions_T3[start - 1 : start + 8].tolist() == [  # type: ignore[index]
        [start - 1] * 3,
        [start, start, start], [start, start, start + 1],
        [start, start + 1, start], [start, start + 1, start + 1],
        [start, start + 2, start], [start, start + 2, start + 1],
        [start + 3] * 3, [start + 4] * 3,
    ]  # fmt: skip


def test_a_batch_keeps_each_documents_positions_and_grids(encoder: Encoder) -> None:
    one = document_of(sample((DOT, "?"), "a"), encoder, RULE, [grey_images(RULE, (24, 16))])
    two = document_of(sample((video(3), "what?"), "b"), encoder, RULE, [grey_images(RULE, (3, 16, 32))])
    text = document_of(sample("a", "b"), encoder, RULE, [])
    tokens = sum(len(d.tokens_T) for d in (one, two, text))
    batch = batch_of([one, two, text], Budget(tokens + 5, 999))
    wanted = [*(row for d in (one, two, text) for row in d.positions_T3.tolist()), *([n] * 3 for n in range(5))]  # type: ignore[union-attr]
    assert batch.positions_T3.tolist() == wanted
    assert batch.grids_N2.tolist() == [[6, 4], *([list(two.images[0].grid)] * 2)]
    assert batch.counts.images == 3
    assert batch.sources_M.tolist() == list(range(6 + 2 * two.images[0].tokens))
    assert batch.patches_PC.shape == (24 + 2 * two.images[0].grid.patches, 3 * 2 * 16)


# Tiles


def test_tiles_stand_at_one_place_each_after_its_mark() -> None:
    rule = ImageRule(8, 2, HALF, HALF, "bicubic", Tiles(16))
    template = TEMPLATES["smollm2"]
    tokenizer = train_bpe(["what is it? a dot"] * 3, 400, template)
    with pytest.raises(Refused, match=r"has no <\|global_image\|>"):
        Encoder(tokenizer, template, rule.marks)
    assert add_tokens(tokenizer, template, rule.marks) == list(rule.marks)
    encoder = Encoder(tokenizer, template, rule.marks)
    asked = sample(("see", DOT, "?"), "a dot")
    document = document_of(asked, encoder, rule, [grey_images(rule, (40, 40))])
    text = encoder.decode(document.tokens_T.tolist(), special=True)
    pad = "<|image_pad|>"
    tiles = "".join(f"<row_{row}_col_{column}>{pad}" for row in (1, 2) for column in (1, 2))
    assert f"see<|global_image|>{pad}{tiles}?<|im_end|>" in text
    assert (document.tokens_T[document.visual_M] == encoder.image_token).all()
    assert measure(asked, [(40, 40)], encoder, rule).tokens == len(document.tokens_T)
    assert measure(asked, [(40, 40)], encoder, rule).visual == 5
    assert "".join(encoder.decode([t]) for t in document.labels_T.tolist() if t >= 0).startswith("a dot")
    assert document.positions_T3 is None  # counted, for a model without positions of its own for rows and columns
    small = document_of(asked, encoder, rule, [grey_images(rule, (10, 10))])
    assert f"see<|global_image|>{pad}?" in encoder.decode(small.tokens_T.tolist(), special=True)
    marks = [encoder.ids(mark) for mark in rule.marks]  # from data they stay text
    assert not {encoder.controls[mark] for mark in rule.marks} & {i for ids in marks for i in ids}
