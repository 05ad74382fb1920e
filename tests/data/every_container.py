"""The same captioned images, written in every container that can hold them."""

import csv
import json
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow

from eyeline.data.sources.sources import Source
from tests.data.container_files import COCO, archive, arrow_file, energon_folder, parquet_file

Rows = list[dict[str, Any]]


def listed(set_: Path, rows: Rows) -> Source:
    (set_ / "rows.json").write_text(json.dumps(rows))
    return Source(path=str(set_ / "rows.json"))


def lines(set_: Path, rows: Rows, name: str = "rows") -> Source:
    (set_ / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Source(path=str(set_ / f"{name}.jsonl"))


def table(set_: Path, rows: Rows, name: str = "rows", columns: tuple[str, ...] = ("image", "caption", "kind")) -> Source:
    with open(set_ / f"{name}.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, *[(row.get("image"), row["caption"], row["kind"]) for row in rows]])
    return Source(path=str(set_ / f"{name}.csv"))


def foreign(set_: Path, rows: Rows) -> Source:
    made = table(set_, rows, columns=("foto", "said", "which"))
    return Source(path=made.path, columns={"image": "foto", "caption": "said", "kind": "which"})


def inlined(set_: Path, rows: Rows) -> Rows:
    def of(name: str) -> dict[str, Any]:
        path = set_ / name
        return {"bytes": path.read_bytes() if path.exists() else None, "path": name}

    return [{"images": [of(row["image"])], "caption": row["caption"], "kind": row["kind"]} for row in rows]


def members(set_: Path, rows: Rows) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for n, row in enumerate(rows):
        data = (set_ / row["image"]).read_bytes() if (set_ / row["image"]).exists() else b""
        out += [(f"{n:03}.png", data), (f"{n:03}.json", {"caption": row["caption"], "kind": row["kind"]})]
    return out


def crude(set_: Path, rows: Rows) -> Source:
    out: list[tuple[str, Any]] = []
    for n, row in enumerate(rows):
        data = (set_ / row["image"]).read_bytes() if (set_ / row["image"]).exists() else b""
        out += [(f"{n:03}.foto.png", data), (f"{n:03}.meta.json", {"said": row["caption"], "which": row["kind"]})]
    for n in range(3):
        archive(set_ / f"{n}.tar", out[n * 22 : (n + 1) * 22])
    columns = {"image": "foto.png", "caption": "meta.json.said", "kind": "meta.json.which"}
    return Source(path=str(set_ / "*.tar"), columns=columns, layout="captions")


def tarred(set_: Path, rows: Rows) -> Source:
    for n in range(3):
        archive(set_ / f"{n}.tar", members(set_, rows)[n * 22 : (n + 1) * 22])
    return Source(path=str(set_ / "*.tar"))


def energons(set_: Path, rows: Rows) -> Source:
    energon_folder(set_, [members(set_, rows)])
    with tarfile.open(set_ / "shard_000.tar") as tar:
        offsets = [info.offset for info in tar.getmembers()[::2]] + [tar.offset]
    (set_ / "shard_000.tar.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))
    return Source(path=str(set_))


def coco(set_: Path, rows: Rows) -> Source:
    names = sorted({row["image"] for row in rows})
    images = [{"id": n, "file_name": name} for n, name in enumerate(names)]
    notes = [{"id": n, "image_id": names.index(row["image"]), "caption": row["caption"], "kind": row["kind"]} for n, row in enumerate(rows)]
    (set_ / "rows.json").write_text(json.dumps(COCO | {"images": images, "annotations": notes}))
    return Source(path=str(set_ / "rows.json"))


def saved(set_: Path, rows: Rows) -> Source:
    (set_ / "saved").mkdir()
    for n in range(2):
        part = inlined(set_, rows)[n * 16 : (n + 1) * 16]
        arrow_file(set_ / f"saved/data-{n:05}-of-00002.arrow", arrow.Table.from_pylist(part), 7)
    files = [{"filename": f"data-{n:05}-of-00002.arrow"} for n in range(2)]
    (set_ / "saved/state.json").write_text(json.dumps({"_data_files": files}))
    (set_ / "saved/dataset_info.json").write_text("{}")
    return Source(path=str(set_ / "saved"))


def besides(set_: Path, rows: Rows) -> Source:
    (set_ / "pairs").mkdir()
    for n, row in enumerate(rows):
        if (set_ / row["image"]).exists():
            shutil.copy(set_ / row["image"], set_ / f"pairs/{n:03}.png")
        else:
            (set_ / f"pairs/{n:03}.png").write_bytes(b"")
        (set_ / f"pairs/{n:03}.txt").write_text(row["caption"])
    return Source(path=str(set_ / "pairs"))


def mapped(set_: Path, rows: Rows) -> Source:
    made = [{"meta": {"foto": row["image"], "said": row["caption"]}, "which": row["kind"], "other": n} for n, row in enumerate(rows)]
    columns = {"image": "meta.foto", "caption": "meta.said", "kind": "which"}
    return Source(path=str(parquet_file(set_ / "rows.parquet", made, 7)), columns=columns, images=str(set_))


def several(write: Callable[..., Source], set_: Path, rows: Rows) -> Source:
    ends = {write(set_, part, f"part-{n}").path.rpartition(".")[2] for n, part in enumerate((rows[:10], rows[10:12], rows[12:]))}
    return Source(path=f"{set_}/part-*.{ends.pop()}")


CONTAINERS: dict[str, Callable[[Path, Rows], Source]] = {
    "JSON list": listed,
    "JSON lines": lines,
    "CSV": table,
    "CSV mapped": foreign,
    "several JSON lines": lambda s, r: several(lines, s, r),
    "several CSV": lambda s, r: several(table, s, r),
    "Parquet": lambda s, r: Source(path=str(parquet_file(s / "rows.parquet", r, 7))),
    "Parquet in one group": lambda s, r: Source(path=str(parquet_file(s / "rows.parquet", r, 100))),
    "Parquet mapped": mapped,
    "Parquet inside": lambda s, r: Source(path=str(parquet_file(s / "rows.parquet", inlined(s, r), 7))),
    "Arrow": lambda s, r: Source(path=str(arrow_file(s / "rows.arrow", arrow.Table.from_pylist(r), 7, "file"))),
    "Arrow in one batch": lambda s, r: Source(path=str(arrow_file(s / "rows.arrow", arrow.Table.from_pylist(r), 100, "file"))),
    "saved": saved,
    "WebDataset": tarred,
    "WebDataset mapped": crude,
    "Energon": energons,
    "COCO": coco,
    "imagefolder": lambda s, r: (table(s, r, "metadata"), Source(path=str(s)))[1],
    "texts in files": besides,
}  # fmt: skip
