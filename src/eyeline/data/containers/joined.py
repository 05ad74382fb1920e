"""Several files as one container: their shards, one file after another."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import Location, below
from eyeline.data.containers.container import Container, File, Place, Shard


@dataclass(frozen=True)
class Joined:
    """Containers of a file each."""

    parts: tuple[Container, ...]
    names: tuple[str, ...]  # of the files, starting from the folder that all are in
    firsts: tuple[int, ...]  # number of each part's first shard
    shards: tuple[Shard, ...]
    what: str
    header: tuple[str, ...]

    def rows(self, shard: int) -> Iterator[tuple[Place, Any | BadSample]]:
        part, inner = self._part(shard)
        for place, row in self.parts[part].rows(inner):
            yield place._replace(shard=shard), row

    def row(self, place: Place) -> Any:
        part, inner = self._part(place.shard)
        return self.parts[part].row(place._replace(shard=inner))

    def file_of(self, shard: int) -> File:
        part, inner = self._part(shard)
        return self.parts[part].file_of(inner)

    def id(self, place: Place) -> str:
        part, inner = self._part(place.shard)
        return self._renamed(part, self.parts[part].id(place._replace(shard=inner)))

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        part, inner = self._part(place.shard)
        _, file, number = self.parts[part].origin_of(place._replace(shard=inner))
        return self.id(place), file, number

    def line(self, place: Place) -> int | None:
        part, inner = self._part(place.shard)
        return self.parts[part].line(place._replace(shard=inner))

    def _part(self, shard: int) -> tuple[int, int]:
        part = bisect_right(self.firsts, shard) - 1
        return part, shard - self.firsts[part]

    def _renamed(self, part: int, name: str) -> str:
        """Names begin with the file's own, which several may have."""
        return self.names[part] + name.removeprefix(self.names[part].rpartition("/")[2])


def join_containers(parts: Sequence[Container], files: Sequence[Location], folder: Location) -> Joined:
    """One container of those of some files. Refused when they are not of one kind."""
    kinds = {part.what: file for part, file in zip(reversed(parts), reversed(files), strict=True)}
    if len(kinds) > 1:
        (what, file), (other, another) = list(kinds.items())[:2]
        raise Refused(f"{another} is {other}, and {file} is {what}. Give them as separate sources")
    firsts = [0]
    for part in parts[:-1]:
        firsts.append(firsts[-1] + len(part.shards))
    whole = Joined(
        tuple(parts), tuple(below(folder, file) for file in files), tuple(firsts), (), parts[0].what,
        tuple(dict.fromkeys(name for part in parts for name in part.header)),
    )  # fmt: skip
    shards = [replace(shard, name=whole._renamed(n, shard.name)) for n, part in enumerate(parts) for shard in part.shards]
    return replace(whole, shards=tuple(shards))
