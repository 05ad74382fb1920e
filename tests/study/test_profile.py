"""`eyeline profile`: a trace that is made up, whose times are known, and a real one that adds up."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import Refused
from eyeline.study.profile import profile_recipe
from eyeline.study.trace import Key, covered, kind_of, memory_timeline, spent_in
from tests.train.recipe import tiny_run


def span(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    names = {"sequence": "Sequence number", "external": "External id"}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid, "args": {names[k]: v for k, v in args.items()}}


def mark(name: str, ts: float, dur: float) -> dict[str, Any]:
    return span(name, ts, dur, "user_annotation")


EVALUATE = "autograd::engine::evaluate_function: "
STEP = [
    mark("step 3", 100, 100),
    mark("part language", 110, 30),
    span("aten::linear", 110, 10, sequence=7),
    span("aten::addmm", 112, 6, sequence=7, external=1),
    mark("part head", 130, 8),
    span("aten::log_softmax", 131, 5, sequence=8),
    span(EVALUATE + "LogSoftmaxBackward0", 150, 4, sequence=8),
    span(EVALUATE + "AddmmBackward0", 155, 10, sequence=7),
    span("aten::mm", 156, 8, external=2),
    mark("Optimizer.step#AdamW.step", 180, 10),
    span("aten::_fused_adamw_", 182, 6),
    span("aten::mm", 300, 50),  # after the step
    span("aten::mm", 110, 50, tid=2),  # of another thread
]


def test_each_moment_belongs_to_one_operator_part_and_pass() -> None:
    found = spent_in(STEP)
    assert found.operators == {
        Key("language", "forward", "products"): 10,  # 4 of linear's own, 6 of addmm
        Key("head", "forward", "loss"): 5,
        Key("head", "backward", "autograd"): 4,
        Key("language", "backward", "autograd"): 2,
        Key("language", "backward", "products"): 8,
        Key("–", "optimizer", "optimizer"): 6,
    }
    assert (found.total, found.host) == (100, 100 - 35)
    assert sum(found.operators.values()) + found.host == found.total


def test_kernels_belong_to_the_operator_that_asked_for_them() -> None:
    kernels = [
        span("gemm", 115, 20, "kernel", 9, external=1),
        span("gemm", 130, 20, "kernel", 9, external=2),
        span("k", 400, 9, "kernel", 9),
    ]
    found = spent_in([*STEP, *kernels])
    assert found.device == {Key("language", "forward", "products"): 20, Key("language", "backward", "products"): 20}
    assert found.device_idle == 100 - 35  # 115 to 150 is covered
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4


def test_a_backward_pass_may_run_on_a_thread_of_its_own() -> None:
    """As with a GPU, whose streams also have a copy of the step's range."""
    moved = [event | {"tid": 3} if event["ts"] in (150, 155, 156) else event for event in STEP]
    kernel = span("gemm", 160, 20, "kernel", 9, external=2)
    found = spent_in([span("step 3", 112, 140, "gpu_user_annotation", 9), *moved, kernel])
    assert found.operators == spent_in(STEP).operators and found.total == 100
    assert found.device == {Key("language", "backward", "products"): 20}


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "products"),
        ("aten::_grouped_mm", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm", "norms"),
        ("aten::_to_copy", "copies"),
        ("aten::silu", "pointwise"),
        ("aten::sort", "other"),
    ],
)
def test_operators_have_a_class(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind


def test_memory_is_what_is_more_than_at_the_start() -> None:
    events = [{"name": "[memory]", "ts": ts, "args": {"Bytes": size}} for ts, size in ((3000, -40), (1000, 100), (2500, 60))]
    assert memory_timeline(events) == [(0.0, 100), (1.5, 160), (2.0, 120)]


def test_a_real_profile_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_recipe(tiny_run(tmp_path), "whole", warm_up=1, steps=2, out=tmp_path / "profile")
    found = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert (len(found["step_s_profiled"]), len(found["step_s_unprofiled"])) == (2, 2)
    assert sum(row["seconds"] for row in found["operators"]) + found["host_s"] == pytest.approx(found["profiled_s"])
    worked = {(row["part"], row["work"]) for row in found["operators"] if row["kind"] == "products"}
    assert worked >= {(part, work) for part in ("vision", "projector", "language") for work in ("forward", "backward")}
    assert ("head", "forward") in worked and found["memory"]["peak_bytes_over_start"] > 0
    said = capsys.readouterr().out
    assert "by part and pass" in said and "without it" in said
    with pytest.raises(Refused, match="is not empty"):
        profile_recipe(tiny_run(tmp_path), None, 1, 1, tmp_path / "profile")
    with pytest.raises(Refused, match="the recipe has whole, adapt"):
        profile_recipe(tiny_run(tmp_path), "tune", 1, 1, tmp_path / "other")
