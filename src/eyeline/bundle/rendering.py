"""Chat templates of other people, rendered in a process of its own with limits: such a template is a program.

The process (`serve`) imports jinja2 and nothing heavy, since it starts for each template that is asked about.
"""

import json
import resource
import signal
import subprocess
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 5  # of one processor; the published templates take milliseconds
WAIT = 60  # seconds by the clock, for a process that waits or for a machine that is busy
MEMORY = 2**30  # bytes of address space; half a percent of it is used
LONGEST = 2**20  # characters of a template, and of what it writes for a short conversation
_TOO_LARGE, _TOO_DEEP, _TOO_LONG = 3, 4, 5  # exit codes

Messages = list[dict[str, str]]


class Unbounded(Exception):
    """A template that does not end within the limits; says which one it broke."""


def rendered(jinja: str, conversations: list[Messages], variables: dict[str, Any]) -> list[str] | None:
    """The text that a template of unknown origin renders for each conversation; None for one that does not take them, or is not a template.
    Raises Unbounded."""
    if len(jinja) > LONGEST:
        raise Unbounded(f"has {len(jinja):,} characters, over {LONGEST:,}")
    command = f"import sys; sys.path[:] = {sys.path!r}; from eyeline.bundle.rendering import serve; serve()"
    asked = json.dumps({"jinja": jinja, "conversations": conversations, "variables": variables, "seconds": SECONDS})
    try:
        done = subprocess.run(
            [sys.executable, "-c", command],
            input=asked.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unbounded(f"does not end within {WAIT} seconds") from error
    match done.returncode:
        case 0:
            return json.loads(done.stdout)
        case code if code in (-signal.SIGXCPU, -signal.SIGKILL):
            raise Unbounded(f"does not end within {SECONDS} seconds")
        case code if code < 0:
            raise Unbounded(f"crashes the process that renders it (signal {-code})")
        case x if x == _TOO_LARGE:
            raise Unbounded(f"needs more than {MEMORY >> 20:,} MiB of memory")
        case x if x == _TOO_DEEP:
            raise Unbounded("calls itself without end")
        case x if x == _TOO_LONG:
            raise Unbounded(f"writes more than {LONGEST:,} characters")
        case _:
            return None


def serve() -> None:
    """Render what standard input asks for, within the limits, onto standard output. Ends the process by the fault there is."""
    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        written = [render(asked["jinja"], conversation, asked["variables"]) for conversation in asked["conversations"]]
    except MemoryError:
        sys.exit(_TOO_LARGE)
    except RecursionError:
        sys.exit(_TOO_DEEP)
    sys.stdout.write(json.dumps(written))


def render(jinja: str, messages: Messages, variables: dict[str, Any]) -> str:
    """Render a template in this process, as `apply_chat_template` of transformers, with the prompt of an answer at the end."""
    template = _environment().from_string(jinja)
    pieces: list[str] = []
    length = 0
    for piece in template.generate(messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables):
        length += len(piece)
        if length > LONGEST:
            sys.exit(_TOO_LONG)
        pieces.append(piece)
    return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    """The filters, functions and tags that chat templates are written for (transformers' utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
        "dict": lambda *pairs, **named: dict(*pairs, **named),
    }
    return environment


class _Generation(Extension):
    """`{% generation %}`: marks an answer for programs that want a mask; here it only encloses text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_call"), [], [], body).set_lineno(line)

    def _call(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """Without names that begin with an underscore: a template could pass for another object by them."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        for name in (named := dict(*values, **kwargs)):
            _refuse_underscore(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the namespace attribute {name!r} begins with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
