"""The layout of the rows of a container: detected from the first rows, or declared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

from eyeline.core.batch import Role, Sample
from eyeline.core.errors import BadSample, Refused, nearest
from eyeline.core.locations import Location
from eyeline.core.user_code import UserFunction, is_code, user_function
from eyeline.data.containers.container import Container
from eyeline.data.layouts.choices import LISTS, OPTION_COLUMNS
from eyeline.data.layouts.conversations import COMPARED, SAME_KEYS, SOUNDS, llava_sample, named_kind, openai_sample
from eyeline.data.layouts.marks import ROW_MARKS, is_row_mark
from eyeline.data.layouts.media import IMAGE_COLUMNS, TIMES, VIDEO_COLUMNS, parse_list
from eyeline.data.layouts.no_layout import ASKS, no_layout
from eyeline.data.layouts.pairs import (
    ANSWERS,
    CAPTION_PROMPT,
    CAPTIONS,
    alpaca_sample,
    caption_sample,
    cauldron_sample,
    easy_vqa_sample,
    exchanges_sample,
    prompt_completion_sample,
    query_response_sample,
    question_answer_sample,
    vqa_kind,
)
from eyeline.data.layouts.user_rows import refuse_failing, user_row

Name = Literal[
    "llava", "openai", "cauldron", "prompt-completion", "exchanges", "alpaca", "query-response", "question-answer", "captions", "easy-vqa"
]  # fmt: skip
LOOKED_AT = 20  # rows that can be read
SKIPPED = 100  # of those and of others, at most
KINDS = ("kind", "category")
SAME = (IMAGE_COLUMNS, VIDEO_COLUMNS, CAPTIONS, ANSWERS, KINDS)  # columns of which one is read


@dataclass(frozen=True)
class Shape:
    """A layout that is known."""

    name: Name
    read: Callable[[Any, str, Location], Sample]  # (row, id, root of the images); BadSample for what it cannot use
    needs: tuple[tuple[str, ...], ...]  # of each of these a row has one column
    reads: tuple[str, ...]  # further columns
    turns: tuple[str, ...] = ()  # columns that are lists of turns
    keys: tuple[str, ...] = ()  # of a turn
    note: str = ""
    kind: Callable[[Any], str] = named_kind

    @property
    def speaker(self) -> str | None:
        """The key of a turn that says whose it is."""
        return next((key for key in self.keys if key in ("from", "role")), None)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*(column for one in self.needs for column in one), *self.reads, *KINDS)

    def fits(self, row: Any) -> bool:
        if not self.needs:
            return isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], str)
        return isinstance(row, dict) and all(any(row.get(column) is not None for column in one) for one in self.needs)


MEDIA = (*IMAGE_COLUMNS, *VIDEO_COLUMNS, *TIMES)
REJECTED = ("tools", *COMPARED, *SOUNDS, "objects")  # columns that a row is rejected for
TOLD = (*MEDIA, "system", *REJECTED, *ROW_MARKS)
MARKS = ("loss", "masked")  # keys of a turn, of which `columns` may say what they are called
SHAPES = (  # in the order in which they are taken where several fit
    Shape("llava", llava_sample, (("conversations",),), TOLD, ("conversations",), ("from", "value", *MARKS)),
    Shape("openai", openai_sample, (("messages",),), TOLD, ("messages",), ("role", "content", *MARKS)),
    Shape("cauldron", cauldron_sample, (("texts",),), TOLD, ("texts",), ("user", "assistant", *MARKS)),
    Shape(
        *("prompt-completion", prompt_completion_sample, (("prompt",), ("completion",)), TOLD),
        *(("prompt", "completion"), ("role", "content", *MARKS)),
    ),
    Shape("exchanges", exchanges_sample, (("conversation",),), TOLD, ("conversation",), ("human", "assistant", *MARKS)),
    Shape("alpaca", alpaca_sample, (("instruction",), ("output",)), (*TOLD, "input", "history")),
    Shape("query-response", query_response_sample, (("query",), ("response",)), (*TOLD, "history")),
    Shape("question-answer", question_answer_sample, (("question",), ANSWERS), (*TOLD, "hint", "index", *OPTION_COLUMNS)),
    Shape("captions", caption_sample, (IMAGE_COLUMNS, CAPTIONS), ROW_MARKS, note=f", which is the answer to {CAPTION_PROMPT!r}"),
    Shape("easy-vqa", easy_vqa_sample, (), (), kind=vqa_kind),
)
assert tuple(shape.name for shape in SHAPES) == get_args(Name)
HIDDEN = (*REJECTED, *(name for name in ROW_MARKS if name not in MARKS), *(name for name in OPTION_COLUMNS if name not in LISTS), "index")
_ALL = dict.fromkeys(column for shape in SHAPES for column in shape.columns)
COLUMNS = tuple(sorted(_ALL, key=lambda column: column in HIDDEN))  # that a layout may read; those that messages list come first


@dataclass(frozen=True)
class Mapping:
    """Columns, keys of turns and roles that the data calls otherwise."""

    columns: tuple[tuple[str, str], ...] = ()  # (ours, theirs), with dots for a field inside one: "meta.image"
    roles: tuple[tuple[Role, str], ...] = ()

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Columns of the data that it may name: `meta`, and `meta.image` itself."""
        return tuple(dict.fromkeys(head for _, theirs in self.columns for head, _ in cuts(theirs)))

    def apply(self, shape: Shape, row: Any) -> Any:
        """The row as its layout names it."""
        row = self._row_of_turns(shape, row)
        if not isinstance(row, dict) or not (self.columns or self.roles):
            return row
        columns = [(ours, theirs) for ours, theirs in self.columns if ours not in shape.keys]
        hidden = {theirs for _, theirs in columns} | {c for ours, _ in columns for c in next((s for s in SAME if ours in s), (ours,))}
        out = {column: value for column, value in row.items() if column not in hidden}
        out |= {ours: value for ours, theirs in columns if (value := inside(row, theirs)) is not None}
        for column in shape.turns:
            turns = parse_list(out.get(column), column)
            if isinstance(turns, list):
                out[column] = [self._turn(shape, turn) if isinstance(turn, dict) else turn for turn in turns]
        return out

    def _turn(self, shape: Shape, turn: dict[str, Any]) -> dict[str, Any]:
        keys = [(ours, theirs) for ours, theirs in self.columns if ours in shape.keys]
        hidden = {name for pair in keys for name in pair}
        out = {key: value for key, value in turn.items() if key not in hidden}
        out |= {ours: value for ours, theirs in keys if (value := inside(turn, theirs)) is not None}
        for key in (shape.speaker, SAME_KEYS[shape.speaker]) if shape.speaker else ():
            if key in out:
                out[key] = next((ours for ours, theirs in self.roles if out[key] == theirs), out[key])
        return out

    def _row_of_turns(self, shape: Shape, row: Any) -> Any:
        """A row that is a list of turns, as the column of a row that has nothing else."""
        if not (isinstance(row, list) and row and shape.needs == (shape.turns,) and shape.speaker and isinstance(row[0], dict)):
            return row
        speaker = dict(self.columns).get(shape.speaker, shape.speaker)
        return {shape.turns[0]: row} if inside(row[0], speaker) is not None else row


