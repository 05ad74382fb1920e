"""The whole road with images of native size and videos: what is planned from headers is what arrives."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast

from eyeline.core.batch import IGNORE, Batch, Budget
from eyeline.data.images.patches import image_patches
from eyeline.data.loader import training_steps
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.documents import document_of
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder
from tests.data.image_rules import NATIVE

SIZES = {"small.png": (10, 14), "wide.jpg": (20, 90), "long.png": (1, 201), "broken.jpg": (40, 60), "a.png": (24, 30), "b.png": (24, 30)}


def asked(text: str, **media: object) -> dict[str, object]:
    return {**media, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]}


ROWS = [
    asked("<image>one?", image="small.png"),
    asked("<image><image>two?", image=["wide.jpg", "small.png"]),
    asked("<video>video?", video=["a.png", "b.png", "a.png"], fps=1),
    asked("no pictures?"),
    asked("<image>too long?", image="long.png"),
    asked("<image>broken?", image="broken.jpg"),
    asked("<video>jumps?", video=["a.png", "small.png"]),
    asked("<image><video>both?", image="wide.jpg", video=["b.png"], timestamps=[3.5]),
]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    for n, (name, (height, width)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(n).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Pillow.fromarray(pixels).save(tmp_path / name)
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(broken.read_bytes()[:-400])  # its header is sound
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    return Data(sources=(Source(path=str(tmp_path / "rows.json")),), max_reject_rate=1.0)


def test_documents_arrive_as_planned(data: Data, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    encoder = Encoder(tokenizers["qwen3"], TEMPLATES["qwen3"])
    reader = reader_of(data, encoder, NATIVE, 0)
    batches: list[Batch] = [batch for step in training_steps(reader, Budget(120, 300), 1, 1) for batch in step.batches]
    arrived = {}
    for batch in batches:
        assert batch.counts.patches <= 300
        bounds, labels_T = batch.cu_S1.tolist(), np.full(len(batch.tokens_T), IGNORE)
        assert batch.labels_L is not None
        labels_T[batch.rows_L] = batch.labels_L
        for id, start, end in zip(batch.ids, bounds, bounds[1:], strict=False):
            arrived[id] = (batch.tokens_T[start:end].tolist(), batch.positions_T3[start:end].tolist(), labels_T[start:end].tolist())
    assert sorted(arrived) == [f"rows.json#{n}" for n in (0, 1, 2, 3, 5, 7)]
    rows = open_source(data.sources[0])
    for n in (0, 1, 2, 3, 7):
        (sample,) = [found for _, _, found in rows.kept_rows() if getattr(found, "id", "") == f"rows.json#{n}"]
        wanted = document_of(sample, encoder, NATIVE, [image_patches(item, NATIVE) for item in sample.media])
        assert arrived[sample.id] == (wanted.tokens_T.tolist(), wanted.positions_T3.tolist(), wanted.labels_T.tolist())  # type: ignore[union-attr]
    tokens, _, labels = arrived["rows.json#5"]
    assert tokens.count(encoder.image_token) == NATIVE.units(40, 60)[0].tokens  # grey in its place, and nothing is learned from it
    assert set(labels) == {IGNORE}
    assert reader.rejects.counts == {"aspect_ratio": 1, "broken_image": 1, "frame_size": 1}
