"""The likeliest tokens of a teacher, as a row of messages has them: an object in the answer's turn, of a number and base64."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eyeline.core.batch import Likely, Message
from eyeline.core.errors import BadSample

KEY = "likely"


def packed_likely(likely: Likely) -> dict[str, Any]:
    """The object of a turn."""
    ids = np.array(likely.ids, np.int32).tobytes()
    encoded = {name: base64.b64encode(data).decode() for name, data in (("ids", ids), ("top", likely.top), ("logp", likely.logp))}
    return {"k": likely.k, **encoded}


def likely_of(turn: dict[str, Any], field: str) -> Likely | None:
    """The inverse of `packed_likely`, of a turn that has it. BadSample for what is not one."""
    value = turn.get(KEY)
    if value is None:
        return None
    try:
        ids, top, logp = (base64.b64decode(value[name], validate=True) for name in ("ids", "top", "logp"))
        k = value["k"]
        count = len(ids) // 4
        if not isinstance(k, int) or k < 1 or (len(ids), len(top), len(logp)) != (4 * count, 4 * k * count, 2 * k * count):
            raise ValueError(f"{len(ids)}, {len(top)} and {len(logp)} bytes for k = {k!r}")
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        why = f"is not what `eyeline distill --top-logprobs` writes: {error}. Distill again, or leave it out"
        raise BadSample("wrong_type", f"{field}.{KEY}", why) from error
    return Likely(tuple(np.frombuffer(ids, np.int32).tolist()), top, logp, k)


def with_likely(messages: list[Message], turns: Sequence[tuple[str, int, dict[str, Any]]]) -> list[Message]:
    """The messages, of which the last has what a teacher found likely, where its turn has that. With each turn its column and number."""
    if not turns or messages[-1].role != "assistant":
        return messages
    column, number, turn = turns[-1]
    found = likely_of(turn, f"{column}[{number}]")
    return messages if found is None else [*messages[:-1], replace(messages[-1], likely=found)]
