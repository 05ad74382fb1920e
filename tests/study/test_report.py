"""The report of made-up run folders whose figures are known by hand."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import Refused
from eyeline.data.rejects import CAUSES, REMEDIES
from eyeline.evals.result import Asked, Result, Score, TextOnly, write_result
from eyeline.study import plots
from eyeline.study.history import LINE_LIMIT, read_history, read_rejects
from eyeline.study.plots import Curve, plot, smooth, thin, together
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
    asked = Asked(id="q#1", kind="color", question="which colour?", answer="red", prediction="blue", correct=False, images=(PNG,))
    fields: dict[str, Any] = {
        "accuracy": 0.75, "questions": 4, "overall": score(3, 4), "by_kind": {"color": score(1, 2), "shape": score(2, 2)},
        "text_only": TextOnly(how="majority", overall=score(1, 4), by_kind={"color": score(0, 2), "shape": score(1, 2)}),
        "rejected": {}, "cut": 0, "max_new_tokens": 8, "seconds": 1.0, "stamps": {"checkpoint": "step-6"}, "samples": (asked,),
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


def test_resume_replaces_steps_and_keeps_lost_work_in_ledger(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    again = [step_line(2, loss=7.0, attempt=2), step_line(3, attempt=2)]
    write_lines(path, [{"kind": "start"}, step_line(1), step_line(2), step_line(3), {"kind": "start"}, *again])
    history = read_history(path)
    assert [(s.global_step, s.attempt, s.loss) for s in history.steps] == [(1, 1, 2.0), (2, 2, 7.0), (3, 2, 2.0)]
    assert (history.lost, len(history.starts), history.unreadable) == (2, 2, 0)
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


def after(rows: list[str], name: str, start: str = "") -> str:
    """The line that follows a name, from a line on."""
    return rows[rows.index(name, rows.index(start) if start else 0) + 1]


def test_the_figures_are_the_hand_computed_ones(run: Path) -> None:
    write_result(run / "eval.json", result())
    rows = report(run).text.split("\n")
    shown = dict(pairwise(rows[: rows.index("What was trained")]))
    assert shown["training loss, last 3 steps of stage tune"] == "1"  # not those of the stage before it, which has other data
    assert shown["tokens/s"] == "90"
    assert shown["tokens trained on"] == "540"
    assert shown["padding"] == "10.0%"
    assert shown["validation loss at the end of stage tune"] == "1.5"
    assert shown["exact match, questions held out"] == "75.0%"
    tune = rows[rows.index("stage tune") : rows.index("Curves")]
    assert after(tune, "tokens") == "270, of them 90 supervised"
    assert after(tune, "images encoded") == "6"
    assert after(tune, "speed") == "90 tokens/s, 10.0% padding, 25.0% data wait"
    assert after(tune, "peak memory") == "1.00 GiB"
    assert after(rows, "training loss, last 3 steps", "stage align") == "2"
    at = rows.index("color")
    assert rows[at : at + 4] == ["color", "2", "50.0%", "0.0%"]
    assert "checkpoint step-6" in rows
    at = rows.index("data wait", rows.index("cause"))
    assert rows[at : at + 3] == ["data wait", "1.5 s", "25.0%"]


def test_headline_is_of_the_last_stage(run: Path) -> None:
    """0.25 of another stage, with other data, is not the loss of the model that came out; nor is the best of a stage its last."""
    with open(run / "metrics.jsonl", "a") as file:
        for step, stage, loss in ((2, "align", 0.25), (3, "align", 0.5), (4, "tune", 1.25)):
            file.write(json.dumps({"kind": "validation", "stage": stage, "global_step": step, "loss": loss, "supervised": 40}) + "\n")
    rows = report(run).text.split("\n")
    assert after(rows, "validation loss at the end of stage tune") == "1.5"
    assert not [row for row in rows[: rows.index("What was trained")] if row in ("0.25", "0.5", "1.25")]
    assert after(rows, "validation loss", "stage align") == "0.5, best 0.25 at step 2"
    assert after(rows, "validation loss", "stage tune") == "1.5, best 1.25 at step 1"


def test_a_last_stage_without_validation_has_no_headline_of_it(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [line | {"stage": "align"} if line["kind"] == "validation" else line for line in lines])
    rows = report(run).text.split("\n")
    assert not [row for row in rows[: rows.index("What was trained")] if "validation" in row]


def test_curves_are_broken_between_stages(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation points of two stages are not joined, nor are any steps."""
    drawn: list[Curve] = []
    monkeypatch.setattr(plots, "plot", lambda curves, *_: drawn.extend(curves) or "<svg/>")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "validation", "stage": "align", "global_step": 3, "loss": 0.5, "supervised": 40}) + "\n")
    report(run)
    pieces = {curve.name: [list(zip(piece.x, piece.y, strict=True)) for piece in curve.pieces()] for curve in drawn}
    assert pieces["validation"] == [[(3, 0.5)], [(6, 1.5)]]
    assert pieces["each step"] == [[(1, 2.0), (2, 2.0), (3, 2.0)], [(4, 1.0), (5, 1.0), (6, 1.0)]]
    assert all(len(of) == 2 for of in pieces.values())


