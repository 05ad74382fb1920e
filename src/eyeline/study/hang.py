"""`eyeline explain --hang`: what the ranks of a run did when it hung or crashed, and which of them issued other collectives."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyeline.core.errors import Refused
from eyeline.core.files import read_json
from eyeline.parallel.calls import Call, Record, read_calls
from eyeline.parallel.watch import CALLS, CRASH, LATE_S, PACKAGE, has_ended

COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")  # where torch issues them
CLOCKS_S = 5.0  # by which clocks of machines may differ, and a rank may be behind in a run without faults


def explain_hang(run: Path) -> Iterator[str]:
    """Lines about the files in RUN/ranks. Refused where there are none."""
    folder = run / "ranks"
    ranks = {int(path.stem.removeprefix("rank-")): path for path in sorted(folder.glob("rank-*.json"))}
    if not run.is_dir():
        raise Refused(f"{run} does not exist, or is not a directory. Give the folder of a run")
    if not ranks:
        raise Refused(f"{folder} has no file of a rank. Only a run of several ranks that hangs, or has lost one, has some")
    for rank, path in ranks.items():
        yield _position(rank, path)
    yield from desynchronised_ranks({rank: read_calls(path.with_suffix(CALLS)) for rank, path in ranks.items()})


def _position(rank: int, path: Path) -> str:
    try:
        where: dict[str, Any] = read_json(path)
    except (OSError, ValueError):
        return f"rank {rank}: its file cannot be read"
    line = f", at {where['line'].removeprefix(PACKAGE)}" if where["line"] else ""
    place = f"step {where['step'] + 1}, {where['phase']}{line}"
    who, silent = f"rank {rank} (process {where['pid']} on {where['host']})", max(0.0, time.time() - path.stat().st_mtime)
    if where["error"]:
        return f"{who} has ended with an error, in {place}: {where['error'].splitlines()[0]}"
    if crash := crash_in(path.with_suffix(CRASH)):
        return f"{who} was {crash}, and was last heard of in {place}"
    if has_ended(where):
        return f"{who} has ended without an error of its own, as after kill -9; it was last heard of in {place}"
    return f"{who}: {place}" if silent < LATE_S else f"{who} does not run: it was last heard of {silent:.0f} s ago, in {place}"


def crash_in(path: Path) -> str:
    """What the interpreter wrote when the system aborted the process: the error, our innermost line, and the collective that it called."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    error = re.search(r"Fatal Python error: (.*)", text)
    threads = re.split(r"\n(?=(?:Current t|T)hread 0x)", text)
    current = next((one for one in threads if one.startswith("Current") and PACKAGE in one), None)
    # libraries abort in threads of their own: then it is the first thread that there was, which trains, and is written last
    lines = re.findall(r'File "(.*?)", line (\d+) in (\S+)', current or threads[-1])
    depth, own = next(
        ((n, f"{file.removeprefix(PACKAGE)}:{line} {name}") for n, (file, line, name) in enumerate(lines) if file.startswith(PACKAGE)),
        (0, ""),
    )
    call = next((name for file, _, name in lines[:depth] if file.endswith(COLLECTIVES)), "")
    where = f"{f' in {call},' if call else ''}{f' in {own}' if own else ''}"
    return f"aborted ({error.group(1)}){where}" if error else ""


def desynchronised_ranks(records: Mapping[int, Record]) -> Iterator[str]:
    """The first call in each group by which ranks differ, and who differs; else who has issued fewer than others, where its record is
    new enough to show that."""
    found = False
    for group in dict.fromkeys(group for record in records.values() for group in record.groups):
        members = {rank: record.groups[group] for rank, record in records.items() if group in record.groups}
        lines = list(_differences(group, members)) or list(_ranks_behind(group, members, records))
        found = found or bool(lines)
        yield from lines
    if not found:
        yield (
            "no rank has issued other collectives than the rest, as far as they are recorded; if all run and the run stands still, a rank "
            "hangs between two of them, or in one"
        )


def _differences(group: str, members: Mapping[int, Mapping[int, Call]]) -> Iterator[str]:
    first, last = max(min(numbers) for numbers in members.values()), min(max(numbers) for numbers in members.values())
    for number in range(first, last + 1):
        issued = {rank: numbers[number].what for rank, numbers in members.items() if number in numbers}
        if len(set(issued.values())) < 2:
            continue
        usual = Counter(issued.values()).most_common(1)[0][0]  # of as many each, that of the lowest rank
        reference = next(members[rank] for rank, what in issued.items() if what == usual)
        for rank, what in issued.items():
            if what != usual:
                yield f"rank {rank} differs at call {number} of {group}: {_how(members[rank], reference, number)}"
        return


def _how(own: Mapping[int, Call], reference: Mapping[int, Call], number: int) -> str:
    here, usual = own[number].what, reference[number].what
    if (after := reference.get(number + 1)) is not None and after.what == here:
        return f"it left out {usual}, and continues with {here}"
    if (after := own.get(number + 1)) is not None and after.what == usual:
        return f"it issues {here} in addition, before {usual}"
    return f"it issues {here}, and the others {usual}"


def _ranks_behind(group: str, members: Mapping[int, Mapping[int, Call]], records: Mapping[int, Record]) -> Iterator[str]:
    """Ranks write their records at different moments: one is behind where it had not issued a call `CLOCKS_S` after another rank had."""
    furthest = max(max(numbers) for numbers in members.values())
    last = next(numbers[furthest] for numbers in members.values() if furthest in numbers)
    for rank, numbers in members.items():
        own = numbers[max(numbers)]
        after = [call.issued_s for others in members.values() if (call := others.get(own.number + 1)) is not None]
        if after and records[rank].until_s > min(after) + CLOCKS_S:
            yield f"rank {rank} is behind in {group}: its last call is {own.number} ({own.what}), others wait in {furthest} ({last.what})"
