"""Indexes opened and compared."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from eyeline.core.image_rule import ImageRule
from eyeline.data.plan.index import Index
from eyeline.data.plan.shard_index import ShardIndex
from eyeline.data.sources.sources import Rows
from eyeline.data.text.tokenizer import Encoder


def same(a: ShardIndex, b: ShardIndex) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(ShardIndex)]
    return all(np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y for x, y in pairs)


def opened(rows: Rows, encoder: Encoder, rule: ImageRule, folder: Path | None = None) -> Index:
    return Index((rows,), encoder, rule, folder)
