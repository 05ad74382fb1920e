"""One side of case `data` in a fresh process: `python -m bench.data_probe SIDE FOLDER first|resume`.

Its last line is what it measured, as JSON. Modules are imported, and an archive read, before anything is measured.
"""

import json
import pickle
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch

from bench import data
from bench.data_work import Setup
from bench.measure import peak_bytes
from eyeline.core.log import say


def counted() -> tuple[int, int]:
    """Bytes and calls of `read` by this process so far, through any library and from any file (Linux)."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["syscr"])


def first(side: str, folder: Path) -> dict[str, object]:
    """Read until half of an epoch is given, and leave the state behind."""
    setup = Setup(folder, "full")
    kept: dict[str, object] = {}

    def half() -> None:
        ids: list[str] = []
        start = time.perf_counter()
        for pack, state in data.stream(side, setup, folder / f"index {side}"):
            kept.setdefault("first_s", time.perf_counter() - start)
            ids += pack.ids
            if len(ids) >= setup.samples / 2:
                written = state()
                kept["ids"] = ids
                # some peers' states are objects, which only pickle writes; ours is JSON
                content = json.dumps(written).encode() if side == "ours" else pickle.dumps(written)
                (folder / f"state {side}").write_bytes(content)
                (folder / f"left {side}").write_text(str(setup.samples - len(ids)))
                kept["state_bytes"] = len(content)
                return

    kept["peak_bytes"] = peak_bytes(half)
    return kept


def resume(side: str, folder: Path) -> dict[str, object]:
    """Go on from the state, and read what is left; then as one of many ranks."""
    content = (folder / f"state {side}").read_bytes()
    state = json.loads(content) if side == "ours" else pickle.loads(content)  # what this benchmark wrote itself
    start, before = time.perf_counter(), counted()
    stream = data.stream(side, Setup(folder, "full"), folder / f"index {side}", state)
    ids = [id for pack, _ in islice(stream, 1) for id in pack.ids]  # none, where a peer has lost the rest
    took, after = time.perf_counter() - start, counted()
    samples = len(ids)
    left = int((folder / f"left {side}").read_text())
    while len(ids) < left and (more := next(stream, None)):  # Energon begins another epoch after a restored one
        ids += more[0].ids
    return {
        "resume_s": took,
        "bytes": after[0] - before[0],
        "requests": after[1] - before[1],
        "samples": samples,
        "ids": ids,
        "ranks": ranks(side, folder),
    }


def ranks(side: str, folder: Path) -> dict[str, object]:
    """An epoch of some of 64 ranks: what each reads for a sample. Ours twice: making its index alone, and with one that is there."""
    out: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as shared:
        for name in ("alone", "kept") if side == "ours" else ("alone",):
            total, samples = [0, 0], 0
            for rank in data.SOME_RANKS:
                with tempfile.TemporaryDirectory() as own:
                    before = counted()
                    cache = Path(shared if name == "kept" or rank == data.SOME_RANKS[-1] else own)
                    for pack, _ in data.stream(side, Setup(folder, "full"), cache, None, rank, data.RANKS):
                        samples += len(pack.ids)
                    total = [t + a - b for t, a, b in zip(total, counted(), before, strict=True)]
            out[name] = [total[0] / max(samples, 1), total[1] / max(samples, 1)]
    return out


if __name__ == "__main__":
    side, folder, task = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        list(data.stream(side, Setup(folder, "tiny"), Path(cache)))
    measured = {"first": first, "resume": resume}[task](side, folder)
    say(json.dumps(measured))