def test_evaluation_of_an_earlier_checkpoint_is_marked(run: Path) -> None:
    write_result(run / "eval.json", result(stamps={"checkpoint": "step-00000003-0a1b"}))
    assert "The evaluation is of the checkpoint after step 3, and the run has 6 steps." in report(run).text
    write_result(run / "eval.json", result(stamps={"checkpoint": "step-00000006-0a1b"}))
    assert "The evaluation is of" not in report(run).text


def test_steps_that_a_resume_has_thrown_away_are_not_reported(run: Path) -> None:
    """The checkpoint of step 4 is what the run now stands on: of steps 5 and 6 and their validation nothing came out."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "start", "resumed_from": 4}) + "\n")
        file.write(json.dumps(step_line(5, step=2, stage="tune", stage_index=1, loss=8.0, supervised=30)) + "\n")
    history = read_history(run / "metrics.jsonl")
    assert ([s.global_step for s in history.steps], history.validations, history.lost) == ([1, 2, 3, 4, 5], (), 2)
    assert history.spent_s["compute"] == 3.5, "lost work took its time too"
    text = report(run).text
    assert "The run was started 2 times; 2 steps after the last checkpoint were lost." in text
    assert after(text.split("\n"), "training loss, last 2 steps of stage tune") == "4.5"


def test_what_each_stage_trained_is_shown(run: Path) -> None:
    part = {"part": "language", "parameters": 8_190_735_360, "trained": 43_646_976, "how": "LoRA r 16", "lr": 1e-4}
    frozen = {"part": "vision", "parameters": 411_000_000, "trained": 0, "how": "frozen", "lr": None}
    known = {"path": "a.json", "layout": "llava", "samples": 1_000, "exact": True, "held_out": 50}
    guess = {"path": "b", "layout": "openai", "samples": 2_000_000, "exact": False, "held_out": None}
    line = {
        "kind": "stage", "stage": "tune", "stage_index": 1, "steps": 5, "epochs": None, "family": "qwen3_vl", "model": "models/x",
        "parts": [frozen, part], "sources": [known, guess], "validation": [], "optimizer": "adamw", "schedule": "cosine",
        "batch": {"max_tokens": 4096, "max_patches": 8192, "packs_per_step": 8},
    }  # fmt: skip
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    rows = report(run).text.split("\n")
    assert "qwen3_vl, from models/x · 8,601,735,360 parameters · 6 steps in 2 stages · a machine" in rows
    tune = rows[rows.index("stage tune") : rows.index("Curves")]
    assert after(tune, "language") == "LoRA r 16, 43,646,976 of 8,190,735,360 parameters, peak lr 0.0001"
    assert after(tune, "vision") == "frozen, 411,000,000 parameters"
    assert after(tune, "data 1") == "a.json (llava, 1,000 samples, 50 more held out)"
    assert after(tune, "data 2") == "b (openai, about 2,000,000 samples)"
    assert after(tune, "batch") == "8 × up to 4,096 tokens and 8,192 patches"
    assert after(tune, "steps") == "3 of 5"


def test_a_step_without_supervised_tokens_is_a_gap_and_no_failure(run: Path) -> None:
    """Also as older versions wrote it: with a loss of 0."""
    with open(run / "metrics.jsonl", "a") as file:
        for step, loss in ((7, None), (8, 0.0)):
            idle = {"loss": loss, "grad_norm": 0.0, "supervised": 0, "applied": False, "outcome": "no targets"}
            file.write(json.dumps(step_line(step, step=step - 3, stage="tune", stage_index=1, **idle)) + "\n")
    history = read_history(run / "metrics.jsonl")
    assert [(s.loss, s.grad_norm) for s in history.steps[-2:]] == [(None, None)] * 2
    rows = report(run).text.split("\n")
    assert "2 steps had no supervised tokens: no loss and no update." in rows
    assert not [row for row in rows if "not finite" in row]
    assert after(rows, "training loss, last 5 steps of stage tune") == "1"


def test_skipped_samples_are_counted_and_explained(run: Path) -> None:
    lines = [
        {"id": f"{n}", "file": "d.json", "row": n, "field": "image", "cause": "missing_image", "message": f"no {n}"} for n in range(25)
    ]
    write_lines(run / "rejects.jsonl", lines)
    rows = report(run).text.split("\n")
    assert after(rows, "samples skipped") == "25"
    at = rows.index("missing_image")
    assert rows[at : at + 4] == ["missing_image", "25", CAUSES["missing_image"], REMEDIES["missing_image"]]
    assert rows.index("Samples that were skipped") < at < rows.index("Where the time went")
    assert "no 19" in rows and "no 20" not in rows


def test_report_order_wrong_answers_first_environment_last(run: Path) -> None:
    def asked(id: str, correct: bool) -> Asked:
        return Asked(id=id, kind="k", question="q", answer="a", prediction="a" if correct else "b", correct=correct, images=())

    (run / "recipe.yaml").write_text("name: x\n")
    drawn, wrong = (asked("r1", True), asked("w1", False), asked("r2", True), asked("w9", False)), (asked("w1", False), asked("w2", False))
    write_result(run / "eval.json", result(samples=drawn, wrong=wrong))
    page = report(run)
    cards = [row.removeprefix("k · ") for row in page.text.split("\n") if row.startswith("k · ")]
    assert cards == ["w1", "w2", "w9", "r1", "r2"], "each once"
    order = ["What was trained", "Curves", "Evaluation", "Wrong answers: 1 of 4", "Where the time went", "Settings and environment"]
    at = [page.text.index(f"{title}\n") for title in order]
    assert at == sorted(at)
    assert page.text.index("hardware") > at[-1] and page.text.index("name: x") > at[-1]
    assert page.tags.count("details") == 2
    assert not [name for name, _ in page.attributes if name == "open"]


def test_equal_curves_are_one_under_all_their_names() -> None:
    a, b, c = (Curve(name, [1, 2], y) for name, y in (("a", [1.0, 2.0]), ("b", [1.0, 3.0]), ("c", [1.0, 2.0])))
    assert [(curve.name, curve.dashed) for curve in together([a, b, c])] == [("a, c", False), ("b", True)]


def test_smoothing_weighs_by_tokens_and_starts_anew_in_each_stage() -> None:
    """(1·10 + 4·30) / 40, then 4 and 2 over 30 and 10; a gap stays one, and the first of the next stage stands alone."""
    curve = Curve("loss", [1, 2, 3, 4, 5], [1.0, 4.0, None, 2.0, 9.0], weight=[10, 30, 99, 10, 1], piece=["a", "a", "a", "a", "b"])
    assert smooth(curve, 2).y == [1.0, 3.25, None, 3.5, 9.0]


def test_plots_over_the_same_steps_stand_exactly_one_below_the_other() -> None:
    """Whatever their labels and values: the same place of the axis, and the same steps at its ends."""
    places = []
    for values, label, epochs in (([0.001, 2e9], "a long label", []), ([1.0, 2.0], "b", [(1, "0.5"), (9, "1")])):
        svg = plot([Curve("x", [1, 9], values)], label, [], False, (1, 9), epochs)
        lines = [re.findall(r"[ML] ([\d.]+) ", path) for path in re.findall(r'<path d="([^"]*)" clip-path', svg)]
        places.append(lines[-1])
    assert places[0] == places[1] and len(places[0]) == 2


def test_numbers_of_axes_have_separators() -> None:
    svg = plot([Curve("x", [1, 25_000], [0.0, 30_000.0])], "y")
    for shown in (">20,000<", ">30,000<"):  # of the steps, and of the values
        assert shown in svg
    assert ">2.5M<" in plot([Curve("x", [1, 2], [0.0, 2.5e6])], "y")


def test_the_page_is_self_contained_and_has_no_script(run: Path) -> None:
    write_result(run / "eval.json", result())
    page = report(run)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert page.tags.count("img") == page.tags.count("source") + 1 == 7  # six plots, each for two widths, and one sample
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
    images = (PNG, evil, "data:image/svg+xml;base64,AAAA")
    asked = Asked(id=evil, kind=evil, question=evil, answer=evil, prediction=evil, correct=False, images=images)
    by_kind = {evil: score(1, 2)}
    text_only = TextOnly(how=evil, overall=score(1, 2), by_kind=by_kind)
    write_result(run / "eval.json", result(samples=(asked,), rejected={evil: 1}, by_kind=by_kind, text_only=text_only))
    page = report(run)
    assert not {"script", "b onclick=x"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.tags.count("img") == 7  # the images that are no PNG or JPEG are left out
    assert page.text.count(evil) >= 15


def test_missing_or_broken_files_are_named_and_the_rest_is_shown(run: Path) -> None:
    (run / "eval.json").write_text('{"version": 1}')
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step_line(7, loss=None, grad_norm=None, applied=False)) + "\n" + json.dumps({"kind": "start"}) + "\n{\n{torn")
    text = report(run).text
    assert "not an evaluation of version 2: version" in text
    assert "1 step had a loss or gradient that was not finite" in text
    assert "1 line of metrics.jsonl could not be read" in text
    assert "started 2 times; 0 steps after the last checkpoint were lost" in text


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
    assert "1.5 T" in text and "6 T" in text and "15.0%" in text
    assert "flops" not in read_history(tmp_path / "metrics.jsonl").spent_s
    write_lines(tmp_path / "metrics.jsonl", [step_line(1)])
    assert "MFU" not in report(tmp_path).text, "a run of an older version has none"