def cuts(name: str) -> Iterator[tuple[str, str]]:
    """The ways to split a name into a column and a path inside it: all of it, then its first part and the rest, and so on."""
    parts = name.split(".")
    yield name, ""
    yield from ((".".join(parts[:n]), ".".join(parts[n:])) for n in range(1, len(parts)))


def inside(row: dict[str, Any], name: str) -> Any:
    """The value of a column, or of a field inside one: `meta.image`. None when it does not exist."""
    for head, rest in cuts(name):
        value = row.get(head)
        if not rest and head in row:
            return value
        if rest and isinstance(value, dict) and (found := inside(value, rest)) is not None:
            return found
    return None


@dataclass(frozen=True)
class Layout:
    """The layout of a source."""

    shape: Shape
    why: str  # how it was recognised
    mapping: Mapping
    text_only: bool = False  # the source says images: ignore
    code: UserFunction | None = None  # of the user's, which makes of each row one of the shape

    @property
    def name(self) -> str:
        return self.shape.name if self.code is None else self.code.name

    @property
    def identity(self) -> str:
        """What a row means depends on this alone."""
        name = self.name if self.code is None else self.code.identity
        name = f"{name} text" if self.text_only else name
        return name if self.mapping == Mapping() else f"{name} {self.mapping.columns} {self.mapping.roles}"

    def parsed(self, row: Any, id: str, root: Location) -> tuple[str | None, Sample | BadSample]:
        """The row's kind (None: it cannot be told), and the row as a Sample, or why there is none."""
        kind = None if self.code else ""
        try:
            row = self._renamed_row(row)
            kind = self.shape.kind(row)
            return kind, self._sample(row, id, root)
        except BadSample as bad:
            return kind, bad

    def read(self, row: Any, id: str, root: Location) -> Sample:
        """The row as a Sample. BadSample for what it cannot use."""
        return self._sample(self._renamed_row(row), id, root)

    def _renamed_row(self, row: Any) -> Any:
        """The row as its shape names things."""
        return self.mapping.apply(self.shape, row if self.code is None else user_row(self.code, row))

    def _sample(self, row: Any, id: str, root: Location) -> Sample:
        sample = self.shape.read(row, id, root)
        if self.text_only and sample.media:
            why = f"the source says images: ignore, and the row shows {sample.media[0].name[:100]!r}"
            raise BadSample("image_ignored", "images", f"{why}. Set images: to the folder of the images, or leave it out")
        return sample

    def kind(self, row: Any) -> str:
        try:
            return self.shape.kind(self._renamed_row(row))
        except BadSample:  # turns that are no JSON: `read` says so
            return ""


