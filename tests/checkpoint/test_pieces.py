"""Tensors in pieces: written by several, read in any cut, and compared with PyTorch's own reader."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import OFFSETS, Piece, covers, pieces_of, reading
from eyeline.core.errors import Refused
from eyeline.core.shards import Box

TENSORS: dict[str, Tensor] = {
    "matrix": torch.arange(35.0).reshape(7, 5),
    "experts": torch.arange(24).reshape(4, 3, 2).to(torch.bfloat16),
    "vector": torch.arange(6.0),
    "step": torch.tensor(3.0),
}


def cut(tensors: dict[str, Tensor], writers: int, dim: int) -> list[list[Piece]]:
    """What each of several writers holds: a share of the rows (or columns) of what can be cut, as uneven as `tensor_split` makes it; the
    first of them holds what cannot."""
    held: list[list[Piece]] = [[] for _ in range(writers)]
    for name, x in tensors.items():
        if x.ndim <= dim:
            held[0] += pieces_of({name: x})
            continue
        start = 0
        for writer, local in enumerate(x.tensor_split(writers, dim)):
            offset = tuple(start if d == dim else 0 for d in range(x.ndim))
            held[writer].append(Piece(name, local, tuple(x.shape), offset))
            start += local.shape[dim]
    return held


def saved(folder: Path, held: list[list[Piece]]) -> store.Checkpoint:
    draft = store.start_draft(folder, "r", 1)
    shares = [store.write(draft, {"model": pieces}, writer, len(held)) for writer, pieces in enumerate(held)]
    store.commit(draft, shares, {})
    return store.verify(draft.target)


@pytest.mark.parametrize(("writers", "dim"), [(1, 0), (2, 0), (3, 0), (3, 1)])
def test_what_several_write_is_read_whole_and_in_any_box(tmp_path: Path, writers: int, dim: int) -> None:
    found = saved(tmp_path, cut(TENSORS, writers, dim))
    assert len([name for name in found.manifest.files if name.endswith(".safetensors")]) == writers
    assert found.names() == ("model",)
    back = found.load("model")
    assert back.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert back[name].dtype == x.dtype
        assert torch.equal(back[name], x), name
    with found.reading("model") as stored:
        rows, columns = TENSORS["matrix"].shape
        for a, b, c, d in product(range(rows), range(1, rows + 1), range(columns), range(1, columns + 1)):
            if a < b and c < d:
                assert torch.equal(stored.read("matrix", Box((a, c), (b - a, d - c))), TENSORS["matrix"][a:b, c:d])


def test_torch_reads_our_pieces(tmp_path: Path) -> None:
    """The reader of PyTorch's distributed checkpoints, which rests on offsets in the headers alone."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    found = saved(tmp_path, cut({name: x for name, x in TENSORS.items() if x.ndim}, 3, 0))
    targets: dict[str, Any] = {name: torch.zeros_like(x) for name, x in TENSORS.items() if x.ndim}
    load(targets, storage_reader=HuggingFaceStorageReader(str(found.folder)), no_dist=True)
    for name, x in targets.items():
        assert torch.equal(x, TENSORS[name]), name


def test_one_writer_writes_a_plain_file(tmp_path: Path) -> None:
    """What one process holds whole needs no word about pieces: the bytes are those of a file without."""
    found = saved(tmp_path / "ours", cut(TENSORS, 1, 0))
    store.write_file(tmp_path / "plain", TENSORS)
    assert (found.folder / "model.safetensors").read_bytes() == (tmp_path / "plain").read_bytes()


def test_a_piece_that_is_missing_or_written_twice_is_a_defect(tmp_path: Path) -> None:
    first, second = cut({"matrix": TENSORS["matrix"]}, 2, 0)
    for held in ([first, []], [first, first], [pieces_of({"matrix": TENSORS["matrix"]}), second]):
        with pytest.raises(AssertionError, match="matrix: not every number of it is in exactly one"):
            saved(tmp_path, held)
    assert store.newest(tmp_path) is None, "nothing that is not whole is ever committed"


