"""The expected failures, each with its exit code.

Every message has four parts: what is wrong, what was got, what was wanted, and the remedy. An exception that is not one
of these is a defect of Eyeline and exits with code 1 and a traceback.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar


class Refused(Exception):
    """A setting, file or machine that Eyeline will not work with. Raised before anything is changed; exit code 2."""

    code: ClassVar[int] = 2


class BadSample(Exception):
    """The *content* of one sample is unusable: it is rejected, counted under `cause`, and the run continues.

    Never raised for a store that fails: that is an `OSError`, which stops the run, since it must not change the plan.
    """

    def __init__(self, cause: str, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.cause = cause  # one of data.rejects.CAUSES: the key that rejects are counted under
        self.field = field  # where in the row: "image", "messages[1].content", ...
        self.message = message

    def __reduce__(self) -> tuple[type["BadSample"], tuple[str, str, str]]:
        return BadSample, (self.cause, self.field, self.message)


class TooManyRejects(Exception):
    """More samples were rejected than `max_reject_rate` allows; exit code 3."""

    code: ClassVar[int] = 3


class NotFinite(Exception):
    """More steps than the budget had a loss or gradient that is not finite; exit code 4."""

    code: ClassVar[int] = 4


class StorageFailed(Exception):
    """A file could not be read or written: disk full, vanished, no permission; exit code 5."""

    code: ClassVar[int] = 5


class RunLocked(Exception):
    """Another process is training in this run folder; exit code 6."""

    code: ClassVar[int] = 6


class OutOfMemory(Exception):
    """Something does not fit into memory, the device's or the host's; exit code 7."""

    code: ClassVar[int] = 7


class Quarantined(Exception):
    """Partitions of a job crashed every worker that tried them, and were given up by name; the others are done. Exit code 8."""

    code: ClassVar[int] = 8


class Stopped(Exception):
    """SIGTERM, SIGINT or SIGHUP asked for an end; all is saved, and the same command resumes from there. Exit code 75."""

    code: ClassVar[int] = 75


class Abandoned(BaseException):
    """A second SIGTERM or SIGINT: the run ends at once, and what is not in a checkpoint is lost. Exit code 143 or 130.

    Raised by a signal handler anywhere, so like KeyboardInterrupt it is no Exception: no handler of errors may take it for one.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class ElsewhereFailed(Exception):
    """Another rank failed and has said why: this one ends with the same exit code and says nothing."""

    def __init__(self, code: int):
        super().__init__("another rank failed, and has said why")
        self.code = code


class RankLost(Exception):
    """Another rank ended or did not answer in time, so that this one cannot continue; exit code 9."""

    code: ClassVar[int] = 9


class TeacherFailed(Exception):
    """A teacher that answers are asked of did not give them; exit code 10."""

    code: ClassVar[int] = 10


EXPECTED = (  # each has a `code`
    *(Refused, TooManyRejects, NotFinite, StorageFailed, RunLocked, OutOfMemory, Quarantined, RankLost, TeacherFailed, Stopped),
)


_NO_MEMORY = (  # how torch and CUDA say it in a RuntimeError; torch.OutOfMemoryError is one, too
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def out_of_memory(error: BaseException) -> str | None:
    """The message of an error, in one line, if it means that memory was too small: of the host (MemoryError, or a RuntimeError of
    torch's CPU
    allocator) or of a device. None where it means something else."""
    text = str(error).strip()
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)):
        return text.splitlines()[0] if text else "no memory is left"
    return None


@contextmanager
def fitting(what: str | Callable[[], str]) -> Iterator[None]:
    """OutOfMemory, saying what it was for, where memory is too small inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = out_of_memory(error)
        if said is None:
            raise
        raise OutOfMemory(f"{what if isinstance(what, str) else what()} does not fit into memory ({said})") from error


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """` Did you mean 'x'?` when `word` is close to a known one, else an empty string."""
    close = closest(word, known)
    return f" Did you mean {close!r}?" if close else ""


def closest(word: str, known: list[str] | tuple[str, ...], likeness: float = 0.6) -> str | None:
    """The known word that this one is likely meant for, if any is as like to it as that (of 1)."""
    import difflib

    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=likeness)), None)
