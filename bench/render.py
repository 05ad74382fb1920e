"""`docs/benchmarks.md` from the results in `bench/results/*.json`: nothing on that page is typed by hand."""

from collections.abc import Iterable
from pathlib import Path

from bench.measure import LEAST_PAIRS, Comparison, Fact, Result, Spread, read_result
from eyeline.core.errors import Refused
from eyeline.core.files import write_atomically

BUSY = 1.5  # load average over which a result was not made on a quiet machine: one process of ours is 1

HEAD = """# Benchmarks

Made from `bench/results/*.json` by `make bench`; each result is made by the command next to it. The rules:

- Both sides run in one process or one script, on the same samples, after their losses (of data: tokens and pixels) were found equal.
- Ours and the peer's take turns (after one round that is thrown away), at least five times; a ratio is the median of the pairs'
  ratios, with the least and the greatest. CPU time first: wall time depends on what else the machine does.
- One thread, float32, on a CPU. A time ratio is ours ÷ peer (smaller is better), a rate ratio too (greater is better).
"""


def write_page(results: Path, page: Path) -> None:
    """Write `page` from every result in the folder `results`, in order of their names. Refused when there is none."""
    found = [read_result(path) for path in sorted(results.glob("*.json"))]
    if not found:
        raise Refused(f"{results} has no results. Run a benchmark first: python -m bench step")
    write_atomically(page, render(found))


def render(results: Iterable[Result]) -> str:
    """The page as Markdown."""
    results = list(results)
    return "\n".join([HEAD, overview(results), "", *map(section, results)]).rstrip() + "\n"


def overview(results: Iterable[Result]) -> str:
    """One line per comparison: the ratios, the limit, and whether it is met."""
    return table(
        ("case", "compared", "ours ÷ peer, CPU time", "ours ÷ peer, wall time", "limit", "met"),
        [(r.case, c.name, ratio(c, "cpu"), ratio(c, "wall"), limit(c), yes(c.met)) for r in results for c in r.comparisons],
    )


def section(result: Result) -> str:
    """One case: what was done, every pair, and on what."""
    lines = [f"## {result.case}", "", f"`{result.command}` · {result.when}", "", result.work, "", f"Checked first: {result.agreement}.", ""]
    lines += [f"**{warning}**\n" for warning in warnings(result)]
    rows: list[tuple[str, ...]] = []
    for c in result.comparisons:
        for side, times in (("ours", c.ours), ("peer", c.peer)):
            cpu, wall = [t.cpu_s for t in times], [t.wall_s for t in times]
            rows.append((c.name, side, "  ".join(f"{s:.2f}" for s in cpu), "  ".join(f"{s:.2f}" for s in wall), rate(c, cpu)))
    lines += [table(("compared", "side", "CPU s of each pair", "wall s of each pair", "per CPU second (median)"), rows), ""]
    if result.facts:
        lines += [table(("also", "value", "limit", "met"), [(f.name, value(f), f.limit, yes(f.met)) for f in result.facts]), ""]
    e = result.environment
    packages = e.get("packages")
    versions = ", ".join(f"{k} {v}" for k, v in packages.items()) if isinstance(packages, dict) else "unknown"
    lines += [
        f"Eyeline {e.get('eyeline')} ({e.get('commit')}), Python {e.get('python')}, {versions}, accelerate {e.get('accelerate')}. "
        f"{e.get('hardware')}, {e.get('threads')} thread, {e.get('system')}. "
        f"Load average {result.load[0]:.1f} before, {result.load[1]:.1f} after.",
        "",
    ]
    return "\n".join(lines)


def warnings(result: Result) -> list[str]:
    """What forbids to quote a result."""
    out = []
    if any(len(c.ours) < LEAST_PAIRS for c in result.comparisons):
        out.append(f"A trial: fewer than {LEAST_PAIRS} pairs.")
    if max(result.load) > BUSY:
        out.append("The machine was busy with something else: wall times say nothing, and CPU times little.")
    return out


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def ratio(c: Comparison, of: str) -> str:
    """Median with least and greatest, and which way it was judged."""
    s: Spread = c.ratio("cpu_s" if of == "cpu" else "wall_s")
    return f"{s.median:.2f} ({s.low:.2f}–{s.high:.2f}){' × the rate' if c.judged == 'rate' else ''}"


def limit(c: Comparison) -> str:
    return "" if c.limit is None else f"{'≤' if c.judged == 'time' else '≥'} {c.limit:g}"


def rate(c: Comparison, seconds: list[float]) -> str:
    middle = sorted(seconds)[len(seconds) // 2]
    return f"{c.amount / middle:,.{0 if c.amount / middle > 100 else 2}f} {c.unit}"


def value(fact: Fact) -> str:
    return fact.value if isinstance(fact.value, str) else f"{fact.value:.3g}"


def yes(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "**no**"
