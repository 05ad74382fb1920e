"""Trackers: what TensorBoard's own reader finds, and that none of them can stop a run."""

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import eyeline.train.loop as loop
from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.fill import load
from eyeline.core.errors import Refused, Stopped
from eyeline.core.files import read_lines
from eyeline.data.images.decode import decode
from eyeline.data.sets import held_out, open_each
from eyeline.evals.exact_match import usable
from eyeline.evals.result import Asked
from eyeline.generate.generate import generate
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.models import spec
from eyeline.train.trackers import tracker as tracker_module
from eyeline.train.trackers import trackers as trackers_module
from eyeline.train.trackers.tracker import InThread, figures_of, pixels
from eyeline.train.trackers.trackers import missing
from tests.train.ends import losses, stopped_at
from tests.train.recipe import tiny_run

VALIDATED = ("validation_steps=2", "validation_samples=2", "logging_steps=1")


def test_tensorboard_has_the_figures_of_every_step_and_the_samples(tmp_path: Path) -> None:
    """Stopped after step 2 and resumed: against metrics.jsonl, and against the images of the data."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tiny_run(tmp_path, "report_to=[tensorboard]", *VALIDATED)
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, {2})
        with pytest.raises(Stopped):
            loop.train(run)
    loop.train(run)
    events = accumulator.EventAccumulator(str(tmp_path / "run/trackers/tensorboard"), {"images": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    for name, kind, field in (
        ("train/loss", "step", "loss"),
        ("train/step_s", "step", "step_s"),
        ("validation/loss", "validation", "loss"),
    ):
        told = [(one.step, one.value) for one in events.Scalars(name)]
        assert told == [(line["global_step"], pytest.approx(line[field])) for line in lines if line["kind"] == kind], name
    assert events.Scalars("train/lr/vision") and events.Scalars("train/flops/head")
    assert "adapt" in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    [image] = [one for one in events.Images("samples/0/image 0") if one.step == 8]
    assert (image.width, image.height) == (14, 18)


def test_samples_are_held_out_questions_with_the_models_answers(tmp_path: Path) -> None:
    """Those of the last validation, against the last checkpoint asked one question at a time."""
    run = tiny_run(tmp_path, *VALIDATED)
    loop.train(run)
    found = json.loads((tmp_path / "run/samples/step-00000008.json").read_text())
    assert (found["stage"], found["global_step"], len(found["answers"])) == ("adapt", 8, 2)
    opened = open_bundle(tmp_path / "run")
    model, described, encoder = load(opened, "cpu", keep_adapters=True).model.eval(), spec(opened.bundle.config), opened.bundle.encoder()
    questions = {one.sample.id: one for one in usable(open_each(run.stages[1].data.sources), Counter())}
    for asked in found["answers"]:
        question = questions[asked["id"]]
        assert held_out(question.rows, question.place, question.sample, 0.2)
        prompt = Prompts(encoder, described.image).prompt(question.sample)
        [answer] = generate(model, described, [prompt], Sampling(max_new_tokens=6), encoder.stop_ids)
        assert encoder.decode(answer.tokens) == asked["prediction"]
        assert [pixels(image).tolist() for image in asked["images"]] == [decode(image).tolist() for image in question.sample.images]
    assert any(asked["images"] for asked in found["answers"])


def test_samples_change_no_loss(tmp_path: Path) -> None:
    """Dropout is on again after the answers, and nothing random was drawn."""
    found = []
    for name, more in (("with", "validation_samples=3"), ("without", "validation_samples=0")):
        run = tiny_run(tmp_path, f"out={tmp_path / name}", "validation_steps=1", more)
        loop.train(run)
        found.append(losses(run))
    assert found[0] == found[1]


class Fails:
    """A tracker that fails in its third line."""

    def __init__(self) -> None:
        self.lines = 0

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self.lines += 1
        if self.lines == 3:
            raise SystemExit("no connection")

    def samples(self, step: int, answers: Sequence[Asked]) -> None: ...

    def close(self) -> None: ...


def test_a_tracker_that_fails_is_said_once_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Fails] = []
    monkeypatch.setattr(loop, "missing", lambda names: [])
    monkeypatch.setattr(trackers_module, "opener", lambda name, about: lambda: made.append(Fails()) or made[-1])
    loop.train(tiny_run(tmp_path, "report_to=[wandb]", "logging_steps=1"))
    assert len([line for line in read_lines(tmp_path / "run/metrics.jsonl") if line["kind"] == "step"]) == 8
    assert made[0].lines == 3
    said = capsys.readouterr().err
    assert said.count("report_to: wandb is dropped: SystemExit: no connection") == 1 and said.count("dropped") == 1


def test_a_tracker_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tracker_module, "CLOSING_S", 0.05)
    hangs, told = threading.Event(), []
    one = InThread("mlflow", lambda: hangs.wait() or Fails())  # type: ignore[arg-type,return-value]  # it waits
    for number in range(5):
        one.tell(lambda _, number=number: told.append(number))
    one.close()
    assert told == [] and "mlflow is dropped: it has not written everything within" in capsys.readouterr().err
    hangs.set()


def test_a_tracker_that_is_far_behind_is_dropped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tracker_module, "WAITING", 3)
    hangs = threading.Event()
    one = InThread("wandb", lambda: hangs.wait() or Fails())  # type: ignore[arg-type,return-value]  # it waits
    for _ in range(9):
        one.tell(lambda _: None)
    one.close()
    assert capsys.readouterr().err.count("wandb is dropped: it is 3 lines behind") == 1
    hangs.set()


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers_module, "find_spec", lambda name: None)
    assert missing(("wandb",))[0].startswith(
        "report_to: wandb needs the package wandb, which is not installed. Install it with `pip install"
    )
    with pytest.raises(Refused, match=r"eyeline\[wandb\]"):
        loop.train(tiny_run(tmp_path, "report_to=[wandb]"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (("report_to=wandb",), r"wanted a list of tensorboard, wandb, trackio, mlflow, such as \[wandb\]"),
        (("report_to=[wandb, wandb]",), "names a tracker twice"),
        (("report_to=[tensorboard]", "report_online=true"), "report_online is for wandb and mlflow"),
    ],
)
def test_trackers_that_cannot_be_meant_are_refused(tmp_path: Path, overrides: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(Refused, match=wanted):
        tiny_run(tmp_path, *overrides)


def test_samples_without_validations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="validation_steps is not set"):
        loop.train(tiny_run(tmp_path, "validation_samples=2"))
    assert not (tmp_path / "run").exists()


def test_figures_are_the_numbers_of_a_line() -> None:
    line = {"kind": "step", "stage": "tune", "step": 1, "global_step": 3, "loss": 0.5, "lr": {"vision": 0.1}, "mfu": None, "applied": True}
    assert figures_of(line) == {"train/loss": 0.5, "train/lr/vision": 0.1}
    assert figures_of({"kind": "validation", "loss": None, "supervised": 4}) == {"validation/supervised": 4.0}
    assert figures_of({"kind": "start", "threads": 4}) == {}
