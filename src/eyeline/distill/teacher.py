"""What is asked of a teacher and what it says, whichever teacher it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from eyeline.core.batch import Likely, Message

Finish = Literal["stop", "length", "filtered", "failed"]  # filtered: by the server's own rules. failed: this request was refused


@dataclass(frozen=True)
class Request:
    """One request."""

    messages: tuple[Message, ...]
    seed: int  # of its sampling: follows from the recipe's seed, the sample, the prompt, and which of the answers to it this is


@dataclass(frozen=True)
class Said:
    """One answer."""

    text: str
    finish: Finish
    reasoning: str = ""  # that the server keeps apart from the text
    prompt_tokens: int | None = None  # None: the server does not say
    answer_tokens: int | None = None
    why: str = ""  # of a failed request
    likely: Likely | None = None  # the likeliest tokens at each of its tokens, where they are asked for
    cause: str = ""  # the same, where the sample itself cannot be used: a key of data.rejects.CAUSES


class Asking(Protocol):
    """A teacher. Pickles; what it opens, it opens where it is first asked."""

    @property
    def name(self) -> str: ...  # what rows say of it

    @property
    def identity(self) -> Any: ...  # as JSON: its answers are another teacher's where this differs

    @property
    def tokenizer(self) -> str | None: ...  # its identity, with the template's; None: not known

    @property
    def keeps_seeds(self) -> bool: ...  # whether a request's seed is used

    @property
    def accelerated(self) -> bool: ...  # whether it computes where it is asked, on a GPU if there is one

    def answers(self, requests: Sequence[Request]) -> list[Said]:
        """The answers, in order. Refused, TeacherFailed and OutOfMemory end the job."""
        ...

    def close(self) -> None: ...
