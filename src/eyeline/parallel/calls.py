"""The last collectives that a rank has issued, as torch's flight recorder keeps them in memory: copied into a file, since a process that
hangs cannot be asked, and one that gloo or NCCL aborts takes its memory along.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = "200"  # calls in memory; as many are in a file


def record_calls() -> None:
    """Have torch record collectives. Before the first group is made; what the user has set stays."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", KEPT)


def write_calls(path: Path) -> None:
    """Replace the file by the calls so far."""
    import torch

    library = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    dumps = (getattr(library, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    until_s = time.time()
    texts = [text if isinstance(text, str) else text.decode() for dump in dumps if dump is not None and (text := dump())]
    new = path.with_name(f"{path.name}.tmp")
    with suppress(OSError):  # a disk that is full is named by whatever needs what it writes
        new.write_text(f'{{"until_s": {until_s}, "dumps": [{",".join(texts)}]}}', encoding="utf-8")
        os.replace(new, path)


@dataclass(frozen=True)
class Call:
    """One collective, as a rank issued it."""

    group: str
    number: int  # in its group, from 1
    what: str  # the operation, with the sizes that go in and come out
    issued_s: float = 0.0  # by the clock of the rank's machine, seconds since 1970


@dataclass(frozen=True)
class Record:
    """The calls of one rank up to one moment."""

    groups: Mapping[str, Mapping[int, Call]]  # group -> number -> call
    until_s: float  # what was issued by then is in it; by the clock of the rank's machine, seconds since 1970


def read_calls(path: Path) -> Record:
    """What `write_calls` wrote; no groups where it cannot be read."""
    found: dict[str, dict[int, Call]] = {}
    until_s = 0.0
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(path.read_text(encoding="utf-8"))
        until_s = float(record["until_s"])
        for call in _entries(record["dumps"]):
            found.setdefault(call.group, {})[call.number] = call
    return Record(found, until_s)


def _entries(dumps: list[dict[str, Any]]) -> Iterator[Call]:
    for dump in dumps:
        for entry in dump.get("entries", ()):
            if not entry.get("is_p2p"):
                group = entry["process_group"]
                name = group if isinstance(group, str) else group[1] if group[1] not in ("", "undefined") else f"group {group[0]}"
                what = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
                sizes = f"{entry['input_sizes']} → {entry['output_sizes']}"
                yield Call(name, int(entry["collective_seq_id"]), f"{what} {sizes}", int(entry["time_created_ns"]) / 1e9)
