"""`eyeline profile RECIPE`: some steps under PyTorch's profiler, after warm-up, and as many without it to check them against.

The real loop trains the recipe, in a run folder of its own; validation and checkpoints are left out. Written are the trace (for
chrome://tracing or ui.perfetto.dev), a table of time by part of the model, pass and class of operators, and the memory over time.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from eyeline.core.errors import Refused
from eyeline.core.files import make_folder, write_json
from eyeline.core.log import say
from eyeline.core.words import counted, percent
from eyeline.study.history import read_history
from eyeline.study.trace import PART, STEP, Spent, memory_timeline, spent_in
from eyeline.train.loop import train
from eyeline.train.run import Run
from eyeline.train.schedule import Constant

TABLE_ROWS = 20


class Profiler:
    """Starts and stops the profiler between two steps, and marks steps and parts in its trace."""

    def __init__(self, warm_up: int, steps: int, trace: Path) -> None:
        self.first, self.end, self.trace = warm_up, warm_up + steps, trace
        self._profile: Any = None
        self._step: Any = None

    def at_step(self, step: int, model: nn.Module) -> None:
        """Called before the data of each step arrive; `step` counts from 0."""
        if step == 0:
            mark_parts(model)
        if step == self.first:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities, profile_memory=True)
            self._profile.start()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if step == self.end:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.trace))
            self._profile = None
        elif self._profile is not None:
            self._step = record_function(f"{STEP}{step + 1}")
            self._step.__enter__()


def mark_parts(model: nn.Module) -> None:
    """Have the forward passes of the parts, and of the head, appear in a trace under their names."""
    named = dict(model.named_modules())
    for name in (*(name for name, _ in model.named_children()), "language.head"):
        module, name = named[name], name.removeprefix("language.")
        marks: list[Any] = []

        def enter(_module: nn.Module, _inputs: Any, name: str = name, marks: list[Any] = marks) -> None:
            marks.append(record_function(PART + name))
            marks[-1].__enter__()

        def leave(_module: nn.Module, _inputs: Any, _output: Any, marks: list[Any] = marks) -> None:
            marks.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def profiled_run(run: Run, stage: str | None, warm_up: int, steps: int, out: Path) -> Run:
    """One stage of the recipe, long enough for steps with the profiler and as many without, and nothing but training."""
    names = [one.name for one in run.stages]
    if stage is not None and stage not in names:
        raise Refused(f"--stage {stage}: the recipe has {', '.join(names)}")
    chosen = run.stages[names.index(stage) if stage is not None else -1]
    length = {"steps": warm_up + 2 * steps + 1, "epochs": None, "schedule": Constant()}
    only = chosen.model_copy(update=length)
    changes = {"stages": (only,), "out": str(out / "run"), "validation_steps": None, "validation_samples": 0, "save_steps": None}
    return run.model_copy(update=changes | {"save_minutes": None, "report_to": (), "report_online": False})


def profile_recipe(run: Run, stage: str | None, warm_up: int, steps: int, out: Path) -> None:
    """Profile, print the tables, and write what they are made of into `out`. Refused where something is there already."""
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty. Choose another --out, or delete it")
    make_folder(out)
    profiler = Profiler(warm_up, steps, out / "trace.json")
    train(profiled_run(run, stage, warm_up, steps, out), at_step=profiler.at_step)
    events = json.loads((out / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    spent, memory = spent_in(events), memory_timeline(events)
    timed = read_history(out / "run" / "metrics.jsonl").steps
    with_it, without = ([one.step_s for one in some] for some in (timed[warm_up : warm_up + steps], timed[warm_up + steps + 1 :]))
    found = summary(spent, memory, with_it, without)
    write_json(out / "profile.json", found)
    for table in tables(spent, steps):
        Console().print(table)
    for line in remarks(found):
        say(line)
    say(f"trace: {out / 'trace.json'} (open it in ui.perfetto.dev or chrome://tracing); numbers: {out / 'profile.json'}")


def summary(spent: Spent, memory: Sequence[tuple[float, int]], with_it: Sequence[float], without: Sequence[float]) -> dict[str, Any]:
    """All numbers, as plain JSON. Seconds of all profiled steps together."""

    def rows(times: Any) -> list[dict[str, Any]]:
        return [{**key._asdict(), "seconds": us / 1e6} for key, us in sorted(times.items(), key=lambda item: -item[1])]

    return {
        "steps": len(with_it),
        "profiled_s": spent.total / 1e6,
        "operators": rows(spent.operators),
        "host_s": spent.host / 1e6,
        "device": rows(spent.device),
        "device_idle_s": spent.device_idle / 1e6,
        "step_s_profiled": list(with_it),
        "step_s_unprofiled": list(without),
        "memory": {"peak_bytes_over_start": max((size for _, size in memory), default=0), "timeline_ms_bytes": thinned(memory)},
    }


def thinned(memory: Sequence[tuple[float, int]], most: int = 2_000) -> list[tuple[float, int]]:
    """The largest of as many neighbours as leave at most `most` points."""
    every = max(1, -(-len(memory) // most))
    return [max(memory[at : at + every], key=lambda point: point[1]) for at in range(0, len(memory), every)]


def tables(spent: Spent, steps: int) -> list[Table]:
    """Time by part and pass, and by class of operators, per step."""
    times = spent.device or spent.operators
    whose = "GPU time" if spent.device else "time of operators on the CPU"
    rest = ("GPU idle", spent.device_idle) if spent.device else ("host: Python, data, waiting", spent.host)
    by_part = Counter[str]()
    by_kind = Counter[str]()
    for key, us in times.items():
        by_part[f"{key.part} {key.work}" if key.part != "–" else key.work] += us  # type: ignore[assignment]
        by_kind[key.kind] += us  # type: ignore[assignment]
    found = []
    for title, rows in ((f"{whose} by part and pass", by_part), (f"{whose} by class of operators", by_kind)):
        table = Table(title=title, title_justify="left")
        for name in ("", "ms per step", "share"):
            table.add_column(name, justify="right" if name else "left")
        for name, us in [*rows.most_common(TABLE_ROWS), rest, ("all", spent.total)]:
            table.add_row(name, f"{us / steps / 1000:,.2f}", percent(us / spent.total), style="bold" if name == "all" else None)
        found.append(table)
    return found


def remarks(found: dict[str, Any]) -> list[str]:
    """How far the profile can be trusted, and the memory."""
    with_it, without = (sum(found[name]) / len(found[name]) for name in ("step_s_profiled", "step_s_unprofiled"))
    peak = found["memory"]["peak_bytes_over_start"]
    more = with_it / without - 1
    cost = (
        f"{percent(more)} more is the profiler's, most of it at small operators"
        if more > 0
        else "times swing here by more than the profiler costs, so shares are all that the tables say"
    )
    return [
        f"a step took {with_it * 1000:,.1f} ms with the profiler and {without * 1000:,.1f} ms without it (means of "
        f"{counted(found['steps'], 'step')}): {cost}",
        f"memory: {peak / 2**20:,.1f} MiB more at its highest than where the first profiled step starts",
    ]
