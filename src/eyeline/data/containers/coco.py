"""COCO's captions: one JSON object with a list of images and a list of annotations, each of which is a row with its image's file."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from eyeline.core.errors import BadSample
from eyeline.core.locations import Location
from eyeline.data.containers.container import File, Place, Shard
from eyeline.data.containers.json_rows import BOM, MAX_LINE_BYTES, SCANNER, JsonList, beyond_space, elements, end_of, list_in, row_of

LISTS = ("images", "annotations")
_FIRST = re.compile(rb'\{\s*"(?:info|images|annotations|licenses|categories|type)"\s*:')


@dataclass(frozen=True)
class Coco:
    """Annotations, in runs, and what the images are called."""

    annotations: JsonList
    images: tuple[int, int]  # offset and length of their list
    shards: tuple[Shard, ...]
    what: str = "COCO JSON"
    header: tuple[str, ...] = ()
    _names: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        for place, row in self.annotations.rows(shard):
            yield place, row if isinstance(row, BadSample) else self._try(row)

    def row(self, place: Place) -> Any:
        return self._row_with_image(self.annotations.row(place))

    def file_of(self, shard: int) -> File:
        return self.annotations.file_of(shard)

    def id(self, place: Place) -> str:
        return self.annotations.id(place)

    def line(self, place: Place) -> int:
        return self.annotations.line(place)

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        return self.annotations.origin_of(place)

    def _try(self, row: Any) -> Any | BadSample:
        try:
            return self._row_with_image(row)
        except BadSample as bad:
            return bad

    def _row_with_image(self, row: Any) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise BadSample("wrong_type", "row", "wanted an object")
        image = row.get("image_id")
        if not isinstance(image, int | str):
            raise BadSample("wrong_type", "image_id", f"wanted the number of an image, got {str(image)[:40]}")
        if not self._names:
            self._read_names()
        if image not in self._names:
            raise BadSample("missing_image", "image_id", f"no image of the list has the id {str(image)[:40]}")
        return {"image": self._names[image]} | {key: value for key, value in row.items() if key != "image"}

    def _read_names(self) -> None:
        """An image that cannot be read is none."""
        data = self.annotations.file.read(*self.images)
        for start, length in elements(data):
            try:
                image = row_of(data[start : start + length])
            except BadSample:
                continue
            if isinstance(image, dict) and isinstance(image.get("id"), int | str):
                self._names[image["id"]] = image.get("file_name")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_names": {}}


def open_coco(path: Location, head: bytes, retries: int) -> Coco | None:
    """The captions of a file that begins with `head`, if it is one object with both lists. Of JSON lines the first is read, no more."""
    if not _FIRST.match(head):
        return None
    file = File.of(path, retries)
    for enough in (1 << 20, MAX_LINE_BYTES):
        first, ended, _ = file.read(0, min(file.size, enough)).partition(b"\n")
        if ended:
            break
    try:
        if ended and len(first) < file.size - 1 and not set(LISTS) <= members(first).keys():
            return None
    except json.JSONDecodeError:
        pass  # one object over several lines
    data = file.read(0, file.size)
    try:
        found = members(data)
    except json.JSONDecodeError:
        return None
    if not all(name in found and data[found[name][0] : found[name][0] + 1] == b"[" for name in LISTS):
        return None
    images, annotations = (found[name] for name in LISTS)
    listed = list_in(file, data[annotations[0] : sum(annotations)], annotations[0])
    digest = hashlib.sha256(memoryview(data)[images[0] : sum(images)]).hexdigest()
    return Coco(listed, images, tuple(replace(shard, fingerprint=f"{digest} {shard.fingerprint}") for shard in listed.shards))


def members(data: bytes) -> dict[str, tuple[int, int]]:
    """Offset and length of the value of each key, when all of `data` is one object. JSONDecodeError when it is not."""
    text = data.decode("latin-1")
    at = beyond_space(text, len(BOM) * data.startswith(BOM))
    found: dict[str, tuple[int, int]] = {}
    before = "{"
    while text[at : at + 1] == before:
        at = beyond_space(text, at + 1)
        if text[at : at + 1] != '"':
            break
        key, at = SCANNER.raw_decode(text, at)
        at = beyond_space(text, at)
        if text[at : at + 1] != ":":
            break
        at = beyond_space(text, at + 1)
        end = end_of(text, at)
        found[key] = (at, end - at)
        at, before = beyond_space(text, end), ","
    if text[at : at + 1] != "}" or beyond_space(text, at + 1) < len(text):
        raise json.JSONDecodeError("no object alone", "", at)
    return found
