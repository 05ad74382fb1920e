"""Counts and shares in messages, in one format each."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 sample`, `1,200 samples`; `plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def percent(share: float) -> str:
    """A share of 1 as `12.5%`."""
    return f"{share:.1%}"
