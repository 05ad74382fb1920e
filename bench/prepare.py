"""Case `prepare`: CPU-bound samples packed offline by two worker processes, and by one. Both are ours: what counts is wall time."""

import tempfile
from dataclasses import replace
from pathlib import Path

from bench import data_work
from bench.data_work import BUDGET, PER_SHARD, RULE, Setup
from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, Stopwatch, Timed, interleaved
from eyeline.core.errors import Refused
from eyeline.core.image_rule import Square
from eyeline.data.prepared.folder import Manifest
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.offline import prepare
from eyeline.offline.prepare import pack_offline
from eyeline.offline.run import Where

SIDE, QUALITY = 224, 90  # pixels and JPEG quality that images are scaled down to
ARCHIVE_BYTES = 8 << 20  # of samples in a partition: about thirty of them
LIMIT = 1.6


def run(pairs: int = LEAST_PAIRS, shards: int = data_work.SHARDS) -> Result:
    """Check that two processes write what one does, then time them in turn."""
    conditions = Conditions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data_work.make(folder, shards)
        seen = {workers: packed(folder, workers)[0] for workers in (2, 1)}
        if seen[1].archives != seen[2].archives:
            raise Refused("two processes wrote other archives than one")
        sides = {"ours": lambda: packed(folder, 2)[1], "peer": lambda: packed(folder, 1)[1]}
        times = interleaved(sides, pairs, "prepare")
    comparison = Comparison(
        name="prepare --resize: two worker processes, one", unit="samples", amount=shards * PER_SHARD, ours=times["ours"],
        peer=times["peer"], limit=None, judged="rate",
    )  # fmt: skip
    speed = comparison.ratio("wall_s").median
    return Result(
        case="prepare",
        command="python -m bench prepare",
        work=f"{shards * PER_SHARD:,} samples, each a JPEG of 320 to 448 pixels per side, are indexed and packed offline by `eyeline "
        f"prepare --resize {QUALITY}`, which decodes every image, scales it down to {SIDE} × {SIDE} pixels and encodes it. Ours is two "
        "worker processes, the peer one. Each pass starts its workers and writes an empty folder. CPU times are of the process that hands "
        "out the work alone.",
        agreement="both write the same archives, byte by byte",
        comparisons=(comparison,),
        facts=(
            Fact(name="wall time, one process ÷ two (median of pairs)", value=speed, limit=f"≥ {LIMIT:g}", met=speed >= LIMIT),
        ),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )  # fmt: skip


def packed(folder: Path, workers: int) -> tuple[Manifest, Timed]:
    """Pack into a folder of its own."""
    setup = Setup(folder, "full")
    data = Data(sources=(Source(path=str(setup.archives)),))
    before = prepare.PARTITION_BYTES
    prepare.PARTITION_BYTES = ARCHIVE_BYTES
    try:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            watch = Stopwatch()
            reader = reader_of(data, setup.encoder(), replace(RULE, resize=Square(SIDE)), seed=0)
            made = pack_offline(reader, BUDGET, Path(out), quality=QUALITY, where=Where(workers))
            assert made is not None, "there is one job"
            return made, watch.read()
    finally:
        prepare.PARTITION_BYTES = before
