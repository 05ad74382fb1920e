"""Case `checkpoint`: 256 MiB of weights saved and flushed to disk, against safetensors and torch.save; what training waits for."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, Stopwatch, interleaved, spread, timed
from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import pieces_of
from eyeline.core.errors import Refused
from eyeline.core.files import sha256_of
from eyeline.core.randomness import torch_rng_for
from eyeline.train.saving import copied

MIB, COUNT = 256, 64


def run(pairs: int = LEAST_PAIRS, mib: int = MIB) -> Result:
    """Check that every side gives back what it was given, then time them in turn."""
    conditions = Conditions()
    tensors = weights(mib)
    with tempfile.TemporaryDirectory() as name:
        sides = sides_in(Path(name), tensors)
        times = interleaved({side: timed(once) for side, once in sides.items()}, pairs, "checkpoint")
        again = read_back(Path(name))
    if wrong := [name for name, x in tensors.items() if any(not torch.equal(x, found[name]) for found in again)]:
        raise Refused(f"{wrong[0]} is not what was saved: the sides do not do the same work.")
    stalls = []
    for _ in range(pairs):
        watch = Stopwatch()
        copied(pieces_of(tensors))
        stalls.append(watch.read().wall_s)
    waits = spread([one.wall_s for one in times["ours"]])
    return Result(
        case="checkpoint",
        command="python -m bench checkpoint",
        work=f"{mib} MiB of float32 in {COUNT} tensors of a process are saved and flushed to disk (fsync), in a new file each time. "
        "Ours has a SHA-256 of every byte and a manifest, deletes the checkpoint before, and asks for free space first; "
        "safetensors and torch.save have no digest, so that one more side reads its file again for one.",
        agreement=f"all sides give back the same {COUNT} tensors, to the last bit",
        comparisons=tuple(
            Comparison(name=f"against {peer}", unit="MiB", amount=mib, ours=times["ours"], peer=times[peer], limit=None, judged="rate")
            for peer in ("safetensors", "safetensors, read again for a digest", "torch.save")
        ),
        facts=(
            Fact(name="ours: MiB per wall second (median)", value=mib / waits.median),
            Fact(name="what training waits for when a thread saves: a copy, wall s (median)", value=spread(stalls).median),
            Fact(name="as a share of a save", value=spread(stalls).median / waits.median),
        ),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )


def weights(mib: int) -> dict[str, Tensor]:
    rng = torch_rng_for(0, "bench checkpoint")
    return {f"blocks.{n}.weight": torch.randn(mib * 2**18 // COUNT // 256, 256, generator=rng) for n in range(COUNT)}


def sides_in(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """What each side does once; each leaves what it saved last."""
    pieces = pieces_of(tensors)
    steps = iter(range(1, 10_000))

    def flushed(path: Path, write: Callable[[Path], object]) -> None:
        path.unlink(missing_ok=True)
        write(path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def safetensors() -> None:
        flushed(folder / "peer.safetensors", lambda path: save_file(tensors, path))

    def with_digest() -> None:
        safetensors()
        sha256_of(folder / "peer.safetensors")

    return {
        "ours": lambda: store.save(
            folder / "checkpoints", run="bench", step=next(steps), files={"model": pieces}, state={}, save_total_limit=1
        ),
        "safetensors": safetensors,
        "safetensors, read again for a digest": with_digest,
        "torch.save": lambda: flushed(folder / "peer.pt", lambda path: torch.save(tensors, path)),
    }


def read_back(folder: Path) -> list[dict[str, Tensor]]:
    found = store.newest(folder / "checkpoints")
    assert found is not None, "a side has saved it"
    return [found.load("model"), load_file(folder / "peer.safetensors"), torch.load(folder / "peer.pt")]
