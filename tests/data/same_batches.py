"""Batches compared tensor by tensor, and steps with what a run resumes from."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from eyeline.core.batch import Batch


def flat(steps: Any) -> list[Batch]:
    return [batch for step in steps for batch in step.batches]


def assert_same(a: Batch, b: Batch) -> None:
    for field in fields(Batch):
        one, two = getattr(a, field.name), getattr(b, field.name)
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two, field.name


def assert_same_steps(a: list, b: list) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert left.state == right.state
        for one, two in zip(left.batches, right.batches, strict=True):
            assert_same(one, two)
