"""`eyeline explain RUN | TRACE`: the causes of lost time, the largest first, or that nothing stands out."""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyeline.core.errors import Refused
from eyeline.core.words import counted, percent
from eyeline.study.explain.findings import Finding, largest_first, names_of
from eyeline.study.explain.rules import OF_PROFILE, OF_RUNS, OF_STEPS, OF_TRACES, THRESHOLDS
from eyeline.study.explain.run_facts import RunFacts, facts_of_run
from eyeline.study.explain.trace_facts import TraceFacts, facts_of_trace

TRACES = ("trace.json", "trace.json.gz")


@dataclass(frozen=True)
class Explained:
    """What was found, and what the time was spent on."""

    of: str
    wall_s: float
    steps: int
    causes: list[Finding]
    spent: Mapping[str, float]  # shares of the wall time, largest first
    remarks: list[str]  # what these numbers cannot show


def explain(path: Path) -> Explained:
    """The causes in a run folder, or in a trace: a file, or the folder that `eyeline profile` writes. Refused where it is none of them."""
    if path.is_file():
        return explained_trace(path, path.parent)
    if trace := next((path / name for name in TRACES if (path / name).is_file()), None):
        return explained_trace(trace, path)
    if (path / "metrics.jsonl").is_file():
        facts = facts_of_run(path)
        causes = largest_first([rule(facts) for rule in OF_RUNS])
        return Explained(OF_STEPS, facts.wall_s, facts.steps, causes, spent_of_run(facts), remarks(facts, bool(causes)))
    if not path.exists():
        raise Refused(f"{path} does not exist")
    raise Refused(f"{path} has no metrics.jsonl and no trace.json: give a run folder, or what `eyeline profile` wrote")


def explained_trace(trace: Path, folder: Path) -> Explained:
    facts = facts_of_trace(read_events(trace), names_of(folder / "run", "", 1))
    causes = largest_first([rule(facts) for rule in OF_TRACES])
    return Explained(OF_PROFILE, facts.wall_s, facts.steps, causes, spent_of_trace(facts), [])


def read_events(path: Path) -> list[Mapping[str, Any]]:
    """The events of a Chrome trace, compressed or not."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return json.loads(data)["traceEvents"]
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise Refused(f"{path} is not a trace of PyTorch's profiler ({error}): give what `eyeline profile` wrote") from error


def spent_of_run(facts: RunFacts) -> dict[str, float]:
    return ordered({name: seconds / facts.wall_s for name, seconds in facts.spent.items()})


def spent_of_trace(facts: TraceFacts) -> dict[str, float]:
    """Shares that overlap: the host and a GPU work at the same time, and compiling is in operators."""
    busy = {"GPU busy": facts.busy_s, "GPU idle": facts.idle_s, "host active": facts.host_s} if facts.gpu else {}
    own = {} if facts.gpu else {"operators": facts.busy_s, "Python": facts.host_s}
    more = {"data wait": facts.data_wait_s, "compiling": facts.compile_s, "communication alone": facts.exchange_s}
    return ordered({name: s / facts.wall_s for name, s in {**busy, **own, **more}.items()})


def ordered(shares: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(shares.items(), key=lambda row: -row[1]))


def lines(found: Explained) -> Iterator[str]:
    """What is printed."""
    yield f"{counted(found.steps, 'step')} ({found.of.removeprefix('the ')}), {found.wall_s:,.2f} s of wall time"
    for number, one in enumerate(found.causes, 1):
        most = "the gain is not known" if one.ceiling is None else f"at most {percent(one.ceiling)} of the wall time of {one.of}"
        yield f"{number}. {one.cause}: {most}"
        yield f"   evidence: {one.evidence}"
        yield f"   ceiling: {one.computed}"
        yield f"   try: {one.counterfactual}"
    if not found.causes:
        yield f"nothing stands out: no cause takes {percent(THRESHOLDS['share'].value)} of the wall time or more"
    yield "time: " + ", ".join(f"{name.replace('_', ' ')} {percent(share)}" for name, share in found.spent.items() if share >= 0.0005)
    yield from found.remarks


def remarks(facts: RunFacts, is_explained: bool) -> list[str]:
    """What the metrics of this run cannot show, and what can."""
    found = []
    if facts.names.world > 1 and not facts.ranks:
        found.append("slow ranks, and the workers of a rank, are seen with metrics_for_all_ranks=true only")
    if not is_explained:
        found.append(
            f"what happens inside of compute is not in metrics: eyeline profile {facts.names.recipe}, and eyeline explain on its folder"
        )
    return found


def as_json(found: Explained) -> dict[str, Any]:
    return asdict(found) | {"thresholds": {name: one.value for name, one in THRESHOLDS.items()}}