# Finding it out


def layout_of(path: Location, container: Container, declared: str | None, mapping: Mapping) -> Layout:
    """The layout that is declared, or the one that fits most of the first rows, and of several the first of SHAPES."""
    if declared is not None and is_code(declared):
        code = user_function(declared, ("row",))
        refuse_failing(path, container, code)
        messages = next(shape for shape in SHAPES if shape.name == "openai")
        return Layout(messages, f"{container.what}; rows are read by {code.name}", mapping, code=code)
    shapes = tuple(shape for shape in SHAPES if declared in (None, shape.name))
    _refuse_unknown(path, declared, mapping, shapes)
    rows: list[tuple[int, Any]] = []
    unread: BadSample | None = None
    count = 0
    for row in islice((row for shard in range(len(container.shards)) for _, row in container.rows(shard)), SKIPPED):
        if isinstance(row, BadSample):
            unread = unread or row
        elif isinstance(row, dict | list):
            rows.append((count, row))
        count += 1
        if len(rows) == LOOKED_AT:
            break
    if not count:
        raise Refused(f"{path} holds no rows")
    names = container.header or tuple(dict.fromkeys(key for _, row in rows if isinstance(row, dict) for key in row))
    if names:
        _refuse_absent(path, mapping, shapes, [row for _, row in rows if isinstance(row, dict)], names)
    fits = {shape.name: [n for n, row in rows if shape.fits(_row_or_none(mapping, shape, row))] for shape in shapes}
    best = max(shapes, key=lambda shape: len(fits[shape.name]))
    if not fits[best.name]:
        raise no_layout(path, container, declared, shapes, SHAPES, names, [row for _, row in rows], unread)
    _refuse_unread(path, mapping, best)
    if best.name == "captions" and declared is None and not any(ours in CAPTIONS for ours, _ in mapping.columns):
        _refuse_questions_alone(path, [row for _, row in rows if best.fits(row)])
    first = fits[best.name][0]
    row = _row_or_none(mapping, best, dict(rows)[first])
    theirs = dict(mapping.columns)
    had = [next(c for c in one if row.get(c) is not None) for one in best.needs]
    said = " and ".join(f"{column} ({theirs[column]})" if column in theirs else column for column in had)
    marking = [name for name in ROW_MARKS if any(is_row_mark(name, row.get(name)) for _, row in rows if isinstance(row, dict))]
    read = [name for name in best.columns if (name not in ROW_MARKS or name in marking) and (name != "index")]
    skipped = [name for name in names if name not in (*read, *mapping.columns_read, "id")]
    others = [shape.name for shape in shapes if shape is not best and fits[shape.name]]
    why = "; ".join([
        container.what,
        *(["declared"] if declared else []),
        f"row {first} {f'has {said}{best.note}' if had else 'is [question, answer, number of the image]'}",
        *([f"{len(fits[best.name])} of the first {len(rows)} rows do"] if len(fits[best.name]) < len(rows) else []),
        *([f"{' and '.join(others)} would fit too (set layout: NAME)"] if others else []),
        *([f"not read: {', '.join(skipped[:20])}{' …' if len(skipped) > 20 else ''}"] if skipped else []),
    ])  # fmt: skip
    return Layout(best, why, mapping)


