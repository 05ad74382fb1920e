"""`eyeline compare RECIPE --vary KEY=A,B`: is one value of a setting faster than another, and by how much?

Both are trained on the same work, in launches of their own that take turns (A B, B A, A B, …), so that a machine that slows down slows
both. Work is equal only if every step of every launch had the same samples, tokens and FLOPs: that is looked up, never assumed. A launch
is one number: the wall time of its steps without startup, compiling and the first few steps. Run the same command again to resume.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eyeline.core.errors import Refused
from eyeline.core.files import make_folder, read_lines, write_json
from eyeline.core.log import say, visible
from eyeline.core.words import counted, percent
from eyeline.study.history import History, Step, read_history
from eyeline.study.pairs import Ratio, ratio_of
from eyeline.study.side_by_side import WARM_UP, differing, stamps
from eyeline.train.run import Run, leaves

NOT_TRAINING = ("startup", "compile", "validation", "checkpoint")  # seconds that are no part of a launch's number
WORK = ("sample_ids", "slots", "real", "visual", "supervised", "documents", "images", "patches")  # of a step, and its FLOPs by part
Launch = Callable[[Sequence[str], Path], int]  # overrides, a file for its output -> exit code


@dataclass(frozen=True)
class Varied:
    """A setting and its values; the first is the one that others are compared with."""

    key: str
    values: tuple[str, ...]

    def override(self, value: str) -> str:
        return f"{self.key}={value}"


@dataclass(frozen=True)
class Launched:
    """One launch of one value."""

    value: str
    history: History
    seconds: float  # of its steps after warm-up, without what is not training
    steps: int
    startup_s: float
    compile_s: float


def varied(text: str) -> Varied:
    """`KEY=A,B` as typed. Commas inside of brackets separate nothing."""
    key, _, rest = text.partition("=")
    values, depth = [""], 0
    for character in rest:
        depth += (character in "[{(") - (character in ")}]")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    values = [value.strip() for value in values]
    if not key.strip() or len(values) < 2 or not all(values) or len(set(values)) < len(values):
        raise Refused(f"--vary {text}: wanted KEY=A,B with two or more different values, such as --vary threads=1,2")
    return Varied(key.strip(), tuple(values))


def compare(run_of: Callable[[Sequence[str]], Run], recipe: str, overrides: Sequence[str], vary: Varied, repeats: int, out: Path) -> None:
    """Train every value `repeats` times in turns, and print what their times say. `run_of` reads the recipe with overrides: all problems
    are found before the first launch."""
    runs = {value: run_of([*overrides, vary.override(value)]) for value in vary.values}
    refuse_unequal_settings(vary, runs)
    make_folder(out)
    launch: Launch = lambda more, log: in_new_process(recipe, [*overrides, *more], log)  # noqa: E731 - a name for a type
    launched = launches(vary, repeats, out, launch)
    refuse_unequal_work(vary, launched)
    found = results(vary, launched)
    write_json(out / "compare.json", summary(vary, launched, found))
    show(vary, launched, found)
    say(f"written: {out / 'compare.json'}")


def refuse_unequal_settings(vary: Varied, runs: Mapping[str, Run]) -> None:
    """Raise Refused where two values resolve to the same recipe: they would be compared with themselves."""
    known: dict[str, str] = {}
    for value, run in runs.items():
        settings = str(sorted((name, str(leaf)) for name, leaf in leaves(run.model_dump(mode="json")).items()))
        if settings in known:
            raise Refused(f"--vary: {vary.override(known[settings])} and {vary.override(value)} are the same recipe. Give other values")
        known[settings] = value


def launches(vary: Varied, repeats: int, out: Path, launch: Launch) -> list[list[Launched]]:
    """For each repeat, a launch of each value in the order of `vary`. Every second repeat starts them in the other order."""
    found: list[list[Launched]] = []
    for repeat in range(repeats):
        order = vary.values if repeat % 2 == 0 else vary.values[::-1]
        of_repeat: dict[str, Launched] = {}
        for value in order:
            folder = out / f"{repeat + 1}-{vary.values.index(value) + 1}"
            if not has_ended(folder):
                say(f"launch {len(found) * len(vary.values) + len(of_repeat) + 1} of {repeats * len(vary.values)}: {vary.override(value)}")
                log = out / f"{folder.name}.log"
                if code := launch([vary.override(value), f"out={folder}"], log):
                    tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
                    raise Refused(f"the launch of {vary.override(value)} ended with code {code}; the end of {log}:\n  {tail}")
            of_repeat[value] = launched_in(folder, value)
        found.append([of_repeat[value] for value in vary.values])
    return found


def in_new_process(recipe: str, overrides: Sequence[str], log: Path) -> int:
    """`eyeline train` in a process of its own; its exit code."""
    with open(log, "ab") as file:
        return subprocess.run(
            [sys.executable, "-m", "eyeline", "train", recipe, *overrides], stdout=file, stderr=file, check=False
        ).returncode


def has_ended(folder: Path) -> bool:
    """Return whether a launch was trained to its end, in one attempt."""
    lines = read_lines(folder / "metrics.jsonl")
    starts = sum(line.get("kind") == "start" for line in lines)
    if starts > 1 or (starts and lines[-1].get("outcome") != "done"):
        raise Refused(f"{folder} was interrupted, and a launch is measured in one piece. Delete that folder, and run the command again")
    return bool(starts)


def launched_in(folder: Path, value: str) -> Launched:
    """A launch, by what it wrote. Refused where it has too few steps."""
    history = read_history(folder / "metrics.jsonl")
    warm = history.steps[WARM_UP:]
    if not warm:
        raise Refused(f"{folder} has {counted(len(history.steps), 'step')}, and the first {WARM_UP} warm up. Train for more steps")
    return Launched(
        value,
        history,
        sum(step.step_s - sum(step.seconds.get(name, 0.0) for name in NOT_TRAINING) for step in warm),
        len(warm),
        *(sum(step.seconds.get(name, 0.0) for step in history.steps) for name in ("startup", "compile")),
    )


def work(step: Step) -> dict[str, Any]:
    """What a step did, however long it took."""
    return {name: getattr(step, name) for name in WORK} | {f"FLOPs of {part}": n for part, n in step.flops.items()}


def refuse_unequal_work(vary: Varied, launched: Sequence[Sequence[Launched]]) -> None:
    """Raise Refused, naming the first step and number, where a launch did other work than the first one."""
    first = launched[0][0]
    wanted = [work(step) for step in first.history.steps]
    for one in (one for of_repeat in launched for one in of_repeat):
        found = [work(step) for step in one.history.steps]
        if len(found) != len(wanted):
            raise Refused(
                f"{vary.override(first.value)} made {counted(len(wanted), 'step')} and {vary.override(one.value)} made {len(found):,}: "
                "that is not the same work. Give the stages steps in place of epochs"
            )
        for number, (a, b) in enumerate(zip(wanted, found, strict=True), 1):
            if a != b:
                names = ", ".join(f"{name} {a[name]:,} and {b.get(name, 0):,}" for name in a if a[name] != b.get(name))
                raise Refused(
                    f"{vary.override(first.value)} and {vary.override(one.value)} did other work in step {number}: {names}. Times of "
                    "other work cannot be compared: vary a setting that changes how a step is computed, and not what it trains on"
                )


def results(vary: Varied, launched: Sequence[Sequence[Launched]]) -> dict[str, Ratio]:
    """The time of each value over that of the first."""
    base = [of_repeat[0].seconds for of_repeat in launched]
    return {value: ratio_of(base, [of_repeat[n].seconds for of_repeat in launched]) for n, value in enumerate(vary.values) if n}


def verdict(vary: Varied, value: str, found: Ratio) -> str:
    """What the times say, in words."""
    low, high = found.interval
    of, base = vary.override(value), vary.override(vary.values[0])
    seen = f"{found.pairs} pairs, 95 % interval of its time over the other's {low:.3f} to {high:.3f}"
    if found.is_seen:
        less = found.ratio < 1
        share = 1 - found.ratio if less else found.ratio - 1
        return f"{of} takes {percent(share)} {'less' if less else 'more'} time than {base} ({seen})"
    if found.smallest_effect > 1:
        return (
            f"nothing can be said of {of} and {base}: the times of {found.pairs} pairs spread too far. Measure on a machine that does "
            "nothing else, or raise --repeats or the number of steps"
        )
    return (
        f"no difference between {of} and {base} is seen ({seen}). One of {percent(found.smallest_effect)} or more would be found in four "
        "of five such comparisons; for smaller ones raise --repeats or the number of steps"
    )


def remarks(launched: Sequence[Sequence[Launched]]) -> list[str]:
    """What a reader must know of the launches."""
    every = [one for of_repeat in launched for one in of_repeat]
    found = []
    if unlike := differing([stamps(one.history) for one in every]):
        found.append(f"not all launches were measured alike: {', '.join(unlike)}")
    losses = {one.value: one.history.steps[-1].loss for one in every}
    known = [loss for loss in losses.values() if loss is not None]
    if len(known) > 1:
        found.append(f"loss of the last step: {', '.join(f'{loss:.6f}' for loss in known)}")
    return found


def show(vary: Varied, launched: Sequence[Sequence[Launched]], found: Mapping[str, Ratio]) -> None:
    """The table, and the verdicts."""
    out = Table(
        title=f"{vary.key}: wall time per step, {counted(launched[0][0].steps, 'step')} after {WARM_UP} of warm-up", title_justify="left"
    )
    for name in ("value", "mean", "SD", "startup", "compile", "time ÷ first", "95 % interval", "smallest effect"):
        out.add_column(name, justify="left" if name == "value" else "right")
    for n, value in enumerate(vary.values):
        of = [of_repeat[n] for of_repeat in launched]
        times = [one.seconds / one.steps for one in of]
        mean = sum(times) / len(times)
        spread = (sum((time - mean) ** 2 for time in times) / (len(times) - 1)) ** 0.5
        ratio = found.get(value)
        shown = (f"{ratio.ratio:.3f}", "{:.3f}–{:.3f}".format(*ratio.interval), percent(ratio.smallest_effect)) if ratio else ("1", "", "")
        start, compiled = (sum(getattr(one, name) for one in of) / len(of) for name in ("startup_s", "compile_s"))
        out.add_row(visible(value), f"{mean * 1000:,.1f} ms", f"{spread * 1000:,.1f} ms", f"{start:,.1f} s", f"{compiled:,.1f} s", *shown)
    Console().print(out)
    for value, ratio in found.items():
        say(verdict(vary, value, ratio))
    for line in remarks(launched):
        say(line)


def summary(vary: Varied, launched: Sequence[Sequence[Launched]], found: Mapping[str, Ratio]) -> dict[str, Any]:
    """All that was measured, as plain JSON."""
    return {
        "key": vary.key,
        "values": list(vary.values),
        "warm_up_steps": WARM_UP,
        "steps": launched[0][0].steps,
        "seconds": [[one.seconds for one in of_repeat] for of_repeat in launched],
        "ratios": {
            value: {"ratio": one.ratio, "interval": one.interval, "sd_of_log": one.sd, "smallest_effect": one.smallest_effect}
            for value, one in found.items()
        },
        "verdicts": [verdict(vary, value, one) for value, one in found.items()],
        "stamps": stamps(launched[0][0].history),
    }
