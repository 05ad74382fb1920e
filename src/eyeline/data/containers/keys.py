"""Group the members of an archive into samples by WebDataset's rule: those whose names are equal up to the first dot of the file's name.

Keys with dots in them (`frame_1.25.jpg`, `frame_1.50.jpg`) break that rule: many samples would be one. What tells them apart is the text
that each has: members belong to the text whose name, up to its kind, theirs begins with.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from eyeline.core.errors import BadSample

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
TEXTS = ("json", "txt")
NAMED_TEXTS = ("question", "answer", "caption", "prompt", "completion", "instruction", "output", "query", "response", "system")
MAX_NAME = 4096  # of a member: no file system has longer ones
WRITE = "Write keys without dots, or give each sample names of its own up to the first dot"


class Member(NamedTuple):
    """One file of an archive."""

    key: str  # its name up to the first dot; of a key with dots, up to the dot that ends it
    part: str  # what follows, in small letters
    kind: str  # what follows the last dot
    start: int  # of its header
    data: int  # where its content begins
    size: int
    plain: bool  # a regular file, inside the archive

    @property
    def name(self) -> str:
        return f"{self.key}.{self.part}"


def member_of(name: str, start: int, data: int, size: int, regular: bool) -> Member:
    if len(name) > MAX_NAME:
        return Member(name[:MAX_NAME], "", "", start, data, size, False)
    folder, _, last = name.rpartition("/")
    key, _, part = last.partition(".")
    part = part.lower()
    inside = not name.startswith("/") and ".." not in name.split("/") and "\0" not in name
    return Member(f"{folder}/{key}" if folder else key, part, part.rpartition(".")[2], start, data, size, regular and inside)


@dataclass(frozen=True)
class Text:
    """The role of a text member in its sample."""

    base: str  # what is between the key and what says what it is: "25" of `frame_1.25.question.txt`
    slot: str  # "json", "txt", or the name of a column: "question"


def text_of(member: Member, wanted: Sequence[str]) -> Text | None:
    """The text role of a member; None for one that is not text, neither by its kind nor as a column that is `wanted`."""
    column = next((part for part in wanted if f".{member.part}".endswith(f".{part}") and member.kind not in IMAGE_SUFFIXES), None)
    if column is not None:
        return Text(member.part[: -len(column) - 1], column)
    if member.kind not in TEXTS:
        return None
    before = member.part[: -len(member.kind) - 1]
    base, _, name = before.rpartition(".")
    return Text(base, name) if member.kind == "txt" and name in NAMED_TEXTS else Text(before, member.kind)


def split(group: Sequence[Member], wanted: Sequence[str]) -> list[list[Member]]:
    """The samples of neighbours whose names are equal up to the first dot, in order; mostly they are one. BadSample `tar_key`, with two
    names, where it cannot be told."""
    texts = [text for member in group if (text := text_of(member, wanted)) is not None]
    tops = tops_of(texts)
    stems = {stem_of(member) for member in group if member.kind in IMAGE_SUFFIXES}
    divided = any(_top(stem, tops - {""}) is not None for stem in stems) or bool(tops and not stems and tops != {""})
    if any(member.part in wanted for member in group) or not divided:
        out = [list(group)]
    else:
        out = _split_by_top(group, tops, wanted)
    for one in out:
        _refuse_two(one, wanted)
    return out


def tops_of(texts: Iterable[Text]) -> set[str]:
    """The keys that hold the texts of samples; texts below them are of parts of a sample."""
    bases = {text.base for text in texts}
    return {base for base in bases if not any(outer in bases for outer in _outer(base))}


def _outer(base: str) -> Iterator[str]:
    """The prefixes of a name, up to each of its dots."""
    while base:
        base = base.rpartition(".")[0]
        yield base


def stem_of(member: Member) -> str:
    """The part of the name between key and kind."""
    return member.part[: -len(member.kind) - 1] if "." in member.part else ""


def _top(stem: str, tops: Set[str]) -> str | None:
    """The one that it begins with."""
    return next((base for base in (stem, *_outer(stem)) if base in tops), None)


def _refuse_two(sample: Sequence[Member], wanted: Sequence[str]) -> None:
    """BadSample where two members would be for the same column of one sample. Where the sample has a text, those of its parts are not read;
    unless both have an image of their name."""
    texts = [(member, text) for member in sample if (text := text_of(member, wanted)) is not None]
    tops = tops_of(text for _, text in texts)
    stems = {stem_of(member) for member in sample if member.kind in IMAGE_SUFFIXES}
    first: dict[str, tuple[Member, Text]] = {}
    for member, text in texts:
        if member.part in wanted:
            continue
        other, another = first.setdefault(text.slot, (member, text))
        both = (text.base in tops) + (another.base in tops)
        if other is not member and (both == 2 or (both == 1 and {text.base, another.base} <= stems)):
            what = f"{other.name[-100:]!r} and {member.name[-100:]!r}"
            raise BadSample(
                "tar_key", "row", f"{what} have the same key by WebDataset's rule, so it is ambiguous which one is meant. {WRITE}"
            )
        if both == 1 and text.base in tops:
            first[text.slot] = (member, text)


def _split_by_top(group: Sequence[Member], tops: set[str], wanted: Sequence[str]) -> list[list[Member]]:
    """The members of each top, and what belongs to none by its name up to the last dot."""
    out: list[list[Member]] = []
    known: dict[str, Member] = {}
    last: str | None = None
    for member in group:
        text = text_of(member, wanted)
        stem = stem_of(member) if text is None else text.base
        top = _top(stem, tops)
        name = stem if top is None else top
        if last != name:
            if name in known:
                what = f"{known[name].name[-100:]!r} and {member.name[-100:]!r}"
                raise BadSample("tar_key", "row", f"{what} belong to one sample, and members of other samples are between them. {WRITE}")
            known[name], last = member, name
            out.append([])
        out[-1].append(_longer(member, top) if top else member)
    return out


def _longer(member: Member, top: str) -> Member:
    """The member of a key that continues to the end of `top`."""
    return member._replace(key=f"{member.key}.{top}", part=member.part[len(top) + 1 :])
