"""COCO's captions: every annotation a sample with its image's file, on one line or over many."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import BadSample, Refused
from eyeline.data.containers import json_rows
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.container_files import COCO, COCO_ANNOTATIONS, COCO_IMAGES
from tests.data.read_back import complaint, everything, parts
from tests.data.short_samples import chat


def opened(path: Path, content: Any, **settings: Any) -> Rows:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return open_source(Source(path=str(path), **settings))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("order", [("info", "images", "licenses", "annotations"), ("annotations", "images"), ("images", "annotations")])
def test_captions_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, order: tuple[str, ...]) -> None:
    monkeypatch.setattr(json_rows, "SHARD_ROWS", 3)
    (tmp_path / "train2017").mkdir()
    text = json.dumps({name: COCO[name] for name in order}, indent=indent) + "\n"
    rows = opened(tmp_path / "captions_train2017.json", text, images=str(tmp_path / "train2017"))
    assert (rows.layout.name, rows.layout.why[:37]) == ("captions", "COCO JSON; row 0 has image and captio")
    everything(rows.container)
    assert [parts(rows, n) for n in range(7)] == [
        [[f"<{n % 3:012}.jpg>", "Describe the image."], [f"caption {n}"]] for n in range(7)
    ]  # fmt: skip
    assert rows.read(next(rows.rows_in(1))[0]).images[0].source == tmp_path / "train2017" / "000000000000.jpg"
    assert [rows.origin_of(place)[2] for place, _, _ in rows.kept_rows()] == list(range(7))
    again = pickle.loads(pickle.dumps(rows))
    assert not again.container._names  # type: ignore[attr-defined]  # what the images are called is read again
    assert [found for *_, found in again.kept_rows()] == [found for *_, found in rows.kept_rows()]


def test_a_fingerprint_depends_on_the_names_of_the_images(tmp_path: Path) -> None:
    first = opened(tmp_path / "a.json", COCO).shards[0].fingerprint
    assert opened(tmp_path / "b.json", COCO).shards[0].fingerprint == first
    renamed = COCO | {"images": [image | {"file_name": "x.jpg"} for image in COCO_IMAGES]}
    assert opened(tmp_path / "a.json", renamed).shards[0].fingerprint != first


def test_what_is_broken_costs_itself(tmp_path: Path) -> None:
    bad = [{"image_id": 99, "caption": "a"}, {"image_id": [1], "caption": "a"}, {"caption": "a"}, [1], {"image_id": 11, "caption": 3}]
    images = [*COCO_IMAGES[:2], {"id": 12, "file_name": None}, "no image", {"id": [1], "file_name": "a"}]
    bad += [{"image_id": 12, "caption": "a"}]
    text = json.dumps(COCO | {"images": images, "annotations": [*COCO_ANNOTATIONS[:2], *bad]}).replace('"caption": 3', '"caption": NaN')
    rows = opened(tmp_path / "x.json", text)
    assert [complaint(rows, n) for n in range(2, 8)] == [
        ("missing_image", "image_id"),
        *[("wrong_type", "image_id")] * 2,
        ("wrong_type", "row"),
        ("not_finite", "caption"),
        ("placeholder_count", "image"),
    ]


def test_annotations_of_another_kind_are_refused(tmp_path: Path) -> None:
    boxes = [{"image_id": 10, "bbox": [1, 2, 3, 4], "category_id": 1}]
    with pytest.raises(Refused, match=r"no known layout\. Found: COCO JSON; its rows have image, image_id, bbox, category_id"):
        opened(tmp_path / "instances.json", COCO | {"annotations": boxes})


def test_lines_with_equal_starts_are_lines(tmp_path: Path) -> None:
    line = json.dumps({"images": ["a"], "messages": chat("<image>", "b")})
    for content in (f"{line}\n{line}\n", line):
        rows = opened(tmp_path / "x.jsonl", content)
        assert rows.layout.why.startswith("JSON lines")
        assert not any(isinstance(found, BadSample) for *_, found in rows.kept_rows())
    with pytest.raises(Refused, match="one JSON object"):
        opened(tmp_path / "x.json", json.dumps({"images": [], "rows": [{"messages": []}]}, indent=1))
    with pytest.raises(Refused, match="holds no rows"):
        opened(tmp_path / "x.json", {"images": [], "annotations": []})


def test_an_annotation_or_image_that_is_nested_too_deep_costs_itself(tmp_path: Path) -> None:
    deep = "[" * 90_000 + "]" * 90_000
    text = json.dumps(
        COCO | {"info": "DEEP", "annotations": [*COCO_ANNOTATIONS[:2], {"image_id": 10, "caption": "DEEP"}, *COCO_ANNOTATIONS[2:]]}
    )
    rows = opened(tmp_path / "x.json", text.replace('"DEEP"', deep))
    assert [isinstance(found, BadSample) and found.cause for *_, found in rows.kept_rows()] == [*[False] * 2, "nesting", *[False] * 5]
