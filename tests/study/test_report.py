"""The report of made-up run folders whose figures are known by hand."""

import base64
import json
import math
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import Refused
from eyeline.evals.result import Asked, Blind, Result, Score, write_result
from eyeline.study.history import LINE_LIMIT, read_history, read_rejects
from eyeline.study.plots import Curve, plot, thin
from eyeline.study.report import write_report

PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG made up").decode()


def step_line(global_step: int, **changed: Any) -> dict[str, Any]:
    """100 slots, 90 real tokens, 10 supervised, one second of which a quarter is data wait."""
    line: dict[str, Any] = {
        "kind": "step", "stage": "align", "stage_index": 0, "step": global_step, "global_step": global_step, "loss": 2.0,
        "lr": {"projector": 1e-3}, "grad_norm": 1.0, "applied": True, "slots": 100, "real": 90, "visual": 32, "text": 58, "supervised": 10,
        "documents": 4, "images": 2, "patches": 128, "real_tokens_per_s": 90.0, "step_s": 1.0, "data_wait_s": 0.25, "compute_s": 0.5,
        "checkpoint_s": 0.125, "validation_s": 0.0625, "other_s": 0.0625, "padding": 0.1, "memory_bytes": 2**30, "attempt": 1,
        "wall": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return line | changed


def write_lines(path: Path, lines: list[dict[str, Any]], tail: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def score(correct: int, questions: int) -> Score:
    return Score(questions=questions, correct=correct, accuracy=correct / questions)


def result(**changed: Any) -> Result:
    asked = Asked(id="q#1", kind="color", question="which colour?", answer="red", prediction="blue", correct=False, pictures=(PNG,))
    fields: dict[str, Any] = {
        "accuracy": 0.75, "questions": 4, "overall": score(3, 4), "by_kind": {"color": score(1, 2), "shape": score(2, 2)},
        "blind": Blind(how="majority", overall=score(1, 4), by_kind={"color": score(0, 2), "shape": score(1, 2)}),
        "rejected": {}, "cut": 0, "max_tokens": 8, "seconds": 1.0, "stamps": {"checkpoint": "step-6"}, "samples": (asked,),
    }  # fmt: skip
    return Result(**(fields | changed))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    lines: list[dict[str, Any]] = [{"kind": "start", "hardware": "a machine", "torch": "2.13.0", "commit": "abc"}]
    lines += [step_line(i) for i in range(1, 4)]
    tuned = {"stage": "tune", "stage_index": 1, "loss": 1.0, "supervised": 30, "lr": {"projector": 1e-3, "language": 1e-4}}
    lines += [step_line(i, step=i - 3, **tuned) for i in range(4, 7)]
    lines += [{"kind": "validation", "stage": "tune", "global_step": 6, "loss": 1.5, "supervised": 40}]
    write_lines(folder / "metrics.jsonl", lines)
    return folder


class Page(HTMLParser):
    """What a browser would make of the page: tags, attributes and visible text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.hidden = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.hidden = tag == "style"

    def handle_endtag(self, _tag: str) -> None:
        self.hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self.hidden else data + "\n"


def report(run: Path) -> Page:
    return Page(write_report(run).read_text("utf-8"))


def test_a_resume_replaces_steps_and_its_lost_work_stays_in_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    again = [step_line(2, loss=7.0, attempt=2), step_line(3, attempt=2)]
    write_lines(path, [{"kind": "start"}, step_line(1), step_line(2), step_line(3), {"kind": "start"}, *again])
    history = read_history(path)
    assert [(s.global_step, s.attempt, s.loss) for s in history.steps] == [(1, 1, 2.0), (2, 2, 7.0), (3, 2, 2.0)]
    assert (history.done_twice, len(history.starts), history.unreadable) == (2, 2, 0)
    assert history.spent_s == {"compute": 2.5, "data_wait": 1.25, "checkpoint": 0.625, "validation": 0.3125, "other": 0.3125}


@pytest.mark.parametrize(
    ("bad", "unreadable"),
    [
        ('{"kind": "step", "st', 0),  # torn at the end: what a kill leaves, and no fault
        ('{"kind": "step", "st' + json.dumps(step_line(9)) + "\n", 1),  # torn, and then written on after a resume
        ("\x00\x01\x02\n", 1),
        ("[1, 2]\n", 1),
        ('{"kind": "step"}\n', 1),
        ('{"kind": "other"}\n', 1),
        ("x" * (2 * LINE_LIMIT + 5) + "\n", 1),
        ("[" * 100_000 + "\n", 1),
    ],
)
def test_bad_lines_are_counted_and_the_rest_is_read(tmp_path: Path, bad: str, unreadable: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(1)], tail=bad)
    with open(path, "a") as file:
        file.write("" if not bad.endswith("\n") else json.dumps(step_line(2)) + "\n")
    history = read_history(path)
    assert history.unreadable == unreadable
    assert [s.global_step for s in history.steps] == ([1, 2] if bad.endswith("\n") else [1])


def test_a_loss_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(1), step_line(2, loss=math.nan, grad_norm=math.inf, applied=False)])
    history = read_history(path)
    assert [(s.loss, s.grad_norm) for s in history.steps] == [(2.0, 1.0), (None, None)]
    assert history.unreadable == 0


def test_bytes_that_are_no_text_are_one_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\xff\xfe\xff\n" + json.dumps(step_line(1)).encode() + b"\n")
    assert (read_history(path).unreadable, len(read_history(path).steps)) == (1, 1)


def test_thinning_weighs_by_tokens_and_keeps_the_extremes() -> None:
    # two values of 1 and 4 over 30 and 10 tokens: (30 + 40) / 40
    thinned = thin(Curve("loss", [1, 2, 3, 4, 5], [1.0, 4.0, None, 5.0, None], weight=[30, 10, 99, 1, 1]), points=3)
    assert thinned.x == [1.5, 3.5, 5.0]
    assert thinned.mean[:2] == [1.75, 5.0]
    assert math.isnan(thinned.mean[2])
    assert (thinned.low[:2], thinned.high[:2]) == ([1.0, 5.0], [4.0, 5.0])


def test_plots_are_reproducible_and_obey_no_markup_in_names() -> None:
    curves = [Curve("$\\frac{$", [1, 2], [1.0, 2.0]), Curve("b", [1, 2], [2.0, None])]
    first, second = (plot(curves, "loss", [(1, "$x^{$")]) for _ in range(2))
    assert first == second
    assert "$\\frac{$" in first
    assert "$x^{$" in first


def test_the_figures_are_the_hand_computed_ones(run: Path) -> None:
    write_result(run / "eval.json", result())
    text = report(run).text
    rows = text.split("\n")
    shown = dict(pairwise(rows[:40]))
    assert shown["steps"] == "6"
    assert shown["training loss, last 20 steps"] == "1.25"  # three steps of 2.0 over 10 tokens, three of 1.0 over 30
    assert shown["real tokens/s, full step wall time"] == "90"
    assert shown["real tokens trained on"] == "540"
    assert shown["padding, share of slots"] == "10.0 %"
    assert shown["validation loss, best"] == "1.5"
    assert shown["exact match, held-out questions"] == "75.0 %"
    at = rows.index("tune")
    assert rows[at : at + 11] == ["tune", "3", "1", "270", "90", "6", "–", "90", "10.0 %", "25.0 %", "1.00"]
    at = rows.index("color")
    assert rows[at : at + 4] == ["color", "2", "50.0 %", "0.0 %"]
    assert "checkpoint: step-6" in rows
    at = rows.index("data wait", rows.index("cause"))
    assert rows[at : at + 3] == ["data wait", "1.5 s", "25.0 %"]


def test_the_page_is_self_contained_and_has_no_script(run: Path) -> None:
    write_result(run / "eval.json", result())
    page = report(run)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert page.tags.count("img") == 7  # six plots, one sample
    assert all((value or "").startswith("data:image/") for name, value in page.attributes if name in ("src", "href", "srcset"))
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_markup_in_any_file_is_shown_as_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    run = tmp_path / "<b onclick=x>"
    run.mkdir()
    start = {"kind": "start", evil: evil, "data": {evil: evil}}
    write_lines(run / "metrics.jsonl", [start, step_line(1, stage=evil, lr={evil: 1.0})])
    write_lines(run / "rejects.jsonl", [{"id": evil, "file": evil, "row": 3, "field": evil, "cause": evil, "message": evil}])
    (run / "recipe.yaml").write_text(f"name: {evil}\n")
    (run / "env.json").write_bytes(b"\xff" + evil.encode())
    pictures = (PNG, evil, "data:image/svg+xml;base64,AAAA")
    asked = Asked(id=evil, kind=evil, question=evil, answer=evil, prediction=evil, correct=False, pictures=pictures)
    by_kind = {evil: score(1, 2)}
    blind = Blind(how=evil, overall=score(1, 2), by_kind=by_kind)
    write_result(run / "eval.json", result(samples=(asked,), rejected={evil: 1}, by_kind=by_kind, blind=blind))
    page = report(run)
    assert not {"script", "b onclick=x"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.tags.count("img") == 7  # the pictures that are no PNG or JPEG are left out
    assert page.text.count(evil) >= 15


def test_what_is_missing_or_broken_is_said_and_the_rest_is_shown(run: Path) -> None:
    (run / "eval.json").write_text('{"version": 2}')
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step_line(7, loss=None, grad_norm=None, applied=False)) + "\n" + json.dumps({"kind": "start"}) + "\n{\n{torn")
    text = report(run).text
    assert "no evaluation of version 1: version" in text
    assert "1 steps had a loss or gradient that was not finite" in text
    assert "1 lines of metrics.jsonl could not be read" in text
    assert "started 2 times; 0 steps were done again" in text


def test_rejects_are_counted_by_cause(tmp_path: Path) -> None:
    write_lines(tmp_path / "rejects.jsonl", [{"id": str(i), "cause": "truncated" if i % 3 else "bomb"} for i in range(30)], tail='{"id"')
    summary = read_rejects(tmp_path / "rejects.jsonl", show=5)
    assert summary.by_cause == (("truncated", 20), ("bomb", 10))
    assert [line["id"] for line in summary.first] == ["0", "1", "2", "3", "4"]
    assert read_rejects(tmp_path / "absent").by_cause == ()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start"}\n')
    with pytest.raises(Refused, match="no step yet"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_arithmetic_by_part_and_its_share_of_the_peak(tmp_path: Path) -> None:
    """3 TFLOP in 1 s at 30 % of the peak, then 3 TFLOP in 3 s at 10 %: 1.5 TFLOP/s, and 15 % over the whole time."""
    lines = [
        step_line(n, flops={"vision": 10**12, "head": 2 * 10**12}, flops_recomputed=5, flops_per_s=3e12 / s, mfu=0.3 / s, step_s=s)
        for n, s in ((1, 1.0), (2, 3.0))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    text = report(tmp_path).text
    assert "1.5 T" in text and "6 T" in text and "15.0 %" in text
    assert "flops" not in read_history(tmp_path / "metrics.jsonl").spent_s
    write_lines(tmp_path / "metrics.jsonl", [step_line(1)])
    assert "MFU" not in report(tmp_path).text, "a run of an older version has none"
