"""`eyeline check RECIPE --cluster`: what can be wrong with the machines of a run, found on all its ranks before training.

Every rank measures the same things at the same time and tells them to all; rank 0 prints. A rank that is unlike the others is named with
its host.
"""

import glob
import os
import shutil
import socket
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from eyeline.core.errors import Refused
from eyeline.core.locations import is_url
from eyeline.core.user_code import files_of
from eyeline.core.words import counted, gib, percent
from eyeline.core.world import World
from eyeline.data.containers.container import RETRIES
from eyeline.data.sources.folders import resolve_location
from eyeline.data.sources.sources import Source
from eyeline.parallel.join import joined, started
from eyeline.parallel.launch import Machine, machine
from eyeline.parallel.mesh import mesh_of
from eyeline.parallel.mesh import problems as mesh_problems
from eyeline.parallel.rates import AxisRate, all_reduce_rates
from eyeline.recipes.check import check, say_line
from eyeline.recipes.problems import problem_list
from eyeline.study.bench import ROUND_S, ROUNDS, SIDES
from eyeline.train.environment import versions
from eyeline.train.loop import run_folder
from eyeline.train.memory import memory_of
from eyeline.train.peak import matmul_rate
from eyeline.train.run import COMPUTE, Run
from eyeline.train.start import description_at
from eyeline.train.trainable import plan_of

SLOW = 0.75  # of the median: a rank below it is named
CLOCK_S = 1.0  # a clock that is off by more is named
SEEN_S = 5.0  # a shared file system may show a file of another machine this late


@dataclass(frozen=True)
class RankReport:
    """What one rank finds."""

    host: str
    device: str
    versions: dict[str, str]  # that must be equal: train refuses others
    drivers: dict[str, str]  # that had better be
    paths: dict[str, str]  # of the recipe -> what is there
    clock: float
    matmul: float  # FLOP/s
    free: int  # bytes, in the run folder


def check_cluster(run: Run, samples: int, console: Console | None = None) -> bool:
    """`check` on rank 0, then what all ranks find together; whether there are no problems. Every rank calls this."""
    console = console or Console()
    place = started()
    here = machine(run.device, run.threads, run.deterministic, place)
    with joined(place, here.device.type, 60 * run.mesh.timeout_minutes) as world:
        good = world.by_first(lambda: check(run, samples, console, world.size, world))
        fits = not [*mesh_problems(run.mesh, world.size, run.packs_per_step)]
        mesh = mesh_of(run.mesh, world, here.device.type, run.packs_per_step) if fits else None
        report = _report(run, here)
        world.gather_patiently(None)
        report = replace(report, clock=time.time())
        world.gather(None)  # all at once: a rank must not compute while its neighbour still looks for files
        rate = matmul_rate(here.device, COMPUTE[run.precision], SIDES[here.device.type], ROUNDS, ROUND_S)
        report = replace(report, matmul=rate)
        reports = world.gather_patiently(report)
        rates = world.gather_patiently([] if mesh is None else all_reduce_rates(mesh, world, here.device))
        unseen = _shared_folder(run_folder(run), world)
        return world.by_first(lambda: _print_findings(console, *findings(run, reports, rates, unseen))) and good


def _print_findings(console: Console, lines: list[str], problems: list[str], warnings: list[str]) -> bool:
    """Print them; whether there are no problems."""
    for line in (*lines, *(f"warning: {line}" for line in warnings)):
        say_line(console, line)
    say_line(console, problem_list("the cluster", problems) if problems else "the cluster: no problems")
    return not problems


