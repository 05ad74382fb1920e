"""What check says about data, against counts made by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from eyeline.core.batch import Budget
from eyeline.core.facts import ImageRule
from eyeline.data.documents import document_of
from eyeline.data.images import grey
from eyeline.data.loader import Reader
from eyeline.data.report import TRAINED, Spread, data_report, first_documents, render_sample
from eyeline.data.sets import Data
from eyeline.data.sources import Source
from eyeline.data.tokenizer import Encoder
from tests.data.made import DOT, sample
from tests.data.test_loader import row


def test_a_report_by_hand(tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule) -> None:
    draw("wide.png", width=40, height=30)
    Pillow.fromarray(np.zeros((30, 30, 4), np.uint8)).save(tmp_path / "clear.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "wide.png").read_bytes()[:300])
    rows = [
        row("ab", answer="c"),
        row("", "wide.png", answer="abc"),
        row("", "clear.png", "clear.png", answer="ab"),
        row("x", "cut.png"),
        row("x", "absent.png"),
        row("x", answer=" "),
        {"conversations": []},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    reader = Reader(Data(sources=(Source(path=str(tmp_path / "rows.json"), repeat=2),)), plain, rule, 0)
    report = data_report(reader, Budget(50, 64))
    length = [len(plain.ids(t)) for t in ("ab\n", "\n", "c", "abc", "ab")]
    tokens = sorted([length[0] + length[2] + 1, 4 + length[1] + length[3] + 1, 8 + length[1] + length[4] + 1])
    assert report.tokens == Spread(tokens[0], tokens[1], tokens[2])
    assert report.visual == Spread(0, 4, 8)
    supervised = sorted(n + 1 for n in length[2:])
    assert report.supervised == Spread(supervised[0], supervised[1], supervised[2])
    assert report.rejects == {"no_target": 2, "broken_image": 1, "missing_image": 1}
    assert [r.row for r in report.rejected] == [3, 4, 5, 6]
    assert report.odd == {"transparent (laid over white)": 1}
    assert (report.training, report.validation, report.examined, report.pictures) == (7, 0, 7, 3)
    assert (report.sources[0].layout, report.sources[0].rows, report.sources[0].repeat) == ("llava", 7, 2)
    assert [s.id for s, _ in first_documents(reader, 2)] == ["rows.json#0", "rows.json#1"]
    assert report.control_strings == 0
    assert data_report(reader, Budget(50, 64), examined=3).examined == 3


def test_control_strings_are_counted(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    rows = [
        row("a <|endoftext|> b"),
        row("c"),
        row("d", answer="<|image_pad|>"),
        row("e <|im_end|>"),
    ]  # the last is none of this template's
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    reader = Reader(Data(sources=(Source(path=str(tmp_path / "rows.json")),)), plain, rule, 0)
    assert data_report(reader, Budget(99, 16)).control_strings == 2


def test_a_sample_is_shown_as_the_model_sees_it(qwen: Encoder, rule: ImageRule) -> None:
    document = document_of(sample((DOT, "what?\x1b[2J"), "[red]a dot[/red]", system="Be kind."), qwen, rule, [grey(rule)])
    text = render_sample(document, qwen)
    assert text.plain == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<|vision_start|>[picture 1: 4 tokens]<|vision_end|>"
        "what?\\x1b[2J<|im_end|>\n<|im_start|>assistant\n[red]a dot[/red]<|im_end|>\n"
    )
    trained = [text.plain[span.start : span.end] for span in text.spans if span.style == TRAINED]
    assert trained == ["[red]a dot[/red]<|im_end|>"]
