"""Case `data`: archives of JPEGs with text -> packs of tokens and patches, by our reader and by others'. No model takes part."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import data_work
from bench.data_work import BUDGET, BUFFER, PER_SHARD, RULE, Packed, Seen, Setup
from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, Stopwatch, Timed, interleaved, needs, spread
from eyeline.core.batch import Batch
from eyeline.core.errors import Refused
from eyeline.core.log import say
from eyeline.core.world import World
from eyeline.data.loader import training_steps
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source

RANKS, SOME_RANKS = 64, (0, 63)  # simulated; those whose epoch is read
RESUME_S = 2.0


def run(pairs: int = LEAST_PAIRS, sides: Sequence[str] | None = None, shards: int = data_work.SHARDS) -> Result:
    """Check that all sides give the same tokens and pixels, then time them in turn; then resume each in a fresh process."""
    from bench.data_peers import PACKAGES, PEERS, prepare_energon

    peers = tuple(PEERS) if sides is None else tuple(sides)
    needs("bench-data", [PACKAGES[peer] for peer in peers])
    conditions = Conditions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = data_work.make(folder, shards)
        if "energon" in peers:
            for which in ("full", "tiny"):
                prepare_energon(Setup(folder, which))
        setup = Setup(folder, "full")
        seen = {side: Seen.of(pack for pack, _ in stream(side, setup, folder / "index kept")) for side in ("ours", *peers)}
        checked = agree(seen, setup)

        def passed(side: str, cache: Path | None) -> Timed:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                watch = Stopwatch()
                for _ in stream(side, setup, cache or Path(own)):
                    pass
                return watch.read()

        times = interleaved(
            {
                "ours": lambda: passed("ours", None), **{peer: lambda peer=peer: passed(peer, None) for peer in peers},
                "later": lambda: passed("ours", folder / "index kept"),
            },
            pairs, "data",
        )  # fmt: skip
        probed = {side: probes(side, folder) for side in ("ours", *peers)}
    found: list[Fact] = []
    samples = shards * PER_SHARD
    for side, of in probed.items():
        lost, repeated = missing(of, setup_ids(shards))
        ours = side == "ours"
        found += [
            Fact(name=f"{side}: CPU ms per sample (median)", value=1_000 / samples * spread([t.cpu_s for t in times[side]]).median),
            Fact(name=f"{side}: to the first batch, wall s", value=of["first_s"]),
            Fact(
                name=f"{side}: to the first batch after resuming at 50 % in a fresh process, wall s", value=of["resume_s"],
                limit=f"≤ {RESUME_S:g}" if ours else "", met=of["resume_s"] <= RESUME_S if ours else None,
            ),
            Fact(
                name=f"{side}: samples lost, samples repeated, over the two processes", value=f"{lost}, {repeated}",
                limit="0, 0" if ours else "", met=not lost and not repeated if ours else None,
            ),
            Fact(
                name=f"{side}: read until then, MiB and requests ({of['samples']} samples)",
                value=f"{of['bytes'] / 2**20:.2f}, {of['requests']}",
            ),
            Fact(name=f"{side}: bytes of the state", value=str(of["state_bytes"])),
            Fact(name=f"{side}: peak memory above the imports, MiB", value=of["peak_bytes"] / 2**20),
            Fact(name=f"{side}: token slots that are padding", value=seen[side].padding),
            *(
                Fact(
                    name=f"{side}: read per sample at {RANKS} ranks, KiB and requests" + (f", {WHEN[when]}" if ours else ""),
                    value=f"{kib / 1024:.0f}, {requests:.1f}",
                )
                for when, (kib, requests) in of["ranks"].items()
            ),
        ]  # fmt: skip
    first = [
        Comparison(
            name=f"first epoch, {peer}", unit="samples", amount=samples, ours=times["ours"], peer=times[peer], limit=1.0, judged="rate"
        )
        for peer in peers
    ]
    later = [
        Comparison(
            name=f"later epochs, {peer}", unit="samples", amount=samples, ours=times["later"], peer=times[peer], limit=None, judged="rate"
        )
        for peer in peers
    ]
    return Result(
        case="data",
        command="python -m bench data",
        work=f"an epoch over {samples:,} samples in {shards} WebDataset archives: a JPEG of 320 to 448 pixels per side "
        f"({size / 1024:.0f} KiB on average) and a conversation each, decoded, resized by Pillow (bicubic, Qwen's rule, patches of "
        f"{RULE.patch}), tokenised, shuffled and packed into {BUDGET.tokens:,} tokens, in one process and thread, files in the page cache. "
        "Ours makes its index inside the time of the first epoch, and lays out every index array that a model needs; peers stop at "
        f"tokens, labels and patches, joined and padded. They shuffle in buffers of {BUFFER} samples; the DataLoader has a permutation of "
        f"all, over offsets that it scans from the archives. Energon packs first-fit-decreasing in its own buffer of {BUFFER}, and its "
        "`prepare` is not counted; the others pack samples as they come. Webdataset has no way to resume: it reads what was seen again, "
        "without decoding it. Bytes and requests are those of the system's `read` calls of the process; a mapped index is not among them.",
        agreement=f"tokens and pixels of all {checked:,} samples are the same on all sides, and every side gives every sample once",
        comparisons=(*first, *later),
        facts=tuple(found),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )


WHEN = {"alone": "each making its own index", "kept": "with the index there"}


def stream(side: str, setup: Setup, cache: Path, state: Any = None, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Packed, Any]]:
    """Packs of an epoch, and a function that gives the state after each. `cache` is where our index is kept."""
    if side == "ours":
        return ours(setup, cache, state, rank, ranks)
    from bench.data_peers import PEERS

    return PEERS[side](setup, state, rank, ranks)


def ours(setup: Setup, cache: Path, state: Any, rank: int, ranks: int) -> Iterator[tuple[Packed, Any]]:
    data = Data(sources=(Source(path=str(setup.archives / "*.tar")),), cache=str(cache))
    reader = reader_of(data, setup.encoder(), RULE, seed=0, world=World(rank, ranks))
    for step in training_steps(reader, BUDGET, ranks, 1, state):
        [batch] = step.batches
        if batch.ids:  # of ranks that do not divide the packs some have nothing to do in the last step
            yield packed_of(batch), lambda step=step: step.state


def packed_of(batch: Batch) -> Packed:
    """Names of samples are `03.tar#7` here, and `03-07` in the archive."""
    ids = tuple(f"{archive[:2]}-{int(number):02d}" for archive, _, number in (id.partition("#") for id in batch.ids))
    cu_S1 = batch.cu_S1.numpy()[: batch.counts.documents + 1]
    return Packed(ids, batch.tokens_T.numpy(), batch.counts.supervised, cu_S1, batch.patches_PC.numpy(), batch.cu_N1.numpy())


def setup_ids(shards: int) -> list[str]:
    return [f"{shard:02d}-{number:02d}" for shard in range(shards) for number in range(PER_SHARD)]


def agree(seen: dict[str, Seen], setup: Setup) -> int:
    """How many samples were compared. Refused where a side loses or repeats one, or where tokens, pixels or labels differ."""
    wanted = sorted(setup_ids(len(setup.paths)))
    mine = seen["ours"]
    for side, of in seen.items():
        if sorted(of.ids) != wanted:
            raise Refused(f"{side} does not give every sample of an epoch once, so its figures mean nothing.")
        different = [id for id in wanted if of.hashes[id] != mine.hashes[id]]
        if different:
            raise Refused(f"{side} gives other tokens or pixels for {len(different)} samples, such as {different[0]}.")
        if of.labelled != mine.labelled:
            raise Refused(f"{side} learns from other tokens than ours.")
    return len(wanted)


def missing(of: dict[str, Any], wanted: Sequence[str]) -> tuple[int, int]:
    """How many samples neither process gave, and how many came twice."""
    given = [*of["before"], *of["after"]]
    return len(set(wanted) - set(given)), len(given) - len(set(given))


def probes(side: str, folder: Path) -> dict[str, Any]:
    first, resumed = (probe(side, folder, task) for task in ("first", "resume"))
    say(f"{side}: first batch {first['first_s']:.2f} s, resumed {resumed['resume_s']:.2f} s")
    return first | resumed | {"before": first["ids"], "after": resumed["ids"]}


def probe(side: str, folder: Path, task: str) -> dict[str, Any]:
    """What `bench/data_probe.py` measures, in a process of its own. Refused when it fails."""
    command = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "bench.data_probe", side, str(folder.absolute()), task]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"the {task} probe of {side} ended with code {done.returncode}. It said:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