def test_shares_of_some_writers_or_of_two_dtypes_are_a_defect(tmp_path: Path) -> None:
    first, second = cut({"matrix": TENSORS["matrix"]}, 2, 0)
    draft = store.start_draft(tmp_path / "some", "run", 1)
    share = store.write(draft, {"model": pieces_of({"vector": TENSORS["vector"]})}, 0, 2)
    with pytest.raises(AssertionError, match="1 shares, which are not those of all writers"):
        store.commit(draft, [share], {})
    with pytest.raises(AssertionError, match="matrix has two shapes or dtypes"):
        saved(tmp_path / "two", [first, [piece._replace(local=piece.local.bfloat16()) for piece in second]])


def test_a_fixed_set_that_is_shared_out_anew_is_written_anew(tmp_path: Path) -> None:
    """A run may be resumed on as many writers that hold other parts."""
    for step, dim in enumerate((0, 0, 1)):
        draft = store.start_draft(tmp_path, "run", step, {"frozen": "stage 0"})
        held = cut({"matrix": TENSORS["matrix"]}, 2, dim)
        store.commit(draft, [store.write(draft, {"frozen": pieces}, n, 2) for n, pieces in enumerate(held)], {})
        assert torch.equal(store.verify(draft.target).load("frozen")["matrix"], TENSORS["matrix"])
        links = {path.stat().st_nlink for path in draft.target.glob("frozen-*")}
        assert links == ({2} if step == 1 else {1})


def test_a_missing_file_of_one_writer_is_damage(tmp_path: Path) -> None:
    found = saved(tmp_path, cut(TENSORS, 2, 0))
    (found.folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(store.Damaged, match=r"model-00002-of-00002\.safetensors is missing"):
        store.verify(found.folder)


def test_boxes_by_hand() -> None:
    assert Box((0, 2), (3, 2)).common(Box((1, 0), (5, 3))) == Box((1, 2), (2, 1))
    assert Box((0,), (2,)).common(Box((2,), (2,))) is None
    assert Box((3, 4), (1, 1)).within(Box((2, 4), (4, 4))) == (slice(1, 2), slice(0, 1))
    assert covers((2, 3), [Box((0, 0), (1, 3)), Box((1, 0), (1, 1)), Box((1, 1), (1, 2))])
    assert not covers((2, 3), [Box((0, 0), (1, 3)), Box((0, 0), (1, 3))])
    assert covers((), [Box((), ())])
    assert math.prod(()) == Box((), ()).size == 1


def test_reading_what_no_file_holds_is_a_defect(tmp_path: Path) -> None:
    found = saved(tmp_path, cut(TENSORS, 1, 0))
    with reading([found.folder / "model.safetensors"]) as stored, pytest.raises(AssertionError, match="of 12 numbers are stored"):
        stored.read("vector", Box((0,), (12,)))


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ("{", "Expecting"),
        ("[]", "no attribute"),
        ('{"matrix": 3}', "not subscriptable"),
        ('{"matrix": {}}', "saved_offsets"),
        ('{"matrix": {"saved_offsets": 1}}', "not iterable"),
        ('{"matrix": {"saved_offsets": [0, -1]}}', "not a whole number"),
        ('{"matrix": {"saved_offsets": ["0", "0"]}}', "not a whole number"),
        ('{"matrix": {"saved_offsets": [0]}}', "the offset of matrix has another number of dimensions"),
    ],
)
def test_a_header_that_does_not_say_where_pieces_begin_is_refused(tmp_path: Path, offsets: str, words: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file, {"format": "pt", OFFSETS: offsets})
    with pytest.raises(Refused, match=rf"model\.safetensors does not say where .*{words}"), reading([file]):
        pass


def test_a_dtype_that_no_checkpoint_has_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    with (
        pytest.raises(Refused, match=r"model\.safetensors: a is of dtype C64; checkpoints have .*F32"),
        reading([tmp_path / "model.safetensors"]),
    ):
        pass
