"""Code of the user's own: a function in a Python file that a recipe names as FILE.py:FUNCTION, such as `layout: my_rows.py:read`.

The bytes of the file are read when it is opened, and they are what runs, in every process: an edit during a run changes nothing of it.
"""

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from eyeline.core.errors import Refused, StorageFailed, nearest

_NAMED = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")
_SETTINGS = ("layout", "metric")  # that may name code
_FILES, _SUFFIX = "prompts", ".jinja"  # a list that may name files


class CodeFailed(Exception):
    """A function of the user's raised an error; the message has file, line and error."""


@dataclass(frozen=True)
class UserFunction:
    """A function and the file that defines it. Pickles: another process runs the same bytes."""

    file: str
    function: str
    content: bytes

    @property
    def name(self) -> str:
        return f"{Path(self.file).name}:{self.function}"

    @property
    def identity(self) -> str:
        """What the function does depends on this alone."""
        return f"{self.name} {digest_of(self.content)}"

    def takes(self, argument: str) -> bool:
        return argument in inspect.signature(_load(self)).parameters

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function. CodeFailed, with the line, where it raises an error; StorageFailed where it cannot read a file: that is no
        fault of the row, which must not be dropped for it."""
        function = _load(self)
        try:
            return function(*arguments, **named)
        except MemoryError:
            raise
        except OSError as error:
            what = f"{type(error).__name__}: {error}. {self.function} gets all that it needs as arguments and should read no files"
            raise StorageFailed(f"{self._line_of(error)}: {what}") from error
        except (Exception, SystemExit) as error:  # whatever the user's code raises is told with its line, by row
            raise CodeFailed(f"{self._line_of(error)}: {type(error).__name__}: {error}") from error

    def _line_of(self, error: BaseException) -> str:
        """FILE:LINE of the last line of the file that the error passed through."""
        return f"{self.file}:{_last_line(error.__traceback__, self.file) or 1}"


def is_code(value: Any) -> bool:
    """Return whether a setting names a function of a file."""
    return isinstance(value, str) and _NAMED.fullmatch(value) is not None


def user_function(named: str, arguments: Sequence[str], optional: Sequence[str] = ()) -> UserFunction:
    """The function that FILE.py:FUNCTION names. Refused, with the line, where the file cannot be imported, or has no such function of
    these positional arguments, and of those of `optional` that it names."""
    found = _NAMED.fullmatch(named)
    assert found is not None, f"{named} names no function of a file"
    file, function = found["file"], found["function"]
    code = UserFunction(file, function, content_of(file))
    wanted = f"def {function}({', '.join(arguments)})"
    try:
        inspect.signature(_load(code)).bind(*arguments, **{name: name for name in optional if code.takes(name)})
    except (TypeError, ValueError) as error:
        line = getattr(getattr(_load(code), "__code__", None), "co_firstlineno", 1)
        raise Refused(f"{file}:{line}: {function} does not take the arguments that it gets: {error}. Wanted: {wanted}") from error
    return code


def digest_of(content: bytes) -> str:
    """The digest that identifies a version of a file."""
    return hashlib.sha256(content).hexdigest()[:16]


def content_of(file: str) -> bytes:
    """The bytes of a file of code. Refused where it cannot be read."""
    try:
        return Path(file).read_bytes()
    except FileNotFoundError as error:
        raise Refused(f"{file} does not exist, and a recipe names it as code. Such paths start from the folder of the recipe") from error
    except OSError as error:
        raise Refused(f"{file} cannot be read ({error.strerror}), and a recipe names it as code") from error


@lru_cache(maxsize=64)
def _load(code: UserFunction) -> Callable[..., Any]:
    """The function, after its file was run once in this process."""
    module = ModuleType(f"user_code_{digest_of(code.content)}")
    module.__file__ = code.file
    sys.modules[module.__name__] = module  # dataclasses and pickle look it up
    try:
        compiled: CodeType = compile(code.content, code.file, "exec", dont_inherit=True)
        exec(compiled, module.__dict__)
    except (SyntaxError, ValueError) as error:
        line = (error.lineno if isinstance(error, SyntaxError) else None) or _last_line(error.__traceback__, code.file) or 1
        text = error.msg if isinstance(error, SyntaxError) else error
        raise Refused(f"{code.file}:{line}: {type(error).__name__}: {text}") from error
    except (Exception, SystemExit) as error:  # whatever the user's code raises while it is imported
        hint = ". Code that a recipe names imports installed packages alone, not other files" if isinstance(error, ImportError) else ""
        line = _last_line(error.__traceback__, code.file) or 1
        raise Refused(f"{code.file}:{line}: {type(error).__name__}: {error}{hint}") from error
    function = module.__dict__.get(code.function)
    if not callable(function):
        known = [name for name, value in module.__dict__.items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        there = f"there are {', '.join(known)}.{nearest(code.function, known)}" if known else "there is none"
        raise Refused(f"{code.file} has no function {code.function}; {there}")
    return function


def _last_line(traceback: TracebackType | None, file: str) -> int | None:
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


# In settings


def files_of(settings: Any) -> Iterator[str]:
    """The files of code that settings name, as plain values, in order."""
    found: dict[str, None] = {}
    with_files(settings, lambda file: found.setdefault(file) or file)
    return iter(found)


def with_files(settings: Any, change: Callable[[str], str]) -> Any:
    """Settings, as plain values, in which each file of code or of a prompt that they name is what `change` makes of it."""
    if isinstance(settings, list | tuple):
        return [with_files(value, change) for value in settings]
    if not isinstance(settings, dict):
        return settings
    out: dict[str, Any] = {}
    for key, value in settings.items():
        if key == _FILES and isinstance(value, list | tuple):
            out[key] = [change(one) if isinstance(one, str) and one.endswith(_SUFFIX) else one for one in value]
            continue
        found = _NAMED.fullmatch(value) if key in _SETTINGS and isinstance(value, str) else None
        out[key] = with_files(value, change) if found is None else f"{change(found['file'])}:{found['function']}"
    return out


def anchored(settings: Any, folder: Path) -> Any:
    """Settings, as plain values, in which the paths of code that are relative start from `folder`."""
    return with_files(settings, lambda file: str(folder.absolute() / Path(file).expanduser()))
