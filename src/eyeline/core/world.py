"""The processes that train together (ranks), as one of them sees them: who it is, and how plain values are exchanged on the host.

`parallel/launch.py` makes it; code that needs other ranks' answers gets it as an argument. A single process
is rank 0 of 1, and runs the same code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eyeline.core.errors import EXPECTED, ElsewhereFailed

T = TypeVar("T")


def _same(value: Any) -> Any:
    return value


def _alone(value: Any) -> Sequence[Any]:
    return [value]


@dataclass(frozen=True)
class World:
    """Ranks call the same methods in the same order, and each waits for the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine: the number of its device
    local_size: int = 1
    gather: Callable[[Any], Sequence[Any]] = _alone  # a plain value of each rank -> those of all ranks, in their order
    # the same, without a limit on how long the others may take: while one of them indexes data, say. That a rank has ended is seen at once
    gather_patiently: Callable[[Any], Sequence[Any]] = _alone
    share: Callable[[Any], Any] = _same  # what rank 0 gives, however large, on all ranks; what the others give is not sent
    waits: list[float] = field(default_factory=lambda: [0.0], compare=False)  # its one number: seconds that this rank has spent in these
    hosts: Sequence[str] = ("",)  # of all ranks

    @property
    def first(self) -> bool:
        """Return whether this is rank 0, which writes and shows what a single process would."""
        return self.rank == 0

    def by_first(self, work: Callable[[], T]) -> T:
        """The plain result of what rank 0 alone does, on all ranks. Where it fails as can be expected the others raise ElsewhereFailed."""
        if self.size == 1:
            return work()
        result, failed = (*_attempt(work),) if self.first else (None, None)
        agreed, code = self.gather_patiently((result, None if failed is None else failed.code))[0]
        if failed is not None:
            raise failed
        if code is not None:
            raise ElsewhereFailed(code)
        return agreed

    def from_first(self, work: Callable[[], T]) -> T:
        """What rank 0 alone has made, sent to all: a batch, say. Where it fails as can be expected the others raise ElsewhereFailed."""
        if self.size == 1:
            return work()
        result, failed = _attempt(work) if self.first else (None, None)
        told, code = self.share((result, None if failed is None else failed.code))
        if failed is not None:
            raise failed
        if code is not None:
            raise ElsewhereFailed(code)
        return told

    def by_each(self, work: Callable[[], T]) -> T:
        """What each rank does for itself. Where one fails as can be expected the others raise ElsewhereFailed: none waits for it."""
        if self.size == 1:
            return work()
        result, failed = _attempt(work)
        codes = [code for code in self.gather_patiently(None if failed is None else failed.code) if code is not None]
        if failed is not None:
            raise failed
        if codes:
            raise ElsewhereFailed(codes[0])
        return result


ALONE = World()


def _attempt(work: Callable[[], Any]) -> tuple[Any, Any]:
    """The result, or the expected error."""
    try:
        return work(), None
    except (*EXPECTED, ElsewhereFailed) as error:
        return None, error
