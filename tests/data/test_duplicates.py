"""What occurs twice, against sets in which it was put by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from eyeline.core.batch import Budget, EncodedImage, Message, Sample
from eyeline.core.image_rule import ImageRule
from eyeline.data.reader import reader_of
from eyeline.data.report.duplicates import EXAMPLES, SampleHashes, duplicates, hashes_of
from eyeline.data.report.report import THOROUGH, Depth, data_report
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.data.text.tokenizer import Encoder
from tests.data.llava_rows import row
from tests.data.short_samples import said, sample


def test_equal_images_under_other_names_are_found(tmp_path: Path, draw: Callable[..., Path]) -> None:
    draw("a.png", seed=1)
    draw("b.png", seed=2)
    shutil.copy(tmp_path / "a.png", tmp_path / "copy.png")
    a, b, copy, gone = (EncodedImage(name, tmp_path / name) for name in ("a.png", "b.png", "copy.png", "gone.png"))
    inside = EncodedImage("image", (tmp_path / "a.png").read_bytes())
    found = hashes_of([sample((p, "q"), "x") for p in (a, b, copy, a, inside, gone)])
    assert (found.samples, found.equal_samples) == (5, 3)  # all but b say and show the same; the one without its file is not counted
    assert (len(found.places), found.equal_images) == (4, 2)
    assert found.image_examples == [("copy.png", "a.png"), ("image of made#0", "a.png")]


def test_samples_are_equal_in_text_turns_and_images() -> None:
    p, other = EncodedImage("p", b"p"), EncodedImage("o", b"o")
    different = [
        sample("q", "x"),
        sample("q", "y"),
        sample("q", "x", "", "y"),
        sample((p, "q"), "x"),
        sample(("q", p), "x"),
        sample((other, "q"), "x"),
        sample((p, other, "q"), "x"),
        sample((other, p, "q"), "x"),
        sample(("q\n", "assistant"), "x"),
        sample("q", "x", system="s"),
        Sample("made#0", tuple(Message("system", m.parts) for m in said("q", "x"))),
    ]
    assert hashes_of(different).equal_samples == 0
    assert hashes_of([*different, *different]).equal_samples == len(different)
    assert len(said("q", "x")) == 2


def test_overlaps_by_hand() -> None:
    p, q, r = (EncodedImage(name, name.encode()) for name in "pqr")
    training = hashes_of([sample((p, "one"), "x"), sample((q, "two"), "x"), sample("three", "x")])
    twice = sample((p, "one"), "x")
    validation = hashes_of([twice, twice, sample((q, "other"), "x"), sample((r, "two"), "x"), sample("three", "y")])
    [overlap] = duplicates(training, {"validation": validation}).overlaps
    assert (overlap.samples, overlap.equal_samples, overlap.equal_texts) == (5, 2, 3)
    assert (overlap.images, overlap.equal_images) == (3, 2)
    assert overlap.examples == (("p of made#0", "p of made#0"), ("q of made#0", "q of made#0"))
    [nothing] = duplicates(SampleHashes(), {"evaluation": validation}).overlaps
    assert (nothing.equal_samples, nothing.equal_texts, nothing.equal_images, nothing.equal_paths) == (0, 0, 0, 0)


def test_examples_are_few() -> None:
    found = hashes_of([sample("q", "x")] * 50)
    assert (found.equal_samples, len(found.sample_examples)) == (49, EXAMPLES)


def test_validation_that_training_has_seen_is_found(tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule) -> None:
    """Found by path and by content: a copy of an image has another path."""
    for n in range(4):
        draw(f"{n}.png", seed=n)
    shutil.copy(tmp_path / "0.png", tmp_path / "renamed.png")
    (tmp_path / "train.json").write_text(json.dumps([row(f"q{n}", f"{n}.png") for n in range(3)]))
    rows = [row("new", "renamed.png"), row("q1", "1.png"), row("q2", "3.png"), row("bad", "none.png")]
    (tmp_path / "val.json").write_text(json.dumps(rows))
    data = Data(sources=(Source(path=str(tmp_path / "train.json")),), validation=(Source(path=str(tmp_path / "val.json")),))
    found = data_report(reader_of(data, plain, rule, 0), Budget(50, 64), THOROUGH).duplicates
    assert found is not None
    [overlap] = found.overlaps
    assert (overlap.samples, overlap.equal_samples, overlap.equal_texts) == (3, 1, 2)
    assert (overlap.images, overlap.equal_images, overlap.equal_paths) == (3, 2, 1)
    assert {pair[0].rpartition("/")[2]: pair[1].rpartition("/")[2] for pair in overlap.examples} == {
        "renamed.png": "0.png",
        "1.png": "1.png",
    }
    some = data_report(reader_of(data, plain, rule, 0), Budget(50, 64), Depth(compared=2)).duplicates
    assert some is not None
    assert (found.whole, some.whole, some.samples) == (True, False, 1)
