"""Where runs end: digests of checkpoints, losses of steps, and signals that arrive at a step."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import eyeline.train.loop as loop
from eyeline.checkpoint import store
from eyeline.core.files import read_lines
from eyeline.train.run import Run


def digest(checkpoint: store.Checkpoint) -> str:
    """The state of every tensor, the data position, and the counts."""
    state = hashlib.sha256(json.dumps(checkpoint.state, sort_keys=True).encode())
    for name in sorted(checkpoint.names()):
        for key, tensor in sorted(checkpoint.load(name).items()):
            state.update(
                f"{name} {key} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
            )
    return state.hexdigest()


def end_of(run: Run) -> str:
    assert run.out
    newest = store.newest(Path(run.out) / "checkpoints")
    assert newest is not None
    return digest(newest)


def losses(run: Run) -> dict[int, float]:
    assert run.out
    return {line["global_step"]: line["loss"] for line in read_lines(Path(run.out) / "metrics.jsonl") if line["kind"] == "step"}


def stopped_at(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the signal arrive while the given global steps are computed."""
    stops: list[loop.StopSignal] = []

    class Watched(loop.StopSignal):
        def __init__(self, *tell: Any, **how: Any) -> None:
            super().__init__(*tell, **how)
            stops.append(self)

    def update(*args, step: int, **more):
        if step + 1 in steps:
            stops[-1].asked = "SIGTERM"
        return original(*args, step=step, **more)

    original = loop.update
    monkeypatch.setattr(loop, "StopSignal", Watched)
    monkeypatch.setattr(loop, "update", update)
