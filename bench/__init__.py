"""Benchmarks against peers, by the rules of docs/benchmarks.md: `CASES` has them by name."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench import attention, checkpoint, data, head, model, packed, packer, prepare, ranks, start, step
from bench.measure import LEAST_PAIRS, NoPeer, Result, write_result
from bench.render import overview, write_page
from eyeline.core.errors import Refused, nearest
from eyeline.core.log import say, warn

CASES: dict[str, Callable[[int], Result]] = {  # each takes the number of pairs
    "step": step.run,
    "packed": packed.run,
    "packer": packer.run,
    "data": data.run,
    "prepare": prepare.run,
    "start": start.run,
    "head": head.run,
    "attention": attention.run,
    "model": model.run,
    "ranks": ranks.run,
    "checkpoint": checkpoint.run,
}


def run_cases(names: Sequence[str], out: Path, pairs: int = LEAST_PAIRS) -> None:
    """Run the named cases (all whose peers are installed, when none is named), write OUT/CASE.json, and say the ratios.

    Where OUT is the `bench/results` of a checkout, its docs/benchmarks.md is made again. Refused for an unknown name.
    """
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise Refused(f"there is no benchmark {unknown[0]!r}; there are {', '.join(CASES)}.{nearest(unknown[0], list(CASES))}")
    for name in names or CASES:
        try:
            result = CASES[name](pairs)
        except NoPeer as absent:
            if names:
                raise
            warn(f"{name} is left out: {absent}")
            continue
        say(f"{write_result(out, result)}\n{overview([result])}")
    docs = out.absolute().parent.parent / "docs"
    if docs.is_dir():
        write_page(out, docs / "benchmarks.md")
        say(f"{docs / 'benchmarks.md'}: made from {out}")
