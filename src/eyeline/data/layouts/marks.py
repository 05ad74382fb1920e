"""Marks of turns, or of a row for all its turns, that say which answers are in the loss.

An answer is in the loss unless it is marked. A mark that is neither on nor off, or that stands where it cannot be obeyed, is a reject:
none is ignored.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from eyeline.core.batch import Role
from eyeline.core.errors import BadSample
from eyeline.data.layouts.media import describe_value, parse_list

Sense = Literal["in the loss", "left out", "unclear"]

# 1 or true: the answer is in the loss. OpenAI, Mistral and axolotl: weight; ms-swift: loss, loss_scale; LLaMA-Factory: loss_weight;
# axolotl: train, training; torchtune and others: train_on_turn; Megatron and NeMo: loss_mask, loss_multiplier
KEEPS = (
    *("loss", "weight", "loss_weight", "loss_scale", "loss_mask", "loss_multiplier", "train", "training", "trainable"),
    *("is_trainable", "train_on_turn", "train_on", "compute_loss", "calculate_loss", "use_loss", "in_loss", "supervised", "learn"),
)
# 1 or true: it is left out. torchtune: masked
DROPS = (
    *("masked", "is_masked", "mask_loss", "loss_masked", "ignore_loss", "no_loss", "skip_loss", "exclude_from_loss"),
    *("no_train", "do_not_train", "skip_training", "ignore", "ignored", "skip", "exclude", "excluded"),
)
LISTS = ("losses", "weights", "loss_weights", "loss_scales", "loss_masks")  # of the row: one value for each turn
UNCLEAR = "mask"  # 1 is read as "in the loss" by some trainers, and as "left out" by others
ROW_MARKS = (*(name for name in KEEPS if name != "learn"), *DROPS[:11], *LISTS, UNCLEAR)  # columns that may mark the turns of a row
ORDINARY = ("loss", "weight", "weights", "losses", "train", "training", UNCLEAR)  # columns that also mean other things: a path, a split
WRITE = "Write loss: false (or weight: 0) in a turn whose answer is not to be trained on, and true (or 1) or nothing in the others"

_ROW_MARKS = frozenset(ROW_MARKS)
_WORD = re.compile(r"(^|_)(loss\w*|train\w*|mask\w*|weights?|unmask\w*|supervis\w*|learn\w*)(_|$)")
_TEXTS = {"0": False, "false": False, "0.0": False, "1": True, "true": True, "1.0": True}  # of the cells of a table


@lru_cache(maxsize=1 << 12)
def sense_of(key: str) -> Sense | None:
    """The meaning of a key of a turn when it is on. None for a key that is not a mark; `unclear` for one that reads like a mark of another
    trainer."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|[-\s.]+", "_", key).lower()
    if name in KEEPS:
        return "in the loss"
    if name in DROPS:
        return "left out"
    return "unclear" if _WORD.search(name) else None


def is_row_mark(column: str, value: Any) -> bool:
    """Return whether a column of a row marks its turns. An ordinary word does so only by a value that a mark may have: a `mask` may be
    the path
    of an image, and `train` the name of a split."""
    if column not in _ROW_MARKS or _absent(value):
        return False
    if column not in ORDINARY:
        return True
    if isinstance(value, str):
        listed = value[:1] == "[" and re.fullmatch(r"[\[\]\d\s.,a-z]*", value)
        return bool(listed) or value.strip().lower() in _TEXTS or (column == UNCLEAR and value.strip().lower() in _SPEAKERS)
    if isinstance(value, list):
        return all(v is None or isinstance(v, int | float) for v in value)
    # a weight in kg and a loss that a filter measured are figures; a share of the loss is a mark, and is refused as one
    return value in (0, 1) or (column == "weight" and isinstance(value, float) and 0 < value < 1)


def _absent(value: Any) -> bool:
    return value is None or value in ("", [], {}) or value != value  # NaN is what pandas writes for no value


_SPEAKERS: dict[str, Role] = {"user": "user", "human": "user", "system": "system", "assistant": "assistant", "gpt": "assistant"}
Marked = tuple[bool, str]  # whether a turn is in the loss, and the field that says so


