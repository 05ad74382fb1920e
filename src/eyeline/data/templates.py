"""Chat templates: functions that return segments, each marked trained or not, so that nobody searches for the mask.

A template is written twice on purpose: as a function here, which training and generation use, and as the `jinja` that goes
along with every export. Tests hold the two equal, token for token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from eyeline.core.batch import Message, Picture, Text, Video
from eyeline.core.errors import BadSample, Refused, nearest

IMAGE = "<|image_pad|>"  # Qwen's own name; tokenizers that lack it get it added
FILM = "<|video_pad|>"


@dataclass(frozen=True)
class Control:
    """One control token, by its exact string."""

    token: str
    trained: bool = False


@dataclass(frozen=True)
class Content:
    """Text, from data or from the template. It never becomes a control token, whatever it says."""

    text: str
    trained: bool = False


@dataclass(frozen=True)
class Media:
    """The next still, or the next slice of a film: `token` is written for each of its visual tokens."""

    token: str


Segment = Control | Content | Media


@dataclass(frozen=True)
class Template:
    """A chat template and what it needs."""

    name: str
    controls: tuple[str, ...]  # control tokens that the tokenizer must have, those of media among them
    image: str  # the control token that every visual token of a picture is written as
    terminator: str  # ends every answer and is a target: generation stops at it
    jinja: str  # the same template for `tokenizer.apply_chat_template`, one image token a picture
    render: Callable[[Sequence[Message], bool, int], list[Segment]]

    def segments(self, messages: Sequence[Message], prompt: bool = False, frames: int = 1) -> list[Segment]:
        """The conversation as segments. `prompt` opens an assistant turn at the end, for generation; `frames` of a film are
        one slice. BadSample for a film where the template has no place for one."""
        return self.render(messages, prompt, frames)


@dataclass(frozen=True)
class Marks:
    """How media are written."""

    image: str
    film: str | None = None
    begin: str | None = None  # controls around each still and each slice
    end: str | None = None


def _parts(message: Message, marks: Marks, frames: int) -> list[Segment]:
    """The segments of a message's parts."""
    out: list[Segment] = []
    for part in message.parts:
        match part:
            case Text():
                out.append(Content(part.text, message.role == "assistant"))
            case Picture():
                out += _medium(marks.image, marks)
            case Video():
                if marks.film is None:
                    raise BadSample("unsupported", "video", "the chat template has no place for films")
                for seconds in slice_seconds(part.seconds, frames):
                    out += [Content(f"<{seconds:.1f} seconds>"), *_medium(marks.film, marks)]
    return out


def _medium(token: str, marks: Marks) -> list[Segment]:
    return [Media(token)] if marks.begin is None or marks.end is None else [Control(marks.begin), Media(token), Control(marks.end)]


def slice_seconds(seconds: Sequence[float], frames: int) -> list[float]:
    """When each slice of a film is shown: midway between its first and its last frame. A last slice that is short repeats the
    last frame (transformers' models/qwen3_vl/processing_qwen3_vl.py)."""
    last = len(seconds) - 1
    return [(seconds[n] + seconds[min(n + frames - 1, last)]) / 2 for n in range(0, len(seconds), frames)]


QWEN_MARKS = Marks(IMAGE, FILM, "<|vision_start|>", "<|vision_end|>")
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."  # what Qwen2.5-Instruct's template inserts
SMOL_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # SmolLM2-Instruct's


def _chatml(messages: Sequence[Message], prompt: bool, frames: int, marks: Marks, system: str | None) -> list[Segment]:
    """Qwen's template without tools, `system` where a conversation has none of its own. The newline after `<|im_end|>` is written,
    not learned: generation stops before it."""
    out: list[Segment] = []
    if system is not None and (not messages or messages[0].role != "system"):
        messages = [Message("system", (Text(system),)), *messages]
    for message in messages:
        out += [Control("<|im_start|>"), Content(message.role + "\n"), *_parts(message, marks, frames)]
        out += [Control("<|im_end|>", message.role == "assistant"), Content("\n")]
    if prompt:
        out += [Control("<|im_start|>"), Content("assistant\n")]
    return out


def _chatml_jinja(marks: Marks, system: str | None) -> str:
    image, film = (f"{marks.begin or ''}{token or ''}{marks.end or ''}" for token in (marks.image, marks.film))
    films = "" if marks.film is None else "{%- elif part['type'] == 'video' %}{{- '" + film + "' }}"
    first = (
        ""
        if system is None
        else ("{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\n" + system + "<|im_end|>\\n' }}{%- endif %}")
    )
    return (
        first + "{%- for message in messages %}"
        "{{- '<|im_start|>' + message['role'] + '\\n' }}"
        "{%- if message['content'] is string %}{{- message['content'] }}"
        "{%- else %}{%- for part in message['content'] %}"
        "{%- if part['type'] == 'text' %}{{- part['text'] }}"
        "{%- elif part['type'] in ['image', 'image_url'] %}{{- '" + image + "' }}" + films + "{%- endif %}{%- endfor %}{%- endif %}"
        "{{- '<|im_end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


def _chatml_template(name: str, marks: Marks, system: str | None) -> Template:
    media = [token for token in (marks.begin, marks.end, marks.image, marks.film) if token is not None]
    return Template(
        name=name,
        controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>", *media),
        image=marks.image,
        terminator="<|im_end|>",
        jinja=_chatml_jinja(marks, system),
        render=partial(_chatml, marks=marks, system=system),
    )


def _plain(messages: Sequence[Message], prompt: bool, frames: int) -> list[Segment]:  # noqa: ARG001 - the question's newline opens the answer
    """Pictures and text, a newline, the answer, the end: few tokens, for models from scratch."""
    out: list[Segment] = []
    for message in messages:
        out += _parts(message, Marks(IMAGE), frames)
        out.append(Control("<|endoftext|>", True) if message.role == "assistant" else Content("\n"))
    return out


PLAIN_JINJA = (
    "{%- for message in messages %}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'text' %}{{- part['text'] }}"
    "{%- elif part['type'] in ['image', 'image_url'] %}{{- '<|image_pad|>' }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}{{- '<|endoftext|>' }}{%- else %}{{- '\\n' }}{%- endif %}"
    "{%- endfor %}"
)

TEMPLATES: dict[str, Template] = {
    "qwen2.5": _chatml_template("qwen2.5", replace(QWEN_MARKS, film=None), QWEN_SYSTEM),
    "qwen3": _chatml_template("qwen3", QWEN_MARKS, None),  # Qwen3, Qwen3-VL, Qwen3.5 as they answer without thinking
    "smollm2": _chatml_template("smollm2", Marks(IMAGE), SMOL_SYSTEM),
    "plain": Template("plain", ("<|endoftext|>", IMAGE), IMAGE, "<|endoftext|>", PLAIN_JINJA, _plain),
}


def template_named(name: str) -> Template:
    """The template of that name, or Refused with the known ones."""
    if name not in TEMPLATES:
        raise Refused(f"template {name!r} is not known; there are {', '.join(TEMPLATES)}.{nearest(name, list(TEMPLATES))}")
    return TEMPLATES[name]
