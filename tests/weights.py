"""Fills tensors from a checkpoint folder by key rules, as parity tests need it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eyeline.checkpoint.tensors import stream
from eyeline.core.key_rules import KeyRule


@torch.no_grad()
def load_into(tensors: Mapping[str, Tensor], folder: Path, rules: Sequence[KeyRule], dropped: Sequence[str] = ()) -> None:
    """Fill the tensors in place with what `stream` finds, cast to each one's dtype. Raises Refused."""
    for name, value in stream(tensors, folder, rules, dropped):
        tensors[name].copy_(value)
