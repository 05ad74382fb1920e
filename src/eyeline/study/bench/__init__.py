"""Benchmarks against peers, by the rules of docs/benchmarks.md: `CASES` has them by name."""

from collections.abc import Callable

from eyeline.study.bench import packed, start, step
from eyeline.study.bench.measure import Result

CASES: dict[str, Callable[[int], Result]] = {"step": step.run, "packed": packed.run, "start": start.run}  # each takes the number of pairs
