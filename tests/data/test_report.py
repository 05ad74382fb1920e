"""What is found of data, against counts made by hand."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast

from eyeline.core.batch import Budget
from eyeline.core.image_rule import Area, ImageRule, VideoLimits
from eyeline.data.images.patches import grey_images
from eyeline.data.reader import Reader, reader_of
from eyeline.data.report import report as reporting
from eyeline.data.report.preview import LONGEST_PIECE, MOST_PIECES, THUMBNAIL, Piece, pieces_of, sample_previews, short_pieces
from eyeline.data.report.report import QUICK, THOROUGH, WHOLE, Depth, Epoch, Images, Measure, data_report
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.data.text.documents import document_of
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder
from eyeline.offline.prepare import pack_offline
from eyeline.study.data_page import image_lines
from tests.data.llava_rows import row
from tests.data.short_samples import DOT, sample


def write(path: Path, rows: list) -> Source:
    path.write_text(json.dumps(rows))
    return Source(path=str(path))


def spread(measure: Measure | None) -> tuple[float, float, float]:
    assert measure is not None
    return measure.least, measure.median, measure.most


@pytest.mark.parametrize("examined", [2, 100])
def test_different_images_are_counted(tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule, examined: int) -> None:
    """Counted by location, or by their bytes where all rows are examined: 7 samples show 3 files, of which 2 are equal."""
    for name, colour in (("a.png", 1), ("b.png", 200)):
        Pillow.fromarray(np.full((30, 30, 3), colour, np.uint8)).save(tmp_path / name)
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    rows = [
        row("x", "a.png"),
        row("x"),
        *[row("y", "b.png")] * 4,
        row("x", "copy.png"),
        row("x", "a.png", "copy.png"),
        row("x", "gone.png"),
    ]
    reader = reader_of(Data(sources=(write(tmp_path / "rows.json", rows),)), plain, rule, 0)
    report = data_report(reader, Budget(50, 64), replace(QUICK, examined=examined))
    assert report.images == Images(samples=7, different=3 if examined < len(rows) else 2)


def test_few_images_are_warned_of() -> None:
    def said(samples: int, different: int) -> list[tuple[str, bool]]:
        return [(line.text, line.warns) for line in image_lines(Images(samples, different), "")]

    assert said(0, 0) == []
    assert said(2000, 2000) == [("2,000 samples with images show 2,000 different images (1.0 samples per image)", False)]
    assert said(38575, 4000)[0][1] is False
    ((text, warns),) = said(2000, 204)
    assert warns
    assert text.startswith(
        "2,000 samples with images show 204 different images (9.8 samples per image): too few different images are the most common"
    )


def test_a_report_by_hand(tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule) -> None:
    draw("wide.png", width=40, height=30)
    Pillow.fromarray(np.zeros((30, 30, 4), np.uint8)).save(tmp_path / "clear.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "wide.png").read_bytes()[:300])
    rows = [
        row("ab", answer="c"),
        row("", "wide.png", answer="abc"),
        row("", "clear.png", "clear.png", answer="ab", more=("and?", "c")),
        row("x", "cut.png"),
        row("x", "absent.png"),
        row("x", answer=" "),
        {"conversations": []},
    ]
    source = write(tmp_path / "rows.json", rows)
    reader = reader_of(Data(sources=(source.model_copy(update={"repeat": 2}),)), plain, rule, 0)
    report = data_report(reader, Budget(50, 64))
    ids = {text: len(plain.ids(text)) for text in ("ab\n", "\n", "x\n", "and?\n", "c", "abc", "ab", "yes")}
    # the cut image keeps its place in a pack, so its sample has a length
    text = [ids["ab\n"] + ids["c"] + 1, ids["\n"] + ids["abc"] + 1, ids["\n"] + ids["ab"] + 1 + ids["and?\n"] + ids["c"] + 1]
    text.append(ids["x\n"] + ids["yes"] + 1)
    visual = [0, 4, 8, 4]
    tokens = [a + b for a, b in zip(text, visual, strict=True)]
    answers = [ids["c"] + 1, ids["abc"] + 1, ids["ab"] + 1, ids["c"] + 1, ids["yes"] + 1]
    assert spread(report.tokens) == (min(tokens), np.median(tokens), max(tokens))
    assert spread(report.text) == (min(text), np.median(text), max(text))
    assert spread(report.visual) == (0, 4, 8)
    assert report.answers is not None
    assert (report.answers.count, report.answers.total) == (5, sum(answers))
    assert report.supervised is not None
    assert (report.supervised.count, report.supervised.total) == (4, sum(answers))
    assert spread(report.images_per_sample) == (0, 1, 2)
    assert report.widths is not None
    assert (report.widths.count, report.widths.total) == (4, 40 + 30 + 30 + 40)
    assert spread(report.aspects) == (1.0, (1 + 40 / 30) / 2, 40 / 30)
    assert report.rejects == {"no_target": 2, "broken_image": 1, "missing_image": 1}
    assert [r.row for r in report.rejected] == [5, 6, 3, 4]
    assert report.unusual == {"transparent (composited over white)": 1}
    assert (report.training, report.validation, report.looked, report.examined, report.decoded) == (7, 0, 7, 7, 3)
    assert (report.sources[0].layout, report.sources[0].rows, report.sources[0].repeat) == ("llava", 7, 2)
    assert (report.control_strings, report.said, report.not_supervised) == (0, 5, 0)
    [packing] = report.budgets  # of the budget as it is: 16 patches an image, so that every pack is full of four
    assert packing.budget == Budget(50, 64)
    assert packing.load.patch == 64 * packing.load.packs > 0
    assert report.duplicates is None
    assert data_report(reader, Budget(50, 64), Depth(examined=3)).examined == 3


def test_measures_by_hand() -> None:
    assert Measure.of(np.array([], np.int64)) is None
    few = Measure.of(np.array([7, 5, 5, 6]))
    assert few == Measure(4, 23, 5, 5.5, 7, 7, (4.5, 5.5, 6.5, 7.5), (2, 1, 1), False)
    many = Measure.of(np.arange(1000))
    assert many is not None
    assert (many.high, many.median, sum(many.bars), len(many.bars)) == (989, 499.5, 1000, 32)
    tailed = Measure.of(np.array([1] * 99 + [1000]))
    assert tailed is not None
    assert (tailed.log, tailed.high, tailed.bars[0], tailed.bars[-1]) == (True, 1, 99, 1)
    same = Measure.of(np.array([2.0, 2.0]))
    assert same is not None
    assert sum(same.bars) == 2


def test_shares_of_sources_by_hand(tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule) -> None:
    """Two rows of text, visited three times, one with an image and one that cannot be used."""
    draw("a.png")
    texts = write(tmp_path / "texts.json", [row("ab", answer="c") | {"kind": "short"}, row("ab", answer="c") | {"kind": "other"}])
    with_images = write(tmp_path / "with_images.json", [row("x", "a.png"), row("x", answer="")])
    once = Data(sources=(texts.model_copy(update={"repeat": 3}), with_images))
    t = len(plain.ids("ab\n")) + len(plain.ids("c")) + 1
    p = len(plain.ids("x\n")) + len(plain.ids("yes")) + 1 + 4
    first, second = data_report(reader_of(once, plain, rule, 0), Budget(50, 64)).sources
    assert (first.training, second.training) == (2, 2)
    assert (first.visits, second.visits) == pytest.approx((6 / 7, 1 / 7))
    assert (first.tokens, second.tokens) == pytest.approx((6 * t / (6 * t + p), p / (6 * t + p)))
    assert (first.visual, second.visual) == (0.0, 1.0)
    assert data_report(reader_of(once, plain, rule, 0), Budget(50, 64)).epoch == Epoch(7, 6 * t + p, 4)
    assert (first.kinds, second.kinds) == ((("short", 1), ("other", 1)), ())
    shares = Data(sources=(texts, with_images.model_copy(update={"weight": 3.0})), mix="interleave")
    found = data_report(reader_of(shares, plain, rule, 0), Budget(50, 64))
    assert found.epoch is None
    first, second = found.sources
    assert (first.visits, second.visits) == (0.25, 0.75)
    assert second.tokens == pytest.approx(3 * p / (t + 3 * p))


def test_validation_of_its_own_is_a_source(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    data = Data(
        sources=(write(tmp_path / "a.json", [row("a")] * 3),), validation=(write(tmp_path / "b.json", [row("b"), row("a"), row("c")]),)
    )
    report = data_report(reader_of(data, plain, rule, 0), Budget(50, 64), THOROUGH)
    assert [(s.training, s.validation, s.visits) for s in report.sources] == [(3, 0, 1.0), (0, 3, 0.0)]
    assert report.duplicates is not None
    assert (report.duplicates.samples, report.duplicates.equal_samples) == (3, 2)
    assert [(o.name, o.samples, o.equal_samples, o.equal_texts) for o in report.duplicates.overlaps] == [("validation", 3, 1, 1)]


def test_large_data_are_sampled_and_figures_are_approximate(
    tmp_path: Path, plain: Encoder, rule: ImageRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyeline.data.containers import json_rows

    monkeypatch.setattr(json_rows, "SHARD_ROWS", 5)
    reader = reader_of(Data(sources=(write(tmp_path / "a.json", [row(f"question {n:03}") for n in range(200)]),)), plain, rule, 0)
    some = data_report(reader, Budget(50, 64), Depth(shards=4, examined=10))
    assert (some.exact, some.looked, some.examined) == (False, 20, 10)
    assert some.training == pytest.approx(200, abs=4)
    rows = reporting.Looked.of(reader, Budget(50, 64), False, Depth(rows=12)).rows  # of 32 shards, the first three when scattered
    assert [shard for _, shard, _ in rows] == [0] * 5 + [10] * 5 + [20] * 5
    monkeypatch.setattr(reporting, "KEPT_OPEN", 6)  # without a folder no more is looked at than is remembered
    assert data_report(reader, Budget(50, 64), QUICK).looked == 15
    kept = reader_of(reader.data.model_copy(update={"cache": str(tmp_path / "index")}), plain, rule, 0)
    whole = data_report(kept, Budget(50, 64), WHOLE)
    assert (whole.exact, whole.looked, whole.examined, whole.training) == (True, 200, 200, 200)
    assert whole.duplicates is not None
    assert whole.duplicates.samples == 200


def test_control_strings_are_counted(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    rows = [
        row("a <|endoftext|> b"),
        row("c"),
        row("d", answer="<|image_pad|>"),
        row("e <|im_end|>"),
    ]  # the last is none of this template's
    reader = reader_of(Data(sources=(write(tmp_path / "rows.json", rows),)), plain, rule, 0)
    assert data_report(reader, Budget(99, 16)).control_strings == 2


def test_answers_outside_the_templates_loss_are_counted(tmp_path: Path, thinking: Encoder, qwen: Encoder, rule: ImageRule) -> None:
    rows = [row("a"), row("b", more=("c", "d", "e", "f"))]
    data = Data(sources=(write(tmp_path / "rows.json", rows),))
    report = data_report(reader_of(data, thinking, rule, 0), Budget(199, 16))
    assert (report.template, report.said, report.not_supervised) == ("qwen3-thinking", 4, 2)
    assert data_report(reader_of(data, qwen, rule, 0), Budget(199, 16)).not_supervised == 0


def test_rejects_are_named_a_few_of_each_cause(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    rows = [row("x", answer=" ") for _ in range(9)] + [row("x", "no.png")]
    report = data_report(reader_of(Data(sources=(write(tmp_path / "rows.json", rows),)), plain, rule, 0), Budget(50, 64))
    assert [(reject.cause, reject.row) for reject in report.rejected] == [
        ("no_target", 0),
        ("no_target", 1),
        ("no_target", 2),
        ("missing_image", 9),
    ]


def test_a_sample_is_shown_as_the_model_sees_it(qwen: Encoder, rule: ImageRule) -> None:
    document = document_of(sample((DOT, "what?\x1b[2J"), "[red]a dot[/red]", system="Be kind."), qwen, rule, [grey_images(rule)])
    start, image, end, answer, rest = pieces_of(document, qwen)
    assert start.text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
    assert (image.image, image.tokens, image.text) == (1, 4, "")
    assert end.text == "<|vision_end|>what?\x1b[2J<|im_end|>\n<|im_start|>assistant\n"
    assert (answer.text, answer.trained) == ("[red]a dot[/red]<|im_end|>", True)
    assert rest.text == "\n"
    assert [piece.trained for piece in (start, image, end, rest)] == [False] * 4
    assert sum(piece.tokens for piece in (start, image, end, answer, rest)) == len(document.tokens_T)


def test_what_is_long_is_shortened_in_the_middle() -> None:
    short = short_pieces((Piece("a" * 10_000 + "end", tokens=5),))[0].text
    assert short == "a" * (LONGEST_PIECE // 2) + " … 8,803 characters … " + "a" * (LONGEST_PIECE // 2 - 3) + "end"
    many = short_pieces(tuple(Piece(str(n), tokens=1) for n in range(1000)))
    assert len(many) == MOST_PIECES + 1
    assert (many[0].text, many[-1].text, sum(piece.tokens for piece in many)) == ("0", "999", 1000)


def test_samples_of_each_source_are_shown(tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule) -> None:
    for n in range(9):
        draw(f"{n}.png", seed=n, width=1000, height=500)
    first = write(tmp_path / "first.json", [row("x", answer=""), *(row(f"{n}", f"{n}.png") for n in range(5))])
    second = write(tmp_path / "second.json", [row("only one")])
    third = write(tmp_path / "third.json", [row("many", *(f"{n}.png" for n in range(9)))])
    reader = reader_of(Data(sources=(first, second, third)), plain, rule, 0)

    def ids(count: int) -> list[str]:
        return [shown.id for shown in sample_previews(reader, Budget(99, 999), count, thumbnails=False)]

    assert ids(0) == []
    assert ids(1) == ["first.json#1", "second.json#0", "third.json#0"]
    assert ids(5) == ["first.json#1", "first.json#2", "first.json#3", "second.json#0", "third.json#0"]
    assert len(ids(99)) == 7
    shown = sample_previews(reader, Budget(99, 999), 3, thumbnails=True)
    assert [(len(s.thumbnails), s.images) for s in shown] == [(1, 1), (0, 0), (4, 9)]
    with Pillow.open(io.BytesIO(shown[0].thumbnails[0])) as small:
        assert (small.format, small.size) == ("JPEG", (THUMBNAIL, THUMBNAIL // 2))
    assert sample_previews(reader, Budget(99, 999), 3, thumbnails=False)[0] == replace(shown[0], thumbnails=())
    held = reader_of(Data(sources=(first,), validation_fraction=0.5), plain, rule, 0)
    training = {f"first.json#{n}" for s, h, n in data_report_rows(held)}
    assert {s.id for s in sample_previews(held, Budget(99, 999), 9, thumbnails=False)} <= training


def data_report_rows(reader: Reader) -> list[tuple[int, int, int]]:
    return reporting.Looked.of(reader, Budget(99, 64), False, QUICK).rows


def test_thumbnails_hold_pixels_and_nothing_else(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    exif = Pillow.Exif()
    exif[0x010E] = "<script>secret</script>"
    Pillow.fromarray(noise).save(tmp_path / "a.jpg", exif=exif, comment=b"secret comment", icc_profile=b"secret profile" * 9)
    source = write(tmp_path / "rows.json", [row("x", "a.jpg")])
    [shown] = sample_previews(reader_of(Data(sources=(source,)), plain, rule, 0), Budget(99, 999), 1, thumbnails=True)
    assert b"secret" in (tmp_path / "a.jpg").read_bytes()
    assert b"secret" not in shown.thumbnails[0]


def test_a_model_without_a_tower_has_text_alone(tmp_path: Path, draw: Callable[..., Path], plain: Encoder) -> None:
    draw("a.png")
    reader = reader_of(Data(sources=(write(tmp_path / "rows.json", [row("x"), row("y", "a.png")]),)), plain, None, 0)
    report = data_report(reader, Budget(50, 0), THOROUGH)
    assert report.rejects == {"image_without_tower": 1}
    assert (report.widths, report.aspects, spread(report.visual)) == (None, None, (0, 0, 0))
    assert report.budgets[0].load.patch == 0
    assert [shown.id for shown in sample_previews(reader, Budget(50, 0), 9, thumbnails=True)] == ["rows.json#0"]


def test_videos_are_measured_and_shown(
    tmp_path: Path, draw: Callable[..., Path], tokenizers: dict[str, PreTrainedTokenizerFast], rule: ImageRule
) -> None:
    videos = Encoder(tokenizers["qwen3"], TEMPLATES["qwen3"])
    video_rule = replace(rule, resize=Area(16**2, 64**2), frames=2, positions="grid", video=VideoLimits(16**2, 64 * 64 * 8))
    for n in range(6):
        draw(f"{n}.png", seed=n, width=64, height=40)
    video = {"video": [f"{n}.png" for n in range(6)], "conversations": row("<video>what?")["conversations"]}
    reader = reader_of(Data(sources=(write(tmp_path / "rows.json", [video, row("x", "0.png")]),)), videos, video_rule, 0)
    report = data_report(reader, Budget(500, 500), THOROUGH)
    assert report.rejects == {}
    assert spread(report.images_per_sample) == (1, 1, 1)
    assert spread(report.widths) == (64, 64, 64)
    assert report.decoded == 6
    shown = sample_previews(reader, Budget(500, 500), 2, thumbnails=True)
    assert [(len(s.thumbnails), s.images) for s in shown] == [(4, 6), (1, 1)]
    assert {piece.image for piece in shown[0].pieces} == {None, 1, 2, 3}  # three slices of two frames


def test_a_sample_that_is_shrunk_is_shown_as_it_is_trained_on(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    rows = [row("a b c " * 20), row("first", more=("second " * 20, "gone"))]
    source = write(tmp_path / "rows.json", rows)
    reader = reader_of(Data(sources=(source,), overlong="drop_turns"), plain, rule, 0)
    [shown] = sample_previews(reader, Budget(20, 64), 9, thumbnails=False)
    assert shown.id == "rows.json#1"
    assert "".join(piece.text for piece in shown.pieces) == "first\nyes<|endoftext|>"


def test_prepared_data_are_shown_as_their_sources(tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule) -> None:
    for n in range(6):
        draw(f"{n}.png", seed=n)
    source = write(tmp_path / "rows.json", [*(row(f"q {n}", f"{n % 6}.png") for n in range(24)), row("x", answer="")])
    data = Data(sources=(source,), validation_fraction=0.3, max_reject_rate=1.0)
    reader = reader_of(data, plain, rule, 0, tmp_path / "run")
    pack_offline(reader, Budget(60, 64), tmp_path / "prepared")
    other = reader_of(data.model_copy(update={"prepared": str(tmp_path / "prepared")}), plain, rule, 0)
    mine, theirs = (data_report(r, Budget(60, 64), THOROUGH) for r in (reader, other))
    mine_peers, their_peers = mine.duplicates, theirs.duplicates
    assert mine_peers is not None and their_peers is not None
    # an image is stored with each of its rows there, and found in as many places
    apart = {"duplicates": None, "rejected": (), "unusual": {}, "decoded": 0, "sources": ()}
    assert replace(theirs, **apart) == replace(mine, **apart)
    assert replace(theirs.sources[0], why="") == replace(mine.sources[0], why="")
    assert theirs.sources[0].why.endswith(mine.sources[0].why)
    assert (their_peers.samples, their_peers.equal_samples) == (mine_peers.samples, mine_peers.equal_samples)
    assert their_peers.overlaps[0].equal_images == mine_peers.overlaps[0].equal_images == 0
    seen, again = (sample_previews(r, Budget(60, 64), 9, thumbnails=True) for r in (reader, other))
    assert [(s.id, s.pieces, s.thumbnails) for s in seen] == [(s.id, s.pieces, s.thumbnails) for s in again]
