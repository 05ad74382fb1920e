"""Prompts: templates that make of a sample what the teacher is asked.

A prompt is a jinja template, rendered in a sandbox. It has these variables: `question` (the text of the last question, with `<image>`
where its images are), `answer` (the true one), `kind`, `images` (how many), and `marker`, which the answer's last line begins with. What it
renders is the text of the request; images go where it writes `<image>`, or before it. It may set

    {% set system = "..." %}              a system message
    {% set rewrites_question = true %}    the answer has a line `Question: ...`, which takes the question's place in the sample
    {% set marker = "Answer:" %}          what the final answer follows; "": the whole answer is final
"""

import hashlib
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eyeline.core.batch import EncodedImage, Message, Sample, Text, Video
from eyeline.core.errors import BadSample, Refused
from eyeline.core.user_code import content_of
from eyeline.data.layouts.media import IMAGE, VIDEO, with_escapes, without_escapes
from eyeline.evals.metric import MARKER

SHIPPED = ("chain-of-thought", "description-first", "self-check", "question-rewriting")
SUFFIX = ".jinja"
LONGEST = 1 << 20  # characters of a rendered prompt
_PLACES = re.compile(rf"(?<!\\)({IMAGE}|{VIDEO})")


def is_file(name: str) -> bool:
    """Return whether a prompt is a file of the recipe's."""
    return name.endswith(SUFFIX)


@dataclass(frozen=True)
class Prompt:
    """A template and its name. Pickles."""

    id: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Asked:
    """A sample as one prompt asks it."""

    messages: tuple[Message, ...]
    instructions: str  # the rendered text without the question
    marker: str
    rewrites_question: bool


def prompt_named(name: str) -> Prompt:
    """The prompt of a setting. Refused where its file cannot be read, or is not a template."""
    if is_file(name):
        data, where = content_of(name), name
    else:
        data, where = Path(str(files("eyeline.distill"))).joinpath("prompts", f"{name}{SUFFIX}").read_bytes(), name
    try:
        prompt = Prompt(Path(where).name.removesuffix(SUFFIX), data.decode("utf-8"))
        _template(prompt.text)
    except UnicodeDecodeError as error:
        raise Refused(f"the prompt {where} is not text in UTF-8: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise Refused(f"the prompt {where}, line {error.lineno}: {error.message}. A prompt is a jinja template") from error
    return prompt


@lru_cache(maxsize=64)
def _template(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(text)


def question_text(sample: Sample) -> str:
    """The last question as prompts see it: `<image>` and `<video>` where its media are, and a backslash before such a text."""
    names = {Text: None, EncodedImage: IMAGE, Video: VIDEO}
    return "".join(with_escapes(part.text) if isinstance(part, Text) else f"{names[type(part)]}\n" for part in sample.messages[-2].parts)


def true_answer(sample: Sample) -> str:
    """The sample's own last answer."""
    return "".join(part.text for part in sample.messages[-1].parts if isinstance(part, Text))


def asked(prompt: Prompt, sample: Sample) -> Asked:
    """The sample, up to its last question, as the prompt asks it. Refused where the template fails; BadSample where it has no place for
    the sample's images."""
    question = question_text(sample)
    variables = {
        "question": question,
        "answer": true_answer(sample),
        "kind": sample.kind,
        "images": len(sample.images),
        "marker": MARKER,
    }
    text, settings = _rendered(prompt, variables)
    without, _ = _rendered(prompt, variables | {"question": ""})
    last = sample.messages[-2]
    messages = (*sample.messages[:-2], Message("user", _parts(text, last, prompt)))
    system = settings.get("system")
    if system is not None:
        messages = (Message("system", (Text(str(system)),)), *(m for m in messages if m.role != "system"))
    return Asked(messages, without, str(settings.get("marker", MARKER)), settings.get("rewrites_question") is True)


def _rendered(prompt: Prompt, variables: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What a template renders, and what it sets."""
    try:
        module = _template(prompt.text).make_module(variables)
        text = str(module).strip()
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise Refused(f"the prompt {prompt.id} cannot be rendered: {type(error).__name__}: {error}. Correct its file") from error
    if len(text) > LONGEST:
        raise Refused(f"the prompt {prompt.id} renders {len(text):,} characters, over {LONGEST:,}. Correct its file")
    return text, {name: getattr(module, name) for name in ("system", "marker", "rewrites_question") if hasattr(module, name)}


def _parts(text: str, last: Message, prompt: Prompt) -> tuple[Text | EncodedImage | Video, ...]:
    """The rendered text with the question's media where it has places for them, or before it."""
    media = [part for part in last.parts if not isinstance(part, Text)]
    pieces = _PLACES.split(text)
    places = len(pieces) // 2
    if places not in (0, len(media)):
        why = f"the prompt {prompt.id} has places for {places} images or videos, and the question has {len(media)}"
        raise BadSample("placeholder_count", "messages", why)
    left = iter(media)
    parts: list[Text | EncodedImage | Video] = [] if places else list(left)
    for n, piece in enumerate(pieces):
        if n % 2:
            parts.append(next(left))
        elif piece.strip():
            parts.append(Text(without_escapes(piece.strip("\n"))))
    return tuple(parts)


def with_question(sample: Sample, question: str) -> Sample:
    """The sample with another text of its last question, after the question's images."""
    last = sample.messages[-2]
    media = tuple(part for part in last.parts if not isinstance(part, Text))
    return replace(sample, messages=(*sample.messages[:-2], replace(last, parts=(*media, Text(question))), sample.messages[-1]))
