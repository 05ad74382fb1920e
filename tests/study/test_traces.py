"""The traces with planted causes: each is complete, loads with the readers of runs and profiles, and those that are made are made again."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eyeline.study.history import json_lines, read_history
from eyeline.study.ledger import read_ledger
from eyeline.study.trace import STEP, memory_timeline, spent_in
from tests.study.make_traces import TRACES, truth_of
from tests.study.record_traces import RECORDED

FOLDER = Path(__file__).parent / "traces"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/truth.json"))
CAUSES = {  # what may be lost time's cause; README.md of the traces defines each
    "checkpoint",
    "communication",
    "data_wait",
    "fragmentation",
    "host_reads",
    "imbalance",
    "launch_gaps",
    "lost_work",
    "memory_bound",
    "recompilation",
    "slow_rank",
    "slow_worker",
    "validation",
}


def truth(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "truth.json").read_text())


def trace_of(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((FOLDER / name / "trace.json.gz").read_bytes()))


def test_there_are_20_with_causes_and_5_healthy() -> None:
    truths = {name: truth(name) for name in NAMES}
    faulty = [one for one in truths.values() if one["causes"]]
    assert (len(faulty), len(truths)) == (20, 25)
    assert {cause for one in faulty for cause in one["causes"]} == CAUSES
    assert sum(one["origin"] == "recorded" for one in faulty) >= 10
    assert sum(len(one["causes"]) == 2 for one in faulty) == 2
    assert {name for name, one in truths.items() if one["origin"] == "made"} == set(TRACES)
    assert {name for name, one in truths.items() if one["origin"] == "recorded"} == set(RECORDED)
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{cause}`" in readme for cause in CAUSES)


@pytest.mark.parametrize("name", NAMES)
def test_a_truth_is_complete(name: str) -> None:
    found = truth(name)
    assert list(found) == ["causes", "fault", "origin", "form", "ceiling", "ceiling_of"]
    assert found["origin"] in ("recorded", "made") and found["form"] in ("run", "profile") and found["fault"]
    assert list(found["ceiling"]) == found["causes"] and set(found["causes"]) <= CAUSES
    assert all(share is None or 0.1 < share < 1 for share in found["ceiling"].values())
    assert found["ceiling_of"] in ("profiled steps", "steps from the fourth on", "whole run")
    assert sum(path.stat().st_size for path in (FOLDER / name).rglob("*")) < 500_000


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_loads(name: str) -> None:
    folder, profile = FOLDER / name, truth(name)["form"] == "profile"
    run = folder / "run" if profile else folder
    history, ledger = read_history(run / "metrics.jsonl"), read_ledger(run / "metrics.jsonl")
    assert len(history.steps) >= (4 if profile else 20) and history.unreadable == 0 and history.stages
    for step in history.steps:
        assert sum(step.seconds.values()) == pytest.approx(step.step_s, abs=1e-6)
        assert min(step.seconds.values()) >= 0
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s) and ledger.goodput > 0
    for path in (run / "metrics-ranks").glob("*.jsonl"):
        assert len([*json_lines(path)]) == len(history.steps)
    if profile:
        events = trace_of(name)["traceEvents"]
        spent = spent_in(events)
        windows = [e for e in events if e.get("ph") == "X" and e["cat"] == "user_annotation" and e["name"].startswith(STEP)]
        warm_up = min(int(e["name"].removeprefix(STEP)) for e in windows) - 1
        assert len(history.steps) == warm_up + 2 * len(windows) + 1
        assert spent.total == pytest.approx(sum(e["dur"] for e in windows))
        assert memory_timeline(events)


@pytest.mark.parametrize("name", TRACES)
def test_a_made_trace_is_made_again(name: str) -> None:
    files = TRACES[name].files()
    stored = {str(path.relative_to(FOLDER / name)) for path in (FOLDER / name).rglob("*") if path.is_file()}
    assert stored == {f"{path}.gz" if path == "trace.json" else path for path in files} | {"truth.json"}
    for path, text in files.items():
        at = FOLDER / name / path
        assert (gzip.decompress(at.with_name("trace.json.gz").read_bytes()) if path == "trace.json" else at.read_bytes()) == text.encode()
    assert truth(name) == truth_of(name)


def test_made_lines_have_the_fields_of_recorded_ones() -> None:
    """Lines of today's version may have more: what was added since."""

    def fields(path: Path, kind: str) -> set[str]:
        return {key for line in json_lines(path) if line and line.get("kind", "rank") == kind for key in line}

    for kind in ("start", "stage", "step", "end", "validation"):
        recorded = {key for name in RECORDED for path in (FOLDER / name).glob("**/metrics.jsonl") for key in fields(path, kind)}
        for name in TRACES:
            for path in (FOLDER / name).glob("**/metrics.jsonl"):
                assert not fields(path, kind) or fields(path, kind) == recorded, (name, kind)
    recorded = {key for name in RECORDED for path in (FOLDER / name).glob("metrics-ranks/*") for key in fields(path, "rank")}
    for name in TRACES:
        for path in (FOLDER / name).glob("metrics-ranks/*"):
            assert fields(path, "rank") == recorded, name
