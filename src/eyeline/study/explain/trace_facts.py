"""What a profiler's trace says about lost time: of each moment of the profiled steps, what the host did and whether a GPU computed."""

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyeline.core.errors import Refused
from eyeline.study.explain.findings import Names
from eyeline.study.trace import STEP, covered, is_backward, kind_of, spent_in, with_self_time

Span = tuple[float, float]  # microseconds
COMPILING = re.compile(r"\(dynamo_timed\)|^entire_frame_compile|^entire_backward_compile|^inductor_compile")
WAITING = re.compile(r"^(cuda|hip)\w*Synchronize")  # the host waits for the device, most often to read a number
ALLOCATING = re.compile(r"^(cuda|hip)(Malloc|Free)(Async)?$|^cuMem(Create|Map|Unmap|Release)")
EXCHANGE = re.compile(r"nccl|rccl", re.IGNORECASE)
COMPUTE = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|wgmma|flash|fmha|attn|attention|conv|grouped_mm|matmul", re.IGNORECASE)
PASS = re.compile(  # kernels that read and write, and compute little
    r"elementwise|reduce_kernel|triton_(poi|red|per)|softmax|layer_norm|rms_norm|copy|cat|index|gather|scatter", re.IGNORECASE
)
NO_PASS = ("products", "attention", "loss", "optimizer", "autograd")  # classes of operators on a CPU
PASS_US = 20.0  # a shorter operator on a CPU is the cost of calling it: it moves less than about 100 KB


@dataclass(frozen=True)
class TraceFacts:
    """Seconds over the profiled steps."""

    steps: int
    wall_s: float
    gpu: bool
    data_wait_s: float  # from the start of a step to its first operator; with a GPU, as far as that was idle
    host_s: float  # the host was active: with a GPU all but waiting for data and for the GPU; else time that no operator accounts for
    busy_s: float  # a kernel ran on the GPU; else operators on the CPU
    idle_s: float  # no kernel ran
    reads: int  # times that the host waited for the device within steps
    compile_s: float
    exchange_s: float  # kernels of communication, with no other one at the same time
    pass_s: float  # passes over memory
    passes: int
    chained_s: float  # of them, all but the longest of each chain: what one kernel per chain would save
    costliest: str  # the name with most of that time
    allocator_s: float  # the driver was asked for memory, or given it back
    allocations: int  # how often
    names: Names


def facts_of_trace(events: Sequence[Mapping[str, Any]], names: Names) -> TraceFacts:
    """The facts of a trace. Refused where it has no step of ours."""
    marks = [e for e in events if e.get("cat") == "user_annotation" and str(e["name"]).startswith(STEP)]
    if not marks:
        raise Refused(f"the trace has no range named '{STEP}N': give a trace that `eyeline profile` wrote")
    windows = sorted((e["ts"], e["ts"] + e["dur"]) for e in marks)
    main = marks[0]["tid"]
    ran = [e for e in events if e.get("ph") == "X" and is_inside(e, windows)]
    host = [e for e in ran if e.get("cat") in ("cpu_op", "user_annotation") and not str(e["name"]).startswith(STEP)]
    threads = {main, *(e["tid"] for e in host if is_backward(e))}
    kernels = [e for e in ran if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [e for e in ran if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["tid"] in threads]
    compiling = [e for e in host if COMPILING.search(e["name"])]
    waits, allocating = ([e for e in calls if pattern.search(e["name"])] for pattern in (WAITING, ALLOCATING))
    leading = leading_gaps(windows, [e for e in host if e["tid"] == main])
    total = sum(end - start for start, end in windows)
    busy = covered(map(span, kernels))
    lead = sum(end - start for start, end in leading)
    taken = covered([*map(span, compiling), *map(span, waits), *map(span, allocating), *leading])
    passes = gpu_chains(kernels) if kernels else cpu_chains(ran, main)
    outside_us = max(spent_in(events).host, 0.0)  # of operators
    compute = covered(span(e) for e in kernels if not EXCHANGE.search(e["name"]))
    return TraceFacts(
        steps=len(windows),
        wall_s=total / 1e6,
        gpu=bool(kernels),
        data_wait_s=(without(leading, [span(e) for e in kernels]) if kernels else lead) / 1e6,
        host_s=(total - taken if kernels else max(outside_us - lead, 0.0)) / 1e6,
        busy_s=(busy if kernels else total - outside_us) / 1e6,
        idle_s=(total - busy if kernels else 0.0) / 1e6,
        reads=len(waits),
        compile_s=covered(map(span, compiling)) / 1e6,
        exchange_s=(busy - compute) / 1e6,
        pass_s=sum(us for chain in passes for _, us in chain) / 1e6,
        passes=sum(map(len, passes)),
        chained_s=sum(sum(us for _, us in chain) - max(us for _, us in chain) for chain in passes) / 1e6,
        costliest=costliest(passes),
        allocator_s=covered(map(span, allocating)) / 1e6,
        allocations=len(allocating),
        names=names,
    )


def span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def is_inside(event: Mapping[str, Any], windows: Sequence[Span]) -> bool:
    at = bisect.bisect_right(windows, (event["ts"], float("inf"))) - 1
    return at >= 0 and event["ts"] < windows[at][1]


def leading_gaps(windows: Sequence[Span], own: Iterable[Mapping[str, Any]]) -> list[Span]:
    """From the start of each step to the first operator of the main thread: the loop waits for its batch there."""
    starts = sorted(e["ts"] for e in own)
    found = []
    for start, end in windows:
        at = bisect.bisect_left(starts, start)
        found.append((start, min(starts[at], end) if at < len(starts) else end))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """The length of spans outside of others."""
    return covered([*spans, *others]) - covered(others)


def gpu_chains(kernels: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, float]]]:
    """Runs of passes over memory, one after another on a stream, with nothing else between them: (name, microseconds) of each."""
    chains: list[list[tuple[str, float]]] = []
    open_at: dict[Any, list[tuple[str, float]]] = {}
    for event in sorted(kernels, key=lambda e: e["ts"]):
        name, stream = str(event["name"]), event["tid"]
        if PASS.search(name) and not (COMPUTE.search(name) or EXCHANGE.search(name)) and event["cat"] == "kernel":
            if stream not in open_at:
                chains.append(open_at.setdefault(stream, []))
            open_at[stream].append((name, event["dur"]))
        else:
            open_at.pop(stream, None)
    return chains


def cpu_chains(ran: Sequence[Mapping[str, Any]], main: Any) -> list[list[tuple[str, float]]]:
    """The same of operators on the main thread. Graphs of a compiler, and operators of other libraries, are no passes."""
    own = sorted((e for e in ran if e.get("cat") == "cpu_op" and e["tid"] == main), key=lambda e: (e["ts"], -e["dur"]))
    chains: list[list[tuple[str, float]]] = []
    chain: list[tuple[str, float]] = []
    for event, self_us, stack in with_self_time(own):
        name = str(event["name"])
        if kind_of(name) in NO_PASS or any(COMPILING.search(str(one["name"])) for one in stack):
            chain = []
        elif name.startswith("aten::") and self_us >= PASS_US:
            if not chain:
                chains.append(chain)
            chain.append((name, self_us))
    return chains


def costliest(chains: Iterable[Sequence[tuple[str, float]]]) -> str:
    """The name of the passes with the most time."""
    times: Counter[str] = Counter()
    for name, us in (one for chain in chains for one in chain):
        times[name] += us  # type: ignore[assignment]  # microseconds are no whole numbers
    return times.most_common(1)[0][0] if times else ""
