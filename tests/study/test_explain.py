"""`eyeline explain`: the 25 traces with known causes, and each rule alone at both sides of its thresholds, by numbers made by hand."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import Refused
from eyeline.study.explain import rules
from eyeline.study.explain.explain import explain, lines
from eyeline.study.explain.findings import Finding, Names, largest_first
from eyeline.study.explain.run_facts import RankFacts, RunFacts, after_warm_up, exchange, facts_of_run, retries_of
from eyeline.study.explain.trace_facts import TraceFacts, facts_of_trace
from eyeline.study.history import Step, read_history
from tests.command import Command

FOLDER = Path(__file__).parent / "traces"
TRUTHS = {path.parent.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/truth.json"))}
TOLERANCE = 0.05  # of wall time, between a ceiling and what truth.json knows
ONE, TWO = Names("runs/a", "runs/a/recipe.yaml", "tune", 1), Names("runs/a", "runs/a/recipe.yaml", "tune", 2)
HEALTHY_RUN = RunFacts(
    steps=100,
    wall_s=100.0,
    spent={"compute": 97.0, "data_wait": 3.0},
    waiting_steps=3,
    workers=2,
    ranks={},
    exchange_s=0.0,
    unequal_s=0.0,
    imbalance={"language": 1.0, "vision": 1.0, "all": 1.0},
    retries=0,
    retry_steps=0,
    retry_s=None,
    whole_s=120.0,
    lost_s=0.0,
    lost_steps=0,
    attempts=1,
    names=ONE,
)
HEALTHY_TRACE = TraceFacts(
    steps=2,
    wall_s=1.0,
    gpu=True,
    data_wait_s=0.01,
    host_s=0.2,
    busy_s=0.97,
    idle_s=0.03,
    reads=2,
    compile_s=0.0,
    exchange_s=0.0,
    pass_s=0.1,
    passes=100,
    chained_s=0.02,
    costliest="elementwise_kernel",
    allocator_s=0.0,
    allocations=0,
    names=ONE,
)


def run(**changes: Any) -> RunFacts:
    return dataclasses.replace(HEALTHY_RUN, **changes)


def trace(**changes: Any) -> TraceFacts:
    return dataclasses.replace(HEALTHY_TRACE, **changes)


def rank(flops_per_s: float = 100.0, own_data_s: float = 0.0, waiting_steps: int = 0) -> RankFacts:
    return RankFacts(flops_per_s, 80.0, own_data_s, waiting_steps)


def causes_in(facts: RunFacts | TraceFacts) -> list[tuple[str, float | None]]:
    """All rules of this kind of facts: a number that one rule names must not make another name something."""
    found = [rule(facts) for rule in rules.OF_RUNS] if isinstance(facts, RunFacts) else [rule(facts) for rule in rules.OF_TRACES]
    return [(one.cause, one.ceiling and round(one.ceiling, 6)) for one in largest_first(found)]


@pytest.mark.parametrize("name", TRUTHS)
def test_causes_and_ceilings_of_a_trace(name: str) -> None:
    found = explain(FOLDER / name)
    assert [one.cause for one in found.causes] == TRUTHS[name]["causes"]
    for one in found.causes:
        known = TRUTHS[name]["ceiling"][one.cause]
        assert known is None or one.ceiling == pytest.approx(known, abs=TOLERANCE)
        assert one.of == f"the {TRUTHS[name]['ceiling_of'].replace('steps from the fourth on', 'steps after warm-up').removeprefix('the ')}"


@pytest.mark.parametrize(
    ("under", "over", "named"),
    [
        (run(spent={"data_wait": 9.9}, waiting_steps=80), run(spent={"data_wait": 10.0}, waiting_steps=80), "data_wait"),
        (run(spent={"data_wait": 9.9}), run(spent={"data_wait": 10.0}), "slow_worker"),
        (run(spent={"host_starved": 9.9}), run(spent={"host_starved": 10.0}), "launch_gaps"),
        (run(exchange_s=9.9), run(exchange_s=10.0), "communication"),
        (run(unequal_s=9.9), run(unequal_s=10.0), "imbalance"),
        (run(spent={"validation": 9.9}), run(spent={"validation": 10.0}), "validation"),
        (run(spent={"checkpoint": 9.9}), run(spent={"checkpoint": 10.0}), "checkpoint"),
        (run(lost_s=9.9, whole_s=100.0), run(lost_s=10.0, whole_s=100.0), "lost_work"),
        (run(retries=50, retry_steps=50, retry_s=0.198), run(retries=50, retry_steps=50, retry_s=0.2), "fragmentation"),
        (trace(data_wait_s=0.099), trace(data_wait_s=0.1), "data_wait"),
        (trace(host_s=0.899, busy_s=0.8), trace(host_s=0.901, busy_s=0.8), "launch_gaps"),
        (trace(reads=20, busy_s=0.891), trace(reads=20, busy_s=0.889), "host_reads"),
        (trace(chained_s=0.099), trace(chained_s=0.101), "memory_bound"),
        (trace(compile_s=0.099), trace(compile_s=0.1), "recompilation"),
        (trace(exchange_s=0.099), trace(exchange_s=0.1), "communication"),
        (trace(allocator_s=0.099), trace(allocator_s=0.1), "fragmentation"),
    ],
)
def test_a_tenth_of_wall_time_names_a_cause(under: RunFacts | TraceFacts, over: RunFacts | TraceFacts, named: str) -> None:
    assert causes_in(HEALTHY_RUN) == causes_in(HEALTHY_TRACE) == causes_in(under) == []
    assert causes_in(over) == [(named, pytest.approx(0.1, abs=0.0011))]


def test_rare_waits_are_those_of_one_worker() -> None:
    waits: dict[str, Any] = {"spent": {"data_wait": 40.0}}
    assert causes_in(run(**waits, workers=4, waiting_steps=18)) == [("slow_worker", 0.4)]  # 75 steps ÷ 4 workers is 18.75
    assert causes_in(run(**waits, workers=4, waiting_steps=19)) == [("data_wait", 0.4)]
    assert causes_in(run(**waits, workers=1, waiting_steps=18)) == [("data_wait", 0.4)]  # none to be slower than
    assert causes_in(run(**waits, workers=0, waiting_steps=18)) == [("data_wait", 0.4)]
    assert causes_in(run(**waits, workers=None, waiting_steps=18)) == [("data_wait", 0.4)]


def test_waits_of_one_rank_alone_are_its_workers() -> None:
    waits: dict[str, Any] = {"spent": {"data_wait": 40.0}, "waiting_steps": 100, "names": TWO}
    uneven, even = ({0: rank(own_data_s=least), 1: rank(own_data_s=40.0)} for least in (9.9, 10.0))
    assert causes_in(run(**waits, ranks=uneven, workers=1)) == [("slow_worker", 0.4)]
    assert causes_in(run(**waits, ranks=even, workers=1)) == [("data_wait", 0.4)]
    assert causes_in(run(**waits, ranks=uneven, workers=0)) == [("data_wait", 0.4)]


def test_a_slow_rank_has_less_than_three_quarters_of_the_rate() -> None:
    slow, usual = ({0: rank(), 1: rank(rate), 2: rank(110.0)} for rate in (78.0, 79.0))  # of a median of 105: 78.75
    assert causes_in(run(ranks=slow)) == [("slow_rank", pytest.approx((1 - 78 / 105) * 0.8, abs=1e-6))]
    assert causes_in(run(ranks=usual)) == []
    few = {0: RankFacts(100.0, 80.0, 0.0, 0), 1: RankFacts(50.0, 19.0, 0.0, 0)}  # it computes for 19 of 100 s
    assert causes_in(run(ranks=few)) == []


def test_retries_of_a_few_steps_are_not_fragmentation() -> None:
    assert causes_in(run(retries=90, retry_steps=9, retry_s=0.3)) == []
    assert causes_in(run(retries=90, retry_steps=10, retry_s=0.3)) == [("fragmentation", 0.27)]
    assert causes_in(run(retries=100, retry_steps=100, retry_s=None)) == [("fragmentation", None)]


def test_python_counts_on_a_cpu_from_three_tenths() -> None:
    cpu: dict[str, Any] = {"gpu": False, "idle_s": 0.0, "reads": 0}
    assert causes_in(trace(**cpu, host_s=0.299, busy_s=0.701)) == []
    assert causes_in(trace(**cpu, host_s=0.3, busy_s=0.7)) == [("launch_gaps", 0.3)]


def test_the_one_read_of_each_step_is_not_a_cause() -> None:
    assert causes_in(trace(reads=2, busy_s=0.5)) == []
    assert causes_in(trace(reads=3, busy_s=0.5)) == [("host_reads", 0.49)]  # without 0.01 s of waiting for data


def test_shorter_kernels_win_nothing_where_the_host_is_slower() -> None:
    assert causes_in(trace(host_s=0.95, busy_s=0.5, chained_s=0.3)) == [("launch_gaps", 0.45)]
    assert causes_in(trace(host_s=0.75, busy_s=0.97, chained_s=0.3)) == [("memory_bound", 0.22)]


def test_the_larger_cause_comes_first_and_an_unknown_one_last() -> None:
    both = run(spent={"data_wait": 20.0, "checkpoint": 30.0}, waiting_steps=90, retries=100, retry_steps=100)
    assert [name for name, _ in causes_in(both)] == ["checkpoint", "data_wait", "fragmentation"]


def test_counterfactuals_of_ranks_train_again() -> None:
    waits: dict[str, Any] = {"spent": {"data_wait": 40.0}, "waiting_steps": 90}
    one, two = (rules.data_wait(run(**waits, names=names)) for names in (ONE, TWO))
    assert one is not None and "eyeline compare runs/a/recipe.yaml --vary stages.tune.data.workers=2,4" in one.counterfactual
    assert two is not None and "eyeline train runs/a/recipe.yaml --nproc 2 stages.tune.data.workers=4 out=OTHER" in two.counterfactual


def test_the_slope_of_retries_is_what_one_costs() -> None:
    warm = steps_of("17-allocator-retries")
    some = [
        step.model_copy(update={"allocator_retries": n, "seconds": {"compute": s}})
        for step, n, s in zip(warm, (2, 2, 5), (1, 2, 5), strict=False)
    ]
    assert retries_of(some, some) == ([2, 0, 3], pytest.approx(33 / 42))  # deviations (1/3, -5/3, 4/3) and (-5/3, -2/3, 7/3)
    assert retries_of(some[:2], some[1:2]) == ([0], None)


def test_exchange_is_that_of_the_rank_that_waits_least() -> None:
    warm = [step.model_copy(update={"seconds": {"communication": 9.0}}) for step in steps_of("17-allocator-retries")[:2]]
    first = warm[0].global_step
    ranks = {number: [{"global_step": first, "communication_s": wait}] for number, wait in enumerate((5.0, 0.5))}
    assert exchange(warm, ranks) == 0.5 + 9.0  # the second step has no lines of ranks
    assert exchange(warm, {}) == 18.0


def test_the_first_steps_of_each_stage_and_attempt_are_left_out() -> None:
    step = steps_of("17-allocator-retries")[0]
    of = [(1, 0)] * 5 + [(1, 1)] * 4 + [(2, 1)] * 4
    steps = [step.model_copy(update={"attempt": a, "stage_index": s, "global_step": n}) for n, (a, s) in enumerate(of)]
    assert [one.global_step for one in after_warm_up(steps)] == [3, 4, 8, 12]


def steps_of(name: str) -> list[Step]:
    return list(read_history(FOLDER / name / "metrics.jsonl").steps)


def event(name: str, cat: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid}


def test_a_trace_by_hand_has_its_times() -> None:
    events = [
        event("step 4", "user_annotation", 0, 100),
        event("aten::copy_", "cpu_op", 10, 60),  # data until here; the GPU is busy until 4
        event("cudaStreamSynchronize", "cuda_runtime", 30, 50),
        event("cudaFree", "cuda_runtime", 50, 55),
        event("gemm of the step before", "kernel", 0, 4, 7),
        event("elementwise_kernel", "kernel", 12, 22, 7),
        event("reduce_kernel", "kernel", 22, 26, 7),
        event("gemm", "kernel", 26, 56, 7),
        event("elementwise_kernel", "kernel", 56, 60, 7),
        event("ncclDevKernel_AllGather", "kernel", 50, 80, 9),
        event("cudaStreamSynchronize", "cuda_runtime", 150, 160),  # after the step
    ]
    found = facts_of_trace(events, ONE)
    microseconds = {
        name: round(getattr(found, name) * 1e6, 6) for name in ("data_wait_s", "host_s", "busy_s", "idle_s", "exchange_s", "pass_s")
    }
    assert microseconds == {"data_wait_s": 6, "host_s": 65, "busy_s": 72, "idle_s": 28, "exchange_s": 20, "pass_s": 18}
    assert (found.reads, found.passes, found.allocations, found.gpu) == (1, 3, 1, True)
    assert round(found.chained_s * 1e6, 6) == 4  # of 10 and 4 the longer one stays; the last is a chain of its own
    assert round(found.allocator_s * 1e6, 6) == 5


def test_a_step_of_one_cpu_is_operators_and_python() -> None:
    events = [
        event("step 4", "user_annotation", 0, 1000),
        event("aten::mul", "cpu_op", 100, 200),
        event("aten::abs", "cpu_op", 200, 260),
        event("aten::t", "cpu_op", 260, 270),  # too short to be a pass
        event("aten::mm", "cpu_op", 400, 600),
        event("compile_inner (dynamo_timed)", "cpu_op", 600, 900),
        event("aten::add", "cpu_op", 700, 800),  # of the compiler
    ]
    found = facts_of_trace(events, ONE)
    times = (found.data_wait_s, found.host_s, found.busy_s, found.compile_s, found.pass_s, found.chained_s)
    assert [round(s * 1e6, 6) for s in times] == [100, 230, 670, 300, 160, 60]


def test_what_is_not_a_run_or_a_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    with pytest.raises(Refused, match="no range named 'step N'"):
        explain(tmp_path)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(b"[1]"))
    with pytest.raises(Refused, match="not a trace of PyTorch's profiler"):
        explain(tmp_path / "trace.json.gz")
    with pytest.raises(Refused, match="does not exist"):
        explain(tmp_path / "nothing")
    (tmp_path / "run").mkdir()
    with pytest.raises(Refused, match=r"no metrics.jsonl and no trace.json"):
        explain(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(Refused, match="no step after warm-up"):
        facts_of_run(tmp_path / "run")


def test_the_command_prints_causes_and_writes_them(eyeline: Command, tmp_path: Path) -> None:
    out = tmp_path / "causes.json"
    told = eyeline("explain", str(FOLDER / "13-sleeping-loader-and-checkpoints"), "--out", str(out))
    assert told.code == 0
    assert "1. data_wait: at most 55.8% of the wall time of the steps after warm-up" in told.out
    assert "2. checkpoint: at most 15.7%" in told.out
    assert [one["cause"] for one in json.loads(out.read_text())["causes"]] == ["data_wait", "checkpoint"]
    healthy = eyeline("explain", str(FOLDER / "25-eight-gpus"))
    assert healthy.code == 0 and "nothing stands out: no cause takes 10.0% of the wall time or more" in healthy.out


def test_the_page_has_the_thresholds_and_a_real_output() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")
    for name, one in rules.THRESHOLDS.items():
        assert f"| `{name}` | {one.value} | {one.reason} |" in page
    shown = [line for line in lines(explain(FOLDER / "13-sleeping-loader-and-checkpoints")) if "recipe.yaml" not in line]
    assert "\n".join(shown[:4]) in page and shown[-1] in page


def test_an_unknown_ceiling_is_told() -> None:
    found = explain(FOLDER / "21-demo")
    unknown = Finding("fragmentation", None, "the steps after warm-up", "many", "slope", "less")
    assert "1. fragmentation: the gain is not known" in list(lines(dataclasses.replace(found, causes=[unknown])))
