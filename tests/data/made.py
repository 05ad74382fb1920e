"""Conversations made in one line."""

from eyeline.core.batch import Message, Picture, Sample, Text


def said(*turns: str | tuple[Picture | str, ...], system: str | None = None) -> tuple[Message, ...]:
    """Messages from texts (or tuples of texts and pictures), user first."""
    out = [] if system is None else [Message("system", (Text(system),))]
    for n, turn in enumerate(turns):
        parts = (turn,) if isinstance(turn, str) else turn
        out.append(Message(("user", "assistant")[n % 2], tuple(Text(p) if isinstance(p, str) else p for p in parts)))
    return tuple(out)


def sample(*turns: str | tuple[Picture | str, ...], system: str | None = None) -> Sample:
    return Sample("made#0", said(*turns, system=system))


DOT = Picture("dot.png", b"never opened")
