"""A layout that is a function of the user's own, `read(row)`: what it makes of a row is read as OpenAI's messages."""

from itertools import islice
from typing import Any

from eyeline.core.errors import BadSample, Refused
from eyeline.core.locations import Location
from eyeline.core.user_code import CodeFailed, UserFunction
from eyeline.data.containers.container import Container
from eyeline.data.layouts.media import describe_value

LOOKED_AT = 20  # rows


def user_row(code: UserFunction, row: Any) -> dict[str, Any]:
    """The row that the function makes of a row. BadSample, with the line, where it fails or returns something else."""
    try:
        given = code(row)
    except CodeFailed as failed:
        raise BadSample("user_code", "row", str(failed)) from failed
    messages = given.get("messages") if isinstance(given, dict) else given
    if isinstance(messages, list):
        return given if isinstance(given, dict) else {"messages": given}
    got = f"a dict of {', '.join(map(str, given)) or 'nothing'}" if isinstance(given, dict) else describe_value(given)
    wanted = "a list of messages, or a dict with `messages`"
    raise BadSample("user_code", "row", f"{code.file}: {code.function} returned {got}; wanted {wanted}")


def refuse_failing(path: Location, container: Container, code: UserFunction) -> None:
    """Refused for a function that makes nothing of any of the first rows: then it is the function, and not a row, that is wrong."""
    first: BadSample | None = None
    count = 0
    for _, row in islice((found for shard in range(len(container.shards)) for found in container.rows(shard)), LOOKED_AT):
        count += 1
        try:
            if not isinstance(row, BadSample):
                user_row(code, row)
                return
            first = first or row
        except BadSample as bad:
            first = bad if first is None or first.cause != bad.cause else first
    if first is None:
        raise Refused(f"{path} holds no rows")
    raise Refused(f"{path}: {code.name} makes a sample of none of its first {count} rows. The first: {first.message}")
