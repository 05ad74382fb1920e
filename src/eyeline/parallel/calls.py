"""The last collectives that a rank has issued, as torch's flight recorder keeps them in memory: copied into a file, since a process that
hangs cannot be asked, and one that gloo or NCCL aborts takes its memory along.
"""

import json
import os
from collections.abc import Iterator
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
    texts = [text if isinstance(text, str) else text.decode() for dump in dumps if dump is not None and (text := dump())]
    new = path.with_name(f"{path.name}.tmp")
    with suppress(OSError):  # a disk that is full is named by whatever needs what it writes
        new.write_text("[" + ",\n".join(texts) + "]", encoding="utf-8")
        os.replace(new, path)


@dataclass(frozen=True)
class Call:
    """One collective, as a rank issued it."""

    group: str
    number: int  # in its group, from 1
    what: str  # the operation, with the sizes that go in and come out


def calls_in(path: Path) -> dict[str, dict[int, Call]]:
    """Group -> number -> call, of a file that `write_calls` wrote; empty where it cannot be read."""
    found: dict[str, dict[int, Call]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        for call in _entries(json.loads(path.read_text(encoding="utf-8"))):
            found.setdefault(call.group, {})[call.number] = call
    return found


def _entries(dumps: list[dict[str, Any]]) -> Iterator[Call]:
    for dump in dumps:
        for entry in dump.get("entries", ()):
            if not entry.get("is_p2p"):
                group = entry["process_group"]
                name = group if isinstance(group, str) else group[1] if group[1] not in ("", "undefined") else f"group {group[0]}"
                what = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
                yield Call(name, int(entry["collective_seq_id"]), f"{what} {entry['input_sizes']} → {entry['output_sizes']}")