def findings(
    run: Run, reports: Sequence[RankReport], rates: Sequence[Sequence[AxisRate]], unseen: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """Lines to print, problems, and warnings, of what all ranks have found. `unseen`: what is wrong with the run folder."""
    hosts: dict[str, int] = {}
    for report in reports:
        hosts[report.host] = hosts.get(report.host, 0) + 1
    shown = ", ".join(f"{host} ({number})" for host, number in list(hosts.items())[:8]) + (", ..." if len(hosts) > 8 else "")
    lines = [f"cluster: {counted(len(reports), 'rank')} on {counted(len(hosts), 'host')}: {shown}"]
    rest = [_versions(reports), _paths(reports), _folder(run, unseen), _disk(run, reports), _clocks(reports), _matmul(run, reports)]
    rest.append(_all_reduce(reports, rates))
    problems, warnings = list[str](), list[str]()
    for line, wrong, odd in rest:
        lines += [line] if line else []
        problems += wrong
        warnings += odd
    return lines, problems, warnings


Found = tuple[str, list[str], list[str]]  # a line, problems, warnings


def _report(run: Run, here: Machine) -> RankReport:
    folder = _lowest_folder(run_folder(run))
    paths = {path: what_is_at(path) for path in paths_of(run)}
    return RankReport(socket.gethostname(), here.name, versions(), _drivers(here), paths, 0.0, 0.0, shutil.disk_usage(folder).free)


def _drivers(here: Machine) -> dict[str, str]:
    stamps = {name: here.stamps()[name] for name in ("capability", "device_memory_bytes", "cuda", "rocm", "cudnn", "driver")}
    found: dict[str, Any] = {"device": here.name, **stamps}
    if here.device.type == "cuda":
        from torch.cuda import nccl

        found["NCCL"] = ".".join(map(str, nccl.version()))
    return {name: str(value) for name, value in found.items() if value is not None}


def _name(reports: Sequence[RankReport], rank: int) -> str:
    return f"rank {rank} ({reports[rank].host})"


def _differences(reports: Sequence[RankReport], field: str) -> list[str]:
    """The ranks that differ from rank 0 in what they report, a line each."""
    first: dict[str, str] = getattr(reports[0], field)
    found = []
    for rank, report in enumerate(reports):
        own: dict[str, str] = getattr(report, field)
        differ = [name for name in first | own if own.get(name) != first.get(name)]
        if differ:
            each = "; ".join(f"{name} is {own.get(name, 'not there')}, on rank 0 {first.get(name, 'not there')}" for name in differ)
            found.append(f"{_name(reports, rank)}: {each}")
    return found


def _versions(reports: Sequence[RankReport]) -> Found:
    known = reports[0].versions
    line = f"versions: eyeline {known['eyeline']} (code {known['code of eyeline']}), Python {known['Python']}, torch {known.get('torch')}"
    return line, _differences(reports, "versions"), _differences(reports, "drivers")


def _paths(reports: Sequence[RankReport]) -> Found:
    differ = _differences(reports, "paths")
    number = counted(len(reports[0].paths), "path")
    return "" if differ else f"{number} of the recipe: the same on every rank", differ, []


def paths_of(run: Run) -> Iterator[str]:
    """Every path that a recipe names and that must exist, each once."""
    named: list[str | None] = [run.model.path, run.model.tokenizer, *run.model.weights.values()]
    sources: list[Source] = [*(run.evaluation.sources if run.evaluation else ())]
    for stage in run.stages:
        named.append(stage.data.prepared)
        sources += [] if stage.data.prepared else [*stage.data.sources, *stage.data.validation]
    for source in sources:
        named += [source.path, None if source.images == "ignore" else source.images]
    named += files_of(run.model_dump(mode="json"))
    yield from dict.fromkeys(path for path in named if path is not None)


def what_is_at(path: str) -> str:
    """What is at a path of a recipe, in words that are the same wherever it is the same."""
    if not is_url(path) and glob.has_magic(path) and not os.path.lexists(path):
        found = glob.glob(os.path.expanduser(path), recursive=True)
        return f"a pattern of {counted(len(found), 'file')}, {sum(map(_size, found)):,} bytes"
    try:
        found = resolve_location(path, RETRIES)
    except Refused as error:
        return str(error).split(". ")[0]
    if not isinstance(found, Path):
        return "there"
    return "a folder" if found.is_dir() else f"a file of {found.stat().st_size:,} bytes"


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _shared_folder(folder: Path, world: World) -> list[str]:
    """What is wrong with the run folder as one that all ranks write into: each writes a file that every other must see. Nothing of it
    is left. The same on all ranks."""
    base = _lowest_folder(folder)
    token, hosts = world.gather_patiently(uuid.uuid4().hex[:12])[0], world.gather_patiently(socket.gethostname())
    trial = base / f".eyeline-check-{token}"
    if (why := world.gather_patiently(_failure(trial.mkdir) if world.first else None)[0]) is not None:
        return [f"rank 0 ({hosts[0]}) cannot write into {base}: {why}. Give the user who runs this permission, or choose another out="]
    own = [trial / str(rank) for rank in range(world.size)]
    wrote = world.gather_patiently(
        "it does not see what rank 0 wrote there" if _missing_files([trial]) else _failure(own[world.rank].touch)
    )
    missing = _missing_files([path for path, why in zip(own, wrote, strict=True) if why is None])
    sees = world.gather_patiently([int(path.name) for path in missing])
    if world.first:
        shutil.rmtree(trial, ignore_errors=True)
    advice = "Give all ranks one shared folder, with out= or a mount"
    problems = [f"rank {rank} ({hosts[rank]}) cannot write into {base}: {why}. {advice}" for rank, why in enumerate(wrote) if why]
    for rank, others in enumerate(sees):
        if others and wrote[rank] is None:
            named = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
            problems.append(f"rank {rank} ({hosts[rank]}) does not see in {base} what rank {named} wrote there. {advice}")
    return problems


def _failure(work: Callable[[], object]) -> str | None:
    """Why work of the file system failed; None where it did not."""
    try:
        work()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _missing_files(paths: Sequence[Path]) -> list[Path]:
    """The files that do not appear within SEEN_S."""
    deadline, missing = time.monotonic() + SEEN_S, list(paths)
    while missing and (missing := [path for path in missing if path.name not in _names_in(path.parent)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return missing


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _lowest_folder(folder: Path) -> Path:
    """The folder, or the lowest folder above it that exists."""
    full = Path(os.path.abspath(folder))
    return next(path for path in (full, *full.parents) if path.is_dir())


def _folder(run: Run, unseen: Sequence[str]) -> Found:
    return ("" if unseen else f"run folder: {run_folder(run)}, every rank writes there and sees what the others write"), list(unseen), []


def _disk(run: Run, reports: Sequence[RankReport]) -> Found:
    """What the checkpoints of all ranks take together, against what is free."""
    try:
        one, all_kept = checkpoint_bytes(run)
    except Refused:  # among the recipe's problems already
        return "", [], []
    have = sum(path.stat().st_size for path in (run_folder(run) / "checkpoints").glob("*/*.safetensors"))
    free = min(report.free for report in reports)
    line = f"disk: {gib(free)} free; a checkpoint of all ranks takes {gib(one)}, and up to {gib(all_kept)} are kept at once"
    remedy, where = "Make room, lower save_total_limit, or choose another out=", _lowest_folder(run_folder(run))
    if free < one:
        return line, [f"disk: {gib(free)} free in {where}, and one checkpoint takes {gib(one)}. {remedy}"], []
    if free + have < all_kept:
        return (
            line,
            [],
            [f"disk: {gib(free)} free in {where}, and checkpoints will take {gib(all_kept)}. {remedy}"],
        )
    return line, [], []


def checkpoint_bytes(run: Run) -> tuple[int, int]:
    """The bytes of one checkpoint, and of all that are on the disk at once: save_total_limit, the best one, and the next one while it is
    written. What a stage does not train is stored once."""
    config = description_at(run, run_folder(run)).config
    one = kept = 0
    number = run.save_total_limit + 1 + bool(run.validation_steps)
    for index, stage in enumerate(run.stages):
        memory = memory_of(plan_of(run, index, config), stage.optimizer)
        changing = memory.gradients + memory.optimizer  # a gradient is as large as what it trains
        one = max(one, memory.weights + memory.optimizer)
        kept = max(kept, number * changing + memory.weights - memory.gradients)
    return one, kept


def _clocks(reports: Sequence[RankReport]) -> Found:
    median = statistics.median(report.clock for report in reports)
    off = [report.clock - median for report in reports]
    line = f"clocks: within {max(off) - min(off):.2f} s"
    odd = [
        f"the clock of {_name(reports, rank)} is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}. Synchronise it (NTP): times in "
        "messages and of files mislead"
        for rank, by in enumerate(off)
        if abs(by) > CLOCK_S
    ]
    return line, [], odd


def _matmul(run: Run, reports: Sequence[RankReport]) -> Found:
    rates = [report.matmul for report in reports]
    median = statistics.median_high(rates)
    line = f"matrix products in {run.precision}: median {_tera(median)} per rank, from {_tera(min(rates))} to {_tera(max(rates))}"
    slow = [
        f"{_name(reports, rank)} computes matrix products at {_tera(rate)}, {percent(rate / median)} of the median. Look for other "
        "programs, heat, or a power limit there, or leave this machine out"
        for rank, rate in enumerate(rates)
        if rate < SLOW * median
    ]
    return line, slow, []


def _tera(rate: float) -> str:
    return f"{rate / 1e12:,.3g} TFLOP/s"


def _all_reduce(reports: Sequence[RankReport], rates: Sequence[Sequence[AxisRate]]) -> Found:
    """The rates by axis, each of its slowest group of ranks."""
    axes: dict[str, dict[tuple[int, ...], float]] = {}
    problems = []
    for rank, of_rank in enumerate(rates):
        for rate in of_rank:
            groups = axes.setdefault(rate.axis, {})
            groups[rate.ranks] = min(rate.bytes_per_s, groups.get(rate.ranks, rate.bytes_per_s))
            if not rate.exact:
                problems.append(f"{_name(reports, rank)}: an all-reduce over {rate.axis} gave a wrong sum. Leave this machine out")
    lines = []
    for axis, groups in axes.items():
        median = statistics.median_high(groups.values())
        many = f"{counted(len(groups), 'group')} of " if len(groups) > 1 else ""
        lines.append(f"all-reduce over {axis}, {many}{len(next(iter(groups)))} ranks: {median / 1e9:,.3g} GB/s")
        for ranks, rate in groups.items():
            if rate < SLOW * median:
                named = ", ".join(_name(reports, rank) for rank in ranks[:8])
                share = percent(rate / median)
                problems.append(
                    f"all-reduce over {axis} among {named}: {rate / 1e9:,.3g} GB/s, {share} of the median. Look at their network"
                )
    return "\n".join(lines), problems, []