def _refuse_questions_alone(path: Location, rows: list[dict[str, Any]]) -> None:
    """Refused for rows that have an image and a `text` that is a question, or answers one, and is not a caption."""
    plain = [row for row in rows if row.get("caption") is None and row.get("captions") is None]
    texts = [row["text"] for row in plain if isinstance(row.get("text"), str)]
    asking = [column for column in ASKS if any(row.get(column) is not None for row in rows)]
    if len(texts) < len(rows) or not (asking or all(text.rstrip().endswith(("?", "？")) for text in texts)):
        return
    why = f"next to a column {asking[0]}" if asking else "which is a question in each of the first rows"
    raise Refused(
        f"{path}: its rows have an image and text ({texts[0][:60]!r}), {why}: files with questions only have no answer to train on. If "
        "there are answers, say columns: {question: text, answer: NAME}; if the texts are captions, columns: {caption: text}"
    )


def _row_or_none(mapping: Mapping, shape: Shape, row: Any) -> Any:
    try:
        return mapping.apply(shape, row)
    except BadSample:  # turns that are no JSON: the rows before and after tell the layout
        return None


def _refuse_unknown(path: Location, declared: str | None, mapping: Mapping, shapes: tuple[Shape, ...]) -> None:
    own = dict.fromkeys(name for shape in shapes for name in (*shape.columns, *shape.keys))
    known = tuple(name for name in own if name not in HIDDEN)
    for ours, theirs in mapping.columns:
        if ours not in known:
            whose = f"the layout {declared}" if declared else "any layout"
            hint = f" Write {{{theirs}: {ours}}}, ours first." if theirs in known else nearest(ours, known)
            raise Refused(
                f"{path}: columns: {ours} is not a column of {whose}.{hint} Columns are given as OURS: THEIRS, and ours are "
                f"{', '.join(known)}"
            )
    for same in SAME:
        twice = [ours for ours, _ in mapping.columns if ours in same]
        if len(twice) > 1:
            raise Refused(f"{path}: columns: {' and '.join(twice)} are names of the same column. Keep one of them")
    if mapping.roles and not any(shape.speaker for shape in shapes):
        raise Refused(f"{path}: roles: the layout {declared} has no turns with roles. Leave them out")


def _refuse_unread(path: Location, mapping: Mapping, best: Shape) -> None:
    unread = [ours for ours, _ in mapping.columns if ours not in (*best.columns, *best.keys)]
    if unread or (mapping.roles and not best.speaker):
        what = f"columns: {unread[0]}" if unread else "roles"
        raise Refused(
            f"{path}: {what} has no meaning in the layout {best.name}, which was detected. Set layout: to the one you want, or leave it out"
        )


def _refuse_absent(path: Location, mapping: Mapping, shapes: tuple[Shape, ...], rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    """Refused for a name that the data does not have, as far as it was looked at."""
    keys = {key for shape in shapes for key in shape.keys}
    plain = Mapping(tuple(pair for pair in mapping.columns if pair[0] not in keys))
    turns: list[dict[str, Any]] = []
    for shape in shapes:
        for row in (_row_or_none(plain, shape, row) for row in rows):
            turns += [t for c in shape.turns for t in _turns(row, c) if isinstance(t, dict)]
    inner = tuple(f"{name}.{key}" for name in names for key in next((list(r[name]) for r in rows if isinstance(r.get(name), dict)), []))
    for ours, theirs in mapping.columns:
        there, found, what = (turns, tuple(dict.fromkeys(k for t in turns for k in t)), "turns") if ours in keys else (rows, names, "rows")
        if theirs not in found and all(inside(one, theirs) is None for one in there):
            raise Refused(
                f"{path}: columns: {ours}: {theirs}, but its {what} have {', '.join(found[:20])}.{nearest(theirs, found + inner)}"
            )
    theirs = dict(mapping.columns)
    keys = [theirs.get(key, key) for shape in shapes if shape.speaker for key in (shape.speaker, SAME_KEYS[shape.speaker])]
    speakers = tuple(dict.fromkeys(said for turn in turns for key in dict.fromkeys(keys) if isinstance(said := inside(turn, key), str)))
    for role, name in mapping.roles:
        if role != "system" and name not in speakers:
            raise Refused(
                f"{path}: roles: {role}: {name}, but the speakers of its turns are {', '.join(speakers[:20])}.{nearest(name, speakers)}"
            )


def _turns(row: Any, column: str) -> list[Any]:
    try:
        turns = parse_list(row.get(column), column) if isinstance(row, dict) else None
    except BadSample:
        return []
    return turns if isinstance(turns, list) else []
