"""`eyeline bench step`: the step that is timed is the one that trains, and its figures are those of a run."""

import json
from pathlib import Path

import pytest

from eyeline.core.files import read_json
from eyeline.parallel.launch import machine
from eyeline.recipes.read import read_recipe
from eyeline.study.roofline.roofline import config_for, one_device_lines, resized
from eyeline.study.roofline.step import record_step
from eyeline.study.timed_steps import Timed, lines, time_steps
from tests.command import Command

SMALL = (96, 128, 2)  # tokens, patches, packs


def test_its_arithmetic_is_that_of_the_roofline() -> None:
    """Both are of full micro-batches: as many FLOPs and token positions."""
    run = read_recipe("easyvqa-tiny", ["precision=bf16"])
    timed = time_steps(resized(run, 1, *SMALL), 1, config_for(run, None), steps=2, warm_up=1, here=machine("cpu"))
    recording = record_step(run, 1, config_for(run, None), resized(run, 1, *SMALL).stages[1].batch.budget, 2)
    assert timed.flops == sum(recording.needed.by_part.values())
    assert timed.slots == 2 * 96
    assert len(timed.seconds) == 2
    assert timed.memory_bytes > timed.planned_bytes > 439_808 * 4 * 3  # weights, gradients and Muon's moments


def test_mfu_is_needed_flops_over_time_and_peak() -> None:
    timed = Timed([2.0, 1.0, 4.0], slots=300, flops=8e12, peak=10e12, peak_name="a device", memory_bytes=2**30, planned_bytes=2**29)
    assert timed.mfu == pytest.approx(8 / 2 / 10)
    measured, mfu, memory = lines(timed, machine("cpu"))
    assert measured == "measured: 2.0000 s per step, median of 3 steps (1.0000 to 4.0000); 150 tokens/s, 4.00 TFLOP/s"
    assert mfu == "MFU 40.0% of a device"
    assert memory == "memory: 1.00 GiB of the whole process at its highest; `eyeline check` estimates 0.50 GiB for a GPU"


def test_the_command_prints_and_writes_what_it_measured(eyeline: Command, tmp_path: Path) -> None:
    sizes = [f"--{name}={number}" for name, number in (("tokens", 96), ("patches", 128), ("steps", 2), ("warm-up", 1))]
    done = eyeline("bench", "step", "easyvqa-tiny", "--stage", "shapes", *sizes, "--out", "step.json")
    assert done.code == 0, done.err
    found = read_json(tmp_path / "step.json")
    assert (found["stage"], found["slots"], len(found["seconds"]), found["measured"]) == ("shapes", 96, 2, True)
    assert f"{found['median_s']:.4f} s per step" in done.out + done.err, json.dumps(found)


def test_a_mesh_and_packs_of_no_size_are_not_passed_over(eyeline: Command) -> None:
    sizes = ["--tokens=96", "--patches=128", "--steps=1", "--warm-up=1"]
    done = eyeline("bench", "step", "easyvqa-tiny", "mesh.pp=2", "stages.all.batch=auto", *sizes)
    assert done.code == 0, done.err
    assert "one device computes the whole step here: the recipe's mesh (pp: 2)" in done.out + done.err
    assert not [*one_device_lines(read_recipe("easyvqa-tiny"))]
    done = eyeline("bench", "step", "easyvqa-tiny", "stages.all.batch=auto")
    assert done.code == 2 and "batch: auto" in done.err and "--tokens and --patches" in done.err
    done = eyeline("bench", "roofline", "easyvqa-tiny", "precision=bf16", "--gpu=h100")
    assert done.code == 2 and "Did you mean 'h100-80' or 'h100-pcie'?" in done.err


def test_updates_in_backward_of_several_packs_are_refused(eyeline: Command) -> None:
    """As train refuses them: each pack would update the weights."""
    optimizer = "stages.all.optimizer={kind: adamw, in_backward: true}"
    done = eyeline("bench", "step", "easyvqa-tiny", optimizer, "stages.all.max_grad_norm=0", "max_nonfinite_steps=0", "--packs=2")
    assert done.code == 2 and "batch.packs_per_step=2 adds up gradients" in done.err
