"""The message about rows without a known layout: what they may be, and what is wanted."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eyeline.core.errors import BadSample, Refused, closest
from eyeline.core.locations import Location
from eyeline.data.containers.container import Container
from eyeline.data.layouts.conversations import COMPARED
from eyeline.data.layouts.media import IMAGE_COLUMNS
from eyeline.data.rejects import REMEDIES

if TYPE_CHECKING:
    from eyeline.data.layouts.layouts import Shape

ASKS = ("question_id", "question", "prompt", "query", "instruction")  # columns of rows that ask


def no_layout(
    path: Location,
    container: Container,
    declared: str | None,
    shapes: "Sequence[Shape]",
    every: "Sequence[Shape]",
    names: tuple[str, ...],
    rows: list[Any],
    unread: BadSample | None,
) -> Refused:
    """The error for a source of which no row fits any of `shapes`; `every` are all that there are."""
    refused = _one_object(path, container, every, rows)
    if refused is not None:
        return refused
    if unread is not None and not rows:
        return Refused(f"{path}: none of its first rows can be read. The first: {unread}. {REMEDIES[unread.cause]}")
    columns = f"its rows have {', '.join(names[:20])}" if names else "none of its first rows is an object"
    none = "it has no known layout" if declared is None else f"none of its first rows is of the layout {declared}"
    return Refused(
        f"{path}: {none}. Found: {container.what}; {columns}.{_guess(container.what, names, every, rows)} Wanted: "
        f"{'; '.join(map(_needs_of, shapes))}. Name yours with columns: {{OURS: THEIRS}}"
    )


def _one_object(path: Location, container: Container, shapes: "Sequence[Shape]", rows: list[Any]) -> Refused | None:
    """The error for a file of one object, that is written over several lines or has the rows inside it."""
    if container.what != "JSON lines" or len(rows) > 1:
        return None
    within = None
    if rows and isinstance(rows[0], dict):
        items = [(key, value[0] if isinstance(value, list) and value else value) for key, value in rows[0].items()]
        within = next((key for key, item in items if any(shape.fits(item) for shape in shapes if shape.needs)), None)
    elif not rows:
        file = container.file_of(0)
        head = file.read(0, min(file.size, 4096)).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
        begun = re.match(r'\{\s*"((?:[^"\\]|\\.)*)"\s*:', head)
        within = begun[1] if begun and "\n" in head.split("}")[0].rstrip() else None
    if within is not None:
        what = f"one JSON object, with {within!r} in it, and neither a list of rows nor an object per line"
        return Refused(f"{path} is {what}. Write the rows alone, as a list")
    return None


def _guess(what: str, names: tuple[str, ...], shapes: "Sequence[Shape]", rows: list[Any]) -> str:
    """A guess what rows without a layout are, as a sentence."""
    if set(names) & set(COMPARED[:3]):
        return " Answers that are compared (preference data) are not trained on: keep the good ones as completion or output."
    asking = next((name for name in ASKS[1:] if name in names), None)
    if asking is not None:
        return f" They ask ({asking}), and no column of answers is known: a file with questions only has nothing to train on."
    if rows and all(isinstance(row, list) and row and all(isinstance(item, dict) for item in row) for row in rows):
        return " Its rows are lists of objects, several samples in a row: give the file from before it was packed; Eyeline packs itself."
    if what.startswith("WebDataset") and names and not set(names) - {"images", "csv", "tsv"}:
        return (
            " Its first samples are images only: in an archive a sample's text follows its image, of one name up to the first dot. "
            "If it is a folder that was packed up, unpack it."
        )
    if any(name.lower().endswith((".jpg", ".jpeg", ".png", ".webp")) for name in names):
        return " That looks like a row: a table starts with a line of the names of its columns."
    wanted = (*IMAGE_COLUMNS, *(column for shape in shapes for one in shape.needs for column in one))
    close = {name: closest(name.lower(), wanted, 0.75) for name in names if name not in wanted}
    pairs = ", ".join(f"{ours}: {theirs}" for theirs, ours in close.items() if ours)
    return f" Perhaps columns: {{{pairs}}}." if pairs else ""


def _needs_of(shape: "Shape") -> str:
    needs = " and ".join(" or ".join(one[:2]) for one in shape.needs)
    return f"{needs or '[question, answer, number of the image]'} ({shape.name})"
