"""Conversations made in one line."""

from typing import Any

from eyeline.core.batch import EncodedImage, Message, Sample, Text


def said(*turns: str | tuple[EncodedImage | str, ...], system: str | None = None) -> tuple[Message, ...]:
    """Messages from texts (or tuples of texts and images), user first."""
    out = [] if system is None else [Message("system", (Text(system),))]
    for n, turn in enumerate(turns):
        parts = (turn,) if isinstance(turn, str) else turn
        out.append(Message(("user", "assistant")[n % 2], tuple(Text(p) if isinstance(p, str) else p for p in parts)))
    return tuple(out)


def sample(*turns: str | tuple[EncodedImage | str, ...], system: str | None = None) -> Sample:
    return Sample("made#0", said(*turns, system=system))


DOT = EncodedImage("dot.png", b"never opened")


def turns(*texts: str, roles: tuple[str, ...] = ("human", "gpt")) -> list[dict[str, str]]:
    return [{"from": roles[n % 2], "value": text} for n, text in enumerate(texts)]


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def talk(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": f"answer {n}"}]