def supervised_turns(row: Mapping[str, Any], turns: Sequence[tuple[Role, str, Mapping[str, Any] | None]]) -> list[bool]:
    """Return whether each turn, if it is an answer, is in the loss. `turns` are (role, its field, the object that may mark it).

    BadSample for a mark that cannot be obeyed, and `no_target` where every answer is left out.
    """
    marks = [[*_marks_of(turn, field)] if turn else [] for _, field, turn in turns]
    if not _ROW_MARKS.isdisjoint(row):
        for column in ROW_MARKS:
            if is_row_mark(column, row.get(column)):
                for n, mark in _marks_of_row(column, row[column], [role for role, _, _ in turns]):
                    marks[n].append(mark)
    out = [_resolve_marks(role, field, found) for (role, field, _), found in zip(turns, marks, strict=True)]
    answers = [n for n, (role, _, _) in enumerate(turns) if role == "assistant"]
    if answers and not any(out[n] for n in answers):
        why = "every answer of the row is excluded from the loss, so that nothing would be trained. Leave the row out"
        raise BadSample("no_target", marks[answers[-1]][0][1], why)
    return out


def _marks_of(turn: Mapping[str, Any], field: str) -> list[Marked]:
    found: list[Marked] = []
    for key, value in turn.items():
        sense = sense_of(key)
        if sense is None or _absent(value):
            continue
        if sense == "unclear":
            what = f"{describe_value(value)}: whether this keeps the turn in the loss or leaves it out is not clear"
            raise BadSample("unsupported", f"{field}.{key}", f"{what}. {WRITE}")
        found.append((_on(value, f"{field}.{key}") == (sense == "in the loss"), f"{field}.{key}"))
    return found


def _marks_of_row(column: str, value: Any, roles: Sequence[Role]) -> list[tuple[int, Marked]]:
    """The marks that a column gives to turns, by their numbers."""
    answers = [n for n, role in enumerate(roles) if role == "assistant"]
    if (
        column == UNCLEAR and isinstance(value, str) and (named := _SPEAKERS.get(value.strip().lower()))
    ):  # NeMo: the speaker that is left out
        if named != "assistant":
            return []
        why = f"{value!r} leaves the answers out of the loss, and only answers are in it. Drop the column"
        raise BadSample("unsupported", column, why)
    if column == UNCLEAR:
        what = f"{describe_value(value)}: some trainers read 1 as in the loss, and others as left out"
        raise BadSample("unsupported", column, f"{what}. Call the column loss_mask (1: in the loss) or masked (1: left out)")
    values = parse_list(value, column)
    keeps = column not in DROPS
    if not isinstance(values, list):
        if isinstance(values, str):
            values = _TEXTS.get(values.strip().lower(), values)
        on = _on(values, column)
        return [(n, (on == keeps, column)) for n in answers]
    numbers = list(range(len(roles))) if len(values) == len(roles) else answers
    if len(values) != len(numbers):
        wanted = f"one for each of {len(roles)} turns, or for each of {len(answers)} answers"
        raise BadSample("unsupported", column, f"{len(values)} marks, wanted {wanted}. {WRITE}")
    ons = [(n, None if v is None else _on(v, f"{column}[{m}]"), m) for m, (n, v) in enumerate(zip(numbers, values, strict=True))]
    return [(n, (on == keeps, f"{column}[{m}]")) for n, on, m in ons if on is not None]


def _on(value: Any, field: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    what = "an answer is in the loss or out of it, without weights in between" if isinstance(value, int | float) else "a mark is on or off"
    raise BadSample("unsupported", field, f"got {describe_value(value)}; {what}. Write true or false (1 or 0), or drop the mark")


def _resolve_marks(role: Role, field: str, found: Sequence[Marked]) -> bool:
    """Combine the marks of a turn."""
    said = dict(found)
    if len(said) > 1:
        raise BadSample("unsupported", said[True], f"it says that the turn is in the loss, and {said[False]} that it is not. Keep one mark")
    if role != "assistant" and said.get(True):
        why = f"{field} is a turn of the {role}, and only answers are in the loss. Drop the mark, or set it to false"
        raise BadSample("unsupported", said[True], why)
    return not found or found[0][0]


def refuse_marked_part(part: Mapping[str, Any], field: str) -> None:
    """BadSample for a part of a turn that is marked: a turn is in the loss as a whole."""
    for key, value in part.items():
        if sense_of(key) is not None and not _absent(value):
            raise BadSample("unsupported", f"{field}.{key}", f"a part of a turn cannot be marked. {WRITE}")
