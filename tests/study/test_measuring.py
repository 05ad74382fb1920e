"""The worked example of docs/measuring.md, recomputed: its formulas, and what Eyeline makes of the same step, log and pairs."""

import re
from pathlib import Path

import pytest

from eyeline.core.batch import Counts
from eyeline.models.flops import NONE, Flops
from eyeline.study.compare import Varied, verdict
from eyeline.study.ledger import ledger_of
from eyeline.study.pairs import ratio_of
from eyeline.train.step import Report
from tests.study.test_ledger import Log, seconds
from tests.train.figures import step_figures

TEXT = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text(encoding="utf-8").partition("# Measuring a run")[2]
FORMULA = re.compile(r"[\d.,+\-*/() ]+")


def table() -> dict[str, tuple[str, float]]:
    rows = re.findall(r"^\| ([\w/ ]+) \| ([^|]+) \| ([\d.]+) \|", TEXT, re.MULTILINE)
    return {name: (formula, float(value)) for name, formula, value in rows}


def test_each_formula_has_its_value() -> None:
    assert len(table()) == 7
    for name, (formula, value) in table().items():
        assert FORMULA.fullmatch(formula), name
        assert eval(formula) == pytest.approx(value, rel=1e-3), name  # digits and operators alone
    for formula, value in re.findall(r"([\d.+*/() ]{9,}) = ([\d.]+)", TEXT):
        assert eval(formula) == pytest.approx(float(value), rel=1e-3), formula


def test_a_step_of_these_numbers_has_these_figures() -> None:
    tera = 10**12
    forward = dict(zip(NONE.forward, (0, 0, 0, 0), strict=True))
    parts = {"vision": 1_200_000_000_000, "projector": tera // 10, "language": 5_200_000_000_000, "head": 300_000_000_000}
    counts = Counts(slots=8192, real=7600, visual=3000, text=4600, supervised=1900, documents=9, images=9, patches=12_000)
    spent = {"step": 2.0, "data_wait": 0.3, "compute": 1.6, "other": 0.1}
    flops = Flops(forward, parts, 1_700_000_000_000)  # type: ignore[arg-type]  # the names of parts
    line = step_figures(flops=flops, peak=10.0 * tera, seconds=spent, report=Report(1.0, 1.0, "applied", counts)).line()
    wanted = {name: value for name, (_, value) in table().items()}
    assert line["padding"] == pytest.approx(wanted["padding"], abs=5e-5)
    assert line["real_tokens_per_s"] == wanted["tokens per second"]
    assert line["supervised"] / line["step_s"] == wanted["supervised tokens per second"]
    assert line["flops_per_s"] / tera == pytest.approx(wanted["model FLOP/s"])
    assert (line["mfu"], line["hfu"]) == (pytest.approx(wanted["MFU"]), pytest.approx(wanted["HFU"]))
    assert line["data_wait_s"] / line["step_s"] == pytest.approx(wanted["data wait"])


def test_the_ledger_of_the_example_is_the_one_told() -> None:
    log = Log()
    log.launch(startup=10)
    log.step(1, startup=10, compute=5)
    log.step(2, compute=5, checkpoint=2)
    log.step(3, compute=5)
    log.time += 20
    log.launch(startup=10, resumed_from=2)
    log.step(3, startup=10, compute=5)
    log.step(4, compute=5)
    found = ledger_of(log.lines)
    assert seconds(found) == {"startup": 20.0, "compute": 20.0, "checkpoint": 2.0, "lost_work": 5.0, "down_time": 20.0}
    assert found.wall_s == pytest.approx(67) and found.goodput == pytest.approx(0.2985, abs=5e-5)


def test_the_pairs_of_the_example_have_the_interval_told() -> None:
    found = ratio_of([1.0] * 5, [0.90, 0.94, 0.92, 0.97, 0.88])
    low, high = found.interval
    told = (
        f"{found.mean:.4f}",
        f"{found.ratio:.4f}",
        f"{found.sd:.4f}",
        f"{low:.4f} to {high:.4f}",
        f"{found.smallest_effect * 100:.1f} %",
    )
    for number in told:
        assert number in TEXT, number
    assert verdict(Varied("k", ("a", "b")), "b", found).startswith("k=b takes 7.9% less time than k=a")
