"""Counts, shares, times and sizes as people read them: one format each, in every message, table and page."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 sample`, `1,200 samples`; `plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def percent(share: float) -> str:
    """A share of 1 as `12.5%`."""
    return f"{share:.1%}"


def duration(seconds: float) -> str:
    """Elapsed or remaining time as `1:05` or `2:03:04`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def gib(size: int) -> str:
    """A number of bytes of memory as `1.25 GiB`; in MiB or KiB where that is less than a tenth."""
    unit, scale = next(((unit, scale) for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if size * 10 >= 1 << scale), ("bytes", 0))
    return f"{size / (1 << scale):,.2f} {unit}" if scale else f"{size} bytes"
