"""Throughput of this machine, and the share of it that a run reached: the rate of matrix products, then throughput and MFU from
metrics.jsonl."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eyeline.core.errors import Refused
from eyeline.core.log import say, warn
from eyeline.core.words import counted, percent
from eyeline.models.flops import peak_of
from eyeline.parallel.launch import Machine, machine
from eyeline.study.history import Step, read_history
from eyeline.train.peak import matmul_rate
from eyeline.train.run import COMPUTE

SIDES = {"cpu": 1024, "cuda": 8192}  # rows and columns of the square matrices: large enough that a device reaches its best rate
ROUNDS, ROUND_S = 5, 0.2  # the fastest round counts: a slower one shared the machine
ALWAYS = ("fp32", "bf16")  # precisions whose products are timed; that of a run in fp16, too
WARM_UP = 3  # first steps of an attempt, which compile kernels and fill caches


@dataclass(frozen=True)
class Throughput:
    """Medians over the steps of a run's last attempt."""

    precision: str
    hardware: str
    steps: int
    step_s: float
    tokens_per_s: float  # non-padding tokens
    flops_per_s: float
    data_wait: float  # share of the time


def bench(run: Path | None) -> None:
    """Print the rates of matrix products, and of a run its throughput and the share of those rates that it reached."""
    here = machine()
    reached = throughput(run) if run is not None else None
    say(f"{here.name}, threads: {here.threads}" if here.device.type == "cpu" else here.name)
    names = [*ALWAYS, *([] if reached is None or reached.precision in ALWAYS else [reached.precision])]
    peaks = {name: matmul_rate(here.device, COMPUTE[name], SIDES[here.device.type], ROUNDS, ROUND_S) for name in names}
    for name, rate in peaks.items():
        say(f"matrix products in {name}: {rate / 1e12:,.2f} TFLOP/s{_of_published(here, name, rate)}")
    if reached is not None:
        for line in lines(reached, peaks[reached.precision]):
            say(line)
        if reached.hardware != here.name:
            warn(f"the run was on {reached.hardware}, and the rates above are of {here.name}: the MFU compares two machines")


def lines(reached: Throughput, peak: float) -> list[str]:
    """The throughput of a run, and its MFU against a measured `peak` in FLOP/s."""
    return [
        f"run, median of {counted(reached.steps, 'step')} in {reached.precision}: {reached.step_s:.3f} s per step, "
        f"{reached.tokens_per_s:,.0f} tokens/s, {percent(reached.data_wait)} of the time waiting for data",
        f"model: {reached.flops_per_s / 1e12:,.3f} TFLOP/s; MFU {percent(reached.flops_per_s / peak)} of the measured matrix products",
    ]


def throughput(run: Path) -> Throughput:
    """The throughput that metrics.jsonl records. Refused where the folder has none, or too few steps."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise Refused(f"{path} does not exist, so {run} is not a run folder. Give the folder of a run, or none to measure the machine.")
    history = read_history(path)
    last = max((step.attempt for step in history.steps), default=0)
    steps = [step for step in history.steps if step.attempt == last and step.outcome == "applied" and step.flops_per_s][WARM_UP:]
    if not steps:
        raise Refused(f"{path}: the last attempt has at most {WARM_UP} steps, all of them warm-up. Train for more steps.")
    start = history.starts[-1]
    return Throughput(
        precision=str(start.get("precision", "fp32")),
        hardware=str(start.get("hardware", "unknown hardware")),
        steps=len(steps),
        step_s=_median(steps, lambda step: step.step_s),
        tokens_per_s=_median(steps, lambda step: step.real_tokens_per_s),
        flops_per_s=_median(steps, lambda step: step.flops_per_s or 0.0),
        data_wait=sum(step.seconds.get("data_wait", 0.0) for step in steps) / sum(step.step_s for step in steps),
    )


def _median(steps: list[Step], of: Callable[[Step], float]) -> float:
    return statistics.median(of(step) for step in steps)


def _of_published(here: Machine, name: str, rate: float) -> str:
    published = peak_of(here.name, name)
    return f" ({percent(rate / published)} of the published {published / 1e12:,.0f})" if published else ""
