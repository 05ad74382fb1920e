"""Chat templates: functions that return segments, each marked trained or not, so that nobody searches for the mask.

A template is written twice on purpose: as a function here, which training and generation use, and as the `jinja` that goes
along with every export. Tests hold the two equal, token for token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eyeline.core.batch import Message, Picture, Text
from eyeline.core.errors import Refused, nearest

IMAGE = "<|image_pad|>"  # Qwen's own name; tokenizers that lack it get it added


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
    """All visual tokens of the picture with this number (the n-th of the conversation)."""

    picture: int


Segment = Control | Content | Media


@dataclass(frozen=True)
class Template:
    """A chat template and what it needs."""

    name: str
    controls: tuple[str, ...]  # control tokens that the tokenizer must have, the image token among them
    image: str  # the control token that every visual token of a picture is written as
    terminator: str  # ends every answer and is a target: generation stops at it
    jinja: str  # the same template for `tokenizer.apply_chat_template`, one image token a picture
    render: Callable[[Sequence[Message], bool], list[Segment]]

    def segments(self, messages: Sequence[Message], prompt: bool = False) -> list[Segment]:
        """The conversation as segments. `prompt` opens an assistant turn at the end, for generation."""
        return self.render(messages, prompt)


def _parts(message: Message, first_picture: int, wrap: tuple[str, str] | None) -> tuple[list[Segment], int]:
    """The segments of a message's parts and the number of the next picture; `wrap` are controls around a picture."""
    out: list[Segment] = []
    picture = first_picture
    for part in message.parts:
        match part:
            case Text():
                out.append(Content(part.text, message.role == "assistant"))
            case Picture():
                media = Media(picture)
                out += [media] if wrap is None else [Control(wrap[0]), media, Control(wrap[1])]
                picture += 1
    return out, picture


QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."  # what Qwen2.5-Instruct's template inserts


def _qwen2_5(messages: Sequence[Message], prompt: bool) -> list[Segment]:
    """Qwen2.5-Instruct's template without tools. The newline after `<|im_end|>` is written, not learned: generation stops before it."""
    out: list[Segment] = []
    if not messages or messages[0].role != "system":
        messages = [Message("system", (Text(QWEN_SYSTEM),)), *messages]
    picture = 0
    for message in messages:
        parts, picture = _parts(message, picture, ("<|vision_start|>", "<|vision_end|>"))
        out += [Control("<|im_start|>"), Content(message.role + "\n"), *parts]
        out += [Control("<|im_end|>", message.role == "assistant"), Content("\n")]
    if prompt:
        out += [Control("<|im_start|>"), Content("assistant\n")]
    return out


QWEN_JINJA = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\n" + QWEN_SYSTEM + "<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'text' %}{{- part['text'] }}"
    "{%- elif part['type'] in ['image', 'image_url'] %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def _plain(messages: Sequence[Message], prompt: bool) -> list[Segment]:  # noqa: ARG001 - the question's newline opens the answer
    """Pictures and text, a newline, the answer, the end: few tokens, for models from scratch."""
    out: list[Segment] = []
    picture = 0
    for message in messages:
        parts, picture = _parts(message, picture, None)
        out += parts
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
    "qwen2.5": Template(
        name="qwen2.5",
        controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", IMAGE),
        image=IMAGE,
        terminator="<|im_end|>",
        jinja=QWEN_JINJA,
        render=_qwen2_5,
    ),
    "plain": Template("plain", ("<|endoftext|>", IMAGE), IMAGE, "<|endoftext|>", PLAIN_JINJA, _plain),
}


def template_named(name: str) -> Template:
    """The template of that name, or Refused with the known ones."""
    if name not in TEMPLATES:
        raise Refused(f"template {name!r} is not known; there are {', '.join(TEMPLATES)}.{nearest(name, list(TEMPLATES))}")
    return TEMPLATES[name]
