"""Images with a sidecar text file each: `cat.jpg`, and `cat.txt` with its caption."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import Location, below
from eyeline.data.containers.container import SHARD_ROWS, File, Place, Shard, fingerprints

MAX_IMAGES = 200_000  # more of them are too many files to ask one by one
MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Sidecars:
    """Images in the order of their names, in runs."""

    images: tuple[str, ...]  # names relative to the folder
    texts: tuple[File | None, ...]  # None: there is none
    folder: Location
    run: int  # images of a shard, but of the last
    shards: tuple[Shard, ...]
    what: str
    header: tuple[str, ...] = ("image", "caption")

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        first = shard * self.run
        for number in range(min(self.run, len(self.images) - first)):
            place = Place(shard, number, first + number, 1)
            try:
                row = self.row(place)
            except BadSample as bad:
                row = bad
            yield place, row

    def row(self, place: Place) -> Any:
        name, text = self.images[place.start], self.texts[place.start]
        if text is None:
            raise BadSample("no_target", "caption", f"{name.rpartition('.')[0]}.txt, the text of the image, does not exist")
        if text.size > MAX_TEXT_BYTES:
            raise BadSample("file_too_large", "caption", f"{text.path.name} has {text.size:,} bytes, over {MAX_TEXT_BYTES:,}")
        return {"image": name, "caption": text.read(0, text.size).decode("utf-8-sig", "surrogateescape")}

    def file_of(self, shard: int) -> File:
        first = shard * self.run
        numbers = chain(range(first, len(self.texts)), range(first))
        return next(text for number in numbers if (text := self.texts[number]) is not None)

    def id(self, place: Place) -> str:
        return f"{self.folder.name}#{place.shard * self.run + place.number}"

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        return self.id(place), str(self.folder), place.shard * self.run + place.number

    def line(self, place: Place) -> None:  # noqa: ARG002
        return None


def open_sidecars(images: Sequence[Location], texts: Sequence[Location | None], folder: Location, retries: int) -> Sidecars:
    """Images and their sidecar texts, where they exist. Refused when there are too many."""
    if len(images) > MAX_IMAGES:
        raise Refused(
            f"{folder} holds {len(images):,} images with a text file for each, and more than {MAX_IMAGES:,} take too long to look "
            "for. Write them into one metadata.csv with the columns file_name and caption"
        )
    files = [File.of(text, retries) if text is not None else None for text in texts]
    contents = iter(fingerprints([file for file in files if file is not None]))
    names = [below(folder, image) for image in images]
    said = [f"{name}\n{'' if file is None else next(contents)}\n" for name, file in zip(names, files, strict=True)]
    shards: list[Shard] = []
    for first in range(0, len(names), SHARD_ROWS):
        run = slice(first, first + SHARD_ROWS)
        digest = hashlib.sha256("".join(said[run]).encode("utf-8", "surrogatepass")).hexdigest()
        shards.append(Shard(f"{folder.name}#{first}", digest, sum(file.size for file in files[run] if file is not None)))
    without = sum(file is None for file in files)
    what = "images with a .txt of the same name" + (f", but {without:,} without" if without else "")
    return Sidecars(tuple(names), tuple(files), folder, SHARD_ROWS, tuple(shards), what)
