"""What `eyeline report` says of signals, against numbers done by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyeline.data.signals.columns import COLUMNS, MANIFEST, Stored, columns_key, to_bytes, write_manifest
from eyeline.offline import signals_report
from eyeline.offline.signals_report import report_signals
from tests.command import Command


def write(folder: Path, count: int, shards: int = 2) -> None:
    """Rows whose width is 100 - n; the last one cannot be used, every tenth equals the first."""
    import hashlib

    numbers = np.array_split(np.arange(count), shards)
    stored = {}
    for n, rows in enumerate(numbers):
        table: dict[str, Any] = {"id": np.array([f"a.json#{row}" for row in rows], "S"), "usable": rows < count - 1}
        for name, column in COLUMNS.items():
            kinds = {"number": np.full(len(rows), np.nan), "text": np.full(len(rows), b""), "flag": rows % 4 == 0}
            table[name] = kinds[column.kind]
        table["width"] = np.where(rows < count - 1, 100.0 - rows, np.nan)
        table["script"] = np.where(rows % 2 == 0, b"latin", b"cjk")
        table["duplicate"] = np.where((rows % 10 == 0) & (rows > 0), b"a.json#0", b"")
        data, key = to_bytes(table), f"{n:032d}"
        path = folder / columns_key(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        stored[key] = Stored(hashlib.sha256(data).hexdigest(), len(rows), f"a.json {n}")
    (folder / MANIFEST).write_text(write_manifest(stored, {}, list(COLUMNS)))


def test_figures_by_hand(eyeline: Command, tmp_path: Path) -> None:
    write(tmp_path / "signals", 101)
    text = eyeline("report", "signals").out
    assert text.startswith("signals of 101 rows\n  usable: 100 of 101 (99.0%)\n")
    head, row = (line.split() for line in text.splitlines()[2:4])
    assert head == ["rows", "min", "p1", "p5", "p25", "median", "p75", "p95", "p99", "max"]
    assert row == ["width", "100", "1", "2", "6", "26", "51", "75", "95", "99", "100"]
    assert "answer_in_question: 25 of 100 (25.0%)" in text
    assert "script: latin 50.0%, cjk 50.0%" in text
    assert "duplicate: 9 of 100 (9.0%); the rows with most of them: a.json#0 (9)" in text
    assert "width: smallest 1 (a.json#99), 2 (a.json#98), 3 (a.json#97); largest 100 (a.json#0), 99 (a.json#1), 98 (a.json#2)" in text
    assert "height" not in text


def test_large_signals_are_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals_report, "ROWS", 50)
    write(tmp_path, 100, shards=10)
    text = report_signals(tmp_path)
    assert text is not None
    assert text.startswith("signals of 100 rows; 50 rows, of shards that are evenly spread, were looked at\n")


def test_a_folder_without_signals_has_no_figures(tmp_path: Path) -> None:
    assert report_signals(tmp_path) is None
