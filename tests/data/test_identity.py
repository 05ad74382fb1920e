"""Files of a source on record, and what a message says of their changes."""

import json
from pathlib import Path

from eyeline.data.reader import digest_of, record_source, source_changes
from eyeline.data.sources.sources import Rows, Source, open_source


def opened(folder: Path, **texts: str) -> Rows:
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(json.dumps({"question": text, "answer": "yes"}) + "\n")
    return open_source(Source(path=str(folder / "*.jsonl")))


def test_changed_missing_and_new_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    before = digest_of(rows := opened(tmp_path / "data", a="one", b="two", c="three"))
    record_source(tmp_path / "sources", rows)
    (tmp_path / "data" / "c.jsonl").unlink()
    now = opened(tmp_path / "data", b="other", d="four")
    said = source_changes(tmp_path / "sources", before, now)
    assert said.endswith("b.jsonl changed and c.jsonl is missing and d.jsonl is new"), said
    assert source_changes(tmp_path / "elsewhere", before, now) == f"{now.path} has changed"  # a run of an earlier version has no record
    assert "is no longer among the sources" in source_changes(tmp_path / "sources", before, None)
    assert "was not among the sources" in source_changes(tmp_path / "sources", None, now)


def test_many_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    before = digest_of(rows := opened(tmp_path / "data", **{f"f{n}": "old" for n in range(9)}))
    record_source(tmp_path / "sources", rows)
    now = opened(tmp_path / "data", **{f"f{n}": "new" for n in range(8)})
    assert source_changes(tmp_path / "sources", before, now).endswith("f0.jsonl, f1.jsonl, f2.jsonl and 5 more changed")
