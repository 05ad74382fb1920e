"""Files that hold rows, as other programs write them."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
from PIL import Image as Pillow

TALK = {"conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a dot"}]}


def encoded(seed: int, form: str = "JPEG", size: tuple[int, int] = (20, 12)) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Pillow.fromarray(pixels).save(out, form)
    return out.getvalue()


def archive(path: Path, members: Iterable[tuple[str, Any]], form: int = tarfile.USTAR_FORMAT) -> Path:
    """Members are bytes, text, JSON values, or TarInfo with a type of their own."""
    with tarfile.open(path, "w", format=form) as out:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                out.addfile(content, io.BytesIO(bytes(content.size)))
                continue
            data = content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode()
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def parquet_file(path: Path, rows: list[dict[str, Any]], group: int = 3, **how: Any) -> Path:
    pq.write_table(arrow.Table.from_pylist(rows), path, row_group_size=group, **how)
    return path


def arrow_file(path: Path, table: arrow.Table, batch: int = 3, form: str = "stream", **how: Any) -> Path:
    new = ipc.new_stream if form == "stream" else ipc.new_file
    with open(path, "wb") as file, new(file, table.schema, options=ipc.IpcWriteOptions(**how)) as out:
        out.write_table(table, max_chunksize=batch)
    return path


def energon_folder(folder: Path, members: list[list[tuple[str, Any]]], about: str | None = None, split: str = "") -> Path:
    """As `energon prepare` leaves a folder (megatron-energon 7.4)."""
    (folder / ".nv-meta").mkdir(parents=True)
    for n, some in enumerate(members):
        archive(folder / f"shard_{n:03}.tar", some)
    last = f"shard_{{000..{len(members) - 1:03}}}.tar" if len(members) > 1 else "shard_000.tar"
    (folder / ".nv-meta" / "split.yaml").write_text(split or f"split_parts:\n  train:\n  - {last}\nexclude: []\n")
    if about is not None:
        (folder / ".nv-meta" / "dataset.yaml").write_text(about)
    return folder


COCO_IMAGES = [{"license": 1, "file_name": f"{n:012}.jpg", "height": 4, "width": 5, "id": 10 + n} for n in range(3)]
COCO_ANNOTATIONS = [{"image_id": 10 + n % 3, "id": n, "caption": f" caption {n}"} for n in range(7)]


COCO = {"info": {"year": 2017}, "licenses": [], "images": COCO_IMAGES, "annotations": COCO_ANNOTATIONS}
