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
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor

from eyeline.checkpoint.tensors import NAMED_DTYPES, Entry, entries_of
from eyeline.core.errors import Refused
from eyeline.core.files import storage_failed
from eyeline.core.shards import Box, held, is_sharded

OFFSETS = "DCP_SHARDING_INFO"  # {name: {"saved_offsets": [...]}}
AT_ONCE = 8 << 20  # bytes that are read of rows of which a part is wanted


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


class TensorFile:
    """A safetensors file, read as asked. It is not mapped: its pages would count as memory of this process as long as it is open."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self._file = path, file
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
        self._shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}

    def read(self, name: str, dtype: torch.dtype, box: Box) -> Tensor:
        """A box of a stored tensor. Whole rows are read, a few megabytes at a time where the box has a part of each."""
        shape = self._shapes[name]
        if not shape:
            return self._rows(name, dtype, 0, 1, ()).view(())
        (first, *_), (rows, *_), row = box.offset, box.lengths, shape[1:]
        if box.lengths[1:] == row:
            return self._rows(name, dtype, first, rows, row)
        out = torch.empty(box.lengths, dtype=dtype)
        columns = Box(box.offset[1:], box.lengths[1:]).within(Box((0,) * len(row), row))
        step = max(1, AT_ONCE // max(math.prod(row) * dtype.itemsize, 1))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            out[start : start + count] = self._rows(name, dtype, first + start, count, row)[(slice(None), *columns)]
        return out

    def _rows(self, name: str, dtype: torch.dtype, first: int, rows: int, row: tuple[int, ...]) -> Tensor:
        out = torch.empty((rows, *row), dtype=dtype)
        if out.numel():
            raw = out.view(-1).view(torch.uint8).numpy()
            try:
                self._file.seek(self._starts[name] + first * math.prod(row) * dtype.itemsize)
                read = self._file.readinto(raw.data)  # type: ignore[attr-defined]  # an open file has it
            except OSError as error:
                raise storage_failed("read", self.path, error) from error
            if read != raw.nbytes:
                raise Refused(f"{self.path} ends inside of {name}. Restore the file")
        return out


class TensorFiles:
    """The tensors of one or more files, read where they are asked for."""

    def __init__(self, files: Mapping[Path, TensorFile]):
        self._pieces: dict[str, list[tuple[TensorFile, Box]]] = {}
        dtypes: dict[str, torch.dtype] = {}
        meta: dict[str, Tensor] = {}
        for path, opened in files.items():
            entries = entries_of(path)
            offsets = _offsets_in(path, opened.metadata.get(OFFSETS, "{}"), entries)
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
        dtype, box = self.meta[name].dtype, box or Box((0,) * len(shape), shape)
        for opened, there in self._pieces[name]:
            if there == box:
                return opened.read(name, dtype, Box((0,) * len(shape), box.lengths))
        out = torch.empty(box.lengths, dtype=dtype)
        filled = 0
        for opened, there in self._pieces[name]:
            if common := box.common(there):
                inside = Box(tuple(a - b for a, b in zip(common.offset, there.offset, strict=True)), common.lengths)
                out[common.within(box)] = opened.read(name, dtype, inside)
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
        yield TensorFiles({path: TensorFile(path, stack.enter_context(open(path, "rb"))) for path in files})
