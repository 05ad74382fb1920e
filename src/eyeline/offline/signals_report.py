"""What the signals of a folder are like: how each column is spread, and the rows at its ends."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eyeline.core.words import counted, percent
from eyeline.data.signals.columns import COLUMNS, ID, USABLE, Signals, Table, open_signals

ROWS = 2_000_000  # that are looked at, of shards that are evenly spread
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
EXAMPLES = 3  # rows at each end of a column
COMMON = 8  # values of a text that are counted by name


def report_signals(folder: Path) -> str | None:
    """Lines about each column of a folder; None where there are no signals, or not all yet."""
    found = open_signals(folder, 0)
    if found is None:
        return None
    table, looked = _looked_at(found)
    rows = sum(one.rows for one in found.shards.values())
    some = "" if looked == rows else f"; {looked:,} rows, of shards that are evenly spread, were looked at"
    lines = [f"signals of {counted(rows, 'row')}{some}", f"  usable: {_share(table[USABLE])}"]
    usable = {name: values[table[USABLE]] for name, values in table.items()}
    numbers = [name for name in found.columns if COLUMNS[name].kind == "number" and not np.isnan(usable[name]).all()]
    lines += [f"  {line}" for line in _percentiles(usable, numbers)]
    for name in found.columns:
        column = COLUMNS[name]
        if column.kind == "flag":
            lines.append(f"  {name}: {_share(usable[name])}")
        elif column.kind == "text":
            lines.append(f"  {name}: {_texts(usable, name)}")
    spread = [name for name in numbers if np.nanmin(usable[name]) < np.nanmax(usable[name])]
    lines += [f"  {name}: {_ends(usable, name)}" for name in spread]
    return "\n".join(lines)


def _looked_at(found: Signals) -> tuple[dict[str, np.ndarray], int]:
    """The columns of some shards, one behind the other, and their number of rows."""
    keys = list(found.shards)
    rows = sum(one.rows for one in found.shards.values())
    if rows > ROWS:
        keys = [keys[n] for n in np.linspace(0, len(keys) - 1, max(len(keys) * ROWS // rows, 1)).astype(int)]
    tables = [found.table(key) for key in keys]
    names = tables[0] if tables else {}
    return {name: np.concatenate([table[name] for table in tables]) for name in names}, sum(len(table[ID]) for table in tables)


def _percentiles(table: Table, names: Sequence[str]) -> list[str]:
    """A line for each column of numbers, under one another."""
    rows = [["", "rows", "min", *(f"p{p}" if p != 50 else "median" for p in PERCENTILES), "max"]]
    for name in names:
        values = table[name][~np.isnan(table[name])]
        cuts = np.percentile(values, (0, *PERCENTILES, 100), method="nearest").tolist()
        rows.append([name, f"{len(values):,}", *map(_number, cuts)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = cells
    return "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))]).rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def _share(flags: np.ndarray) -> str:
    return f"{int(flags.sum()):,} of {len(flags):,} ({percent(float(flags.mean()) if len(flags) else 0.0)})"


def _texts(table: Table, name: str) -> str:
    values = Counter(table[name].tolist())
    empty = values.pop(b"", 0)
    if name == "script":
        named = [f"{text.decode('utf-8', 'replace')} {percent(count / len(table[name]))}" for text, count in values.most_common(COMMON)]
        return ", ".join([*named, *([f"none {percent(empty / len(table[name]))}"] if empty else [])]) or "none"
    most = [f"{first.decode('utf-8', 'replace')} ({count:,})" for first, count in values.most_common(EXAMPLES)]
    return f"{_share(table[name] != b'')}{'; the rows with most of them: ' + ', '.join(most) if most else ''}"


def _ends(table: Table, name: str) -> str:
    """The rows with the smallest and the largest values, by their ids."""
    order = np.argsort(table[name], kind="stable")
    order = order[~np.isnan(table[name][order])]

    def named(rows: np.ndarray) -> str:
        return ", ".join(
            f"{_number(float(table[name][row]))} ({bytes(table[ID][row]).decode('utf-8', 'replace')})" for row in rows.tolist()
        )

    return f"smallest {named(order[:EXAMPLES])}; largest {named(order[::-1][:EXAMPLES])}"
