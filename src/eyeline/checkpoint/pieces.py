"""Tensors in pieces: each writer puts into a file of its own what it holds, and any box of a tensor is read out of all files.

Writers and readers may differ in number: boxes are cut out of boxes. One process writes whole tensors, one piece each, into
one file; there is no second format. If a piece is a part of its tensor, the file's header says where it starts, as PyTorch's
`HuggingFaceStorageWriter(save_distributed=True)` says it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from eyeline.checkpoint.tensors import NAMED_DTYPES, Entry, entries_of
from eyeline.core.errors import Refused
from eyeline.core.shards import Box, held, is_sharded

OFFSETS = "DCP_SHARDING_INFO"  # {name: {"saved_offsets": [...]}}


class Piece(NamedTuple):
    """What one writer holds of a tensor."""

    name: str
    local: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where in the whole this begins

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.local.shape))


def pieces_of(tensors: Mapping[str, Tensor], first: bool = True) -> list[Piece]:
    """What this rank writes of tensors that are sharded or whole: each part is written by one of the ranks that hold it. `first`: whether
    this is the rank that writes what all ranks hold whole."""
    pieces: list[Piece] = []
    for name, x in tensors.items():
        local, box, replica = held(x)
        writes = replica == 0 if is_sharded(x) else first
        if writes and (box.size or not x.numel()):
            pieces.append(Piece(name, local, tuple(x.shape), box.offset))
    return pieces


def offsets_of(pieces: Iterable[Piece]) -> dict[str, str] | None:
    """The metadata of a file of these pieces; None where each is a whole tensor."""
    pieces = list(pieces)
    if all(piece.shape == tuple(piece.local.shape) for piece in pieces):
        return None
    return {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps({p.name: {"saved_offsets": list(p.offset)} for p in pieces})}


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether every element of a tensor is in exactly one of these boxes."""
    in_order = sorted(boxes)
    for n, box in enumerate(in_order):
        for other in in_order[n + 1 :]:
            if shape and other.offset[0] >= box.offset[0] + box.lengths[0]:
                break  # nor does any after it: what many ranks share out along the first dim takes no longer than one look at each
            if box.common(other):
                return False
    return sum(box.size for box in boxes) == math.prod(shape)


class Stored(Protocol):
    """Tensors that can be read, or parts of them."""

    @property
    def meta(self) -> Mapping[str, Tensor]:
        """Name -> shape and dtype, on the meta device."""
        ...

    def read(self, name: str, box: Box | None = None) -> Tensor: ...


class TensorFiles:
    """The tensors of one or more files, read where they are asked for."""

    def __init__(self, files: Mapping[Path, Any]):
        self._pieces: dict[str, list[tuple[Any, Box]]] = {}
        dtypes: dict[str, torch.dtype] = {}
        meta: dict[str, Tensor] = {}
        for path, opened in files.items():
            entries = entries_of(path)
            offsets = _offsets_in(path, (opened.metadata() or {}).get(OFFSETS, "{}"), entries)
            for name, entry in entries.items():
                if entry.dtype not in NAMED_DTYPES:
                    raise Refused(f"{path}: {name} is of dtype {entry.dtype}; checkpoints have {', '.join(NAMED_DTYPES)}")
                self._pieces.setdefault(name, []).append((opened, Box(offsets.get(name, (0,) * len(entry.shape)), entry.shape)))
                dtypes[name] = NAMED_DTYPES[entry.dtype]
        for name, pieces in self._pieces.items():
            if len({len(box.lengths) for _, box in pieces}) > 1:
                raise Refused(f"{', '.join(map(str, files))}: pieces of {name} have different numbers of dimensions. Restore the files")
            ends = [[a + n for a, n in zip(*box, strict=True)] for _, box in pieces]
            meta[name] = torch.empty([max(end) for end in zip(*ends, strict=True)], dtype=dtypes[name], device="meta")
        self.meta = meta

    def __contains__(self, name: str) -> bool:
        return name in self.meta

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor on the host, or a box of it."""
        shape = tuple(self.meta[name].shape)
        box = box or Box((0,) * len(shape), shape)
        for opened, there in self._pieces[name]:
            if there == box:
                return opened.get_tensor(name)
        out = torch.empty(box.lengths, dtype=self.meta[name].dtype)
        filled = 0
        for opened, there in self._pieces[name]:
            if common := box.common(there):
                out[common.within(box)] = opened.get_slice(name)[common.within(there)]
                filled += common.size
        assert filled == box.size, f"{name}: {filled:,} of {box.size:,} numbers are stored"
        return out


def _offsets_in(path: Path, text: str, entries: Mapping[str, Entry]) -> dict[str, tuple[int, ...]]:
    """Where the pieces in a file begin, by the text in its header. Raises Refused for a text that does not say it."""
    try:
        offsets = {name: tuple(piece["saved_offsets"]) for name, piece in json.loads(text).items() if name in entries}
        if any(not isinstance(n, int) or n < 0 for offset in offsets.values() for n in offset):
            raise ValueError("an offset is not a whole number from 0 on")
        if strange := [name for name, offset in offsets.items() if len(offset) != len(entries[name].shape)]:
            raise ValueError(f"the offset of {strange[0]} has another number of dimensions than its shape")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(f"{path} does not say where the tensors in it begin ({OFFSETS} in its header): {error}. Restore the file") from error
    return offsets


@contextmanager
def reading(files: Sequence[Path]) -> Iterator[TensorFiles]:
    """The tensors of these files, as long as this lasts. Raises Refused for a file that is not whole."""
    with ExitStack() as stack:
        for path in files:
            entries_of(path)  # refuses what is not a safetensors file
        yield TensorFiles({path: stack.enter_context(safe_open(path, framework="pt")) for path in files})
