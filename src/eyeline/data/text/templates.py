"""Chat templates: functions that return segments, each marked as trained or not, so that no code searches for the mask.

A template is written twice on purpose: as a function here, which training and generation use, and as the `jinja` that goes
along with every export. Tests hold the two equal, token for token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from eyeline.core.batch import EncodedImage, Message, Text, Video
from eyeline.core.errors import BadSample, Refused, nearest

IMAGE = "<|image_pad|>"  # Qwen's own name; tokenizers that lack it get it added
VIDEO = "<|video_pad|>"


@dataclass(frozen=True)
class Control:
    """One control token, by its exact string."""

    token: str
    trained: bool = False
    masked: bool = False  # trained, but for a mark of its turn: the ids stay, the labels go


@dataclass(frozen=True)
class Content:
    """Text, from data or from the template. It never becomes a control token, whatever it says."""

    text: str
    trained: bool = False
    masked: bool = False


@dataclass(frozen=True)
class Media:
    """The next still, or the next slice of a video: `token` is written for each of its visual tokens."""

    token: str


Segment = Control | Content | Media


@dataclass(frozen=True)
class Template:
    """A chat template and what it needs."""

    name: str
    controls: tuple[str, ...]  # control tokens that the tokenizer must have, those of media among them
    media: tuple[str, ...]  # of these, the ones that only images and videos are written with
    image: str  # the control token that every visual token of an image is written as
    terminator: str  # ends every answer and is a target: generation stops at it
    jinja: str  # the same template for `tokenizer.apply_chat_template`, one image token an image
    render: Callable[[Sequence[Message], bool, int], list[Segment]]
    end: str = "<|endoftext|>"  # ends a text in the tokenizer's own terms: pads, and stops generation too
    learns: Literal["every answer", "the last answer"] = "every answer"  # the last, where earlier ones are shown without reasoning
    notice: str | None = None  # what the template leaves out of conversations; said once, where training starts

    def segments(self, messages: Sequence[Message], prompt: bool = False, frames: int = 1) -> list[Segment]:
        """The conversation as segments. `prompt` opens an assistant turn at the end, for generation; `frames` of a video are
        one slice. BadSample for a video where the template has no place for one."""
        return self.render(messages, prompt, frames)


@dataclass(frozen=True)
class Marks:
    """The tokens that stand for media."""

    image: str
    video: str | None = None
    start: str | None = None  # controls around each still and each slice
    end: str | None = None

    @property
    def controls(self) -> tuple[str, ...]:
        return tuple(token for token in (self.start, self.end, self.image, self.video) if token is not None)


def _parts(message: Message, marks: Marks, frames: int) -> list[Segment]:
    """The segments of a message's parts."""
    out: list[Segment] = []
    for part in message.parts:
        match part:
            case Text():
                out.append(Content(part.text, message.role == "assistant", not message.supervised))
            case EncodedImage():
                out += _placeholder(marks.image, marks)
            case Video():
                if marks.video is None:
                    raise BadSample(
                        "unsupported",
                        "video",
                        "the chat template does not support videos; import the model with one that has: --template qwen3",
                    )
                # no marks around the whole: as the checkpoints were trained, and unlike the processor of transformers 5.24
                for seconds in slice_seconds(part.seconds, frames):
                    out += [Content(f"<{seconds:.1f} seconds>"), *_placeholder(marks.video, marks)]
    return out


def _placeholder(token: str, marks: Marks) -> list[Segment]:
    return [Media(token)] if marks.start is None or marks.end is None else [Control(marks.start), Media(token), Control(marks.end)]


def slice_seconds(seconds: Sequence[float], frames: int) -> list[float]:
    """The time of each slice of a video: midway between its first and its last frame. A last slice that is short repeats the
    last frame (transformers' models/qwen3_vl/processing_qwen3_vl.py)."""
    last = len(seconds) - 1
    return [(seconds[n] + seconds[min(n + frames - 1, last)]) / 2 for n in range(0, len(seconds), frames)]


QWEN_MARKS = Marks(IMAGE, VIDEO, "<|vision_start|>", "<|vision_end|>")
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."  # what Qwen2.5-Instruct's template inserts
SMOL_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # SmolLM2-Instruct's


def _chatml(messages: Sequence[Message], prompt: bool, frames: int, marks: Marks, system: str | None) -> list[Segment]:
    """Qwen's template without tools, `system` where a conversation has none of its own. The newline after `<|im_end|>` is written,
    not supervised: generation stops before it."""
    out: list[Segment] = []
    if system is not None and (not messages or messages[0].role != "system"):
        messages = [Message("system", (Text(system),)), *messages]
    for message in messages:
        out += [Control("<|im_start|>"), Content(message.role + "\n"), *_parts(message, marks, frames)]
        out += [Control("<|im_end|>", message.role == "assistant", not message.supervised), Content("\n")]
    if prompt:
        out += [Control("<|im_start|>"), Content("assistant\n")]
    return out


def _said_jinja(marks: Marks) -> str:
    """A macro that gives a message's content as text, each image and video as one token between its marks."""
    image, video = (f"{marks.start or ''}{token or ''}{marks.end or ''}" for token in (marks.image, marks.video))
    videos = "" if marks.video is None else "{%- elif part['type'] == 'video' %}{{- '" + video + "' }}"
    return (
        "{%- macro said(content) %}"
        "{%- if content is string %}{{- content }}"
        "{%- else %}{%- for part in content %}"
        "{%- if part['type'] == 'text' %}{{- part['text'] }}"
        "{%- elif part['type'] in ['image', 'image_url'] %}{{- '" + image + "' }}" + videos + "{%- endif %}{%- endfor %}{%- endif %}"
        "{%- endmacro %}"
    )


def _chatml_template(name: str, marks: Marks, system: str | None) -> Template:
    first = ""
    if system is not None:
        first = "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\n" + system + "<|im_end|>\\n' }}{%- endif %}"
    return Template(
        name=name,
        controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>", *marks.controls),
        media=marks.controls,
        image=marks.image,
        terminator="<|im_end|>",
        jinja=_said_jinja(marks) + first + "{%- for message in messages %}"
        "{{- '<|im_start|>' + message['role'] + '\\n' + said(message['content']) + '<|im_end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        render=partial(_chatml, marks=marks, system=system),
    )


@dataclass(frozen=True)
class Thinking:
    """The rules of a template that lets the model reason before it answers. Only a conversation's last answer has a think block, and
    only that one is supervised: the published templates show earlier answers without theirs, so what is asked for next looks the
    same in training and in use."""

    on: bool  # else the think block is empty, and given: reasoning in the answers of the data is left out
    opened: bool  # the prompt, not the model, writes `<think>`
    trimmed: bool  # white space around a message is left out

    @property
    def opening(self) -> tuple[Segment, ...]:
        """The text of the prompt after the assistant's role."""
        if not self.on:
            return (Control("<think>"), Content("\n\n"), Control("</think>"), Content("\n\n"))
        return (Control("<think>"), Content("\n")) if self.opened else ()

    def answer(self, text: str) -> list[Segment]:
        """The last answer: what the model writes."""
        thought, rest = _thought(text)
        if not self.on:
            return [*self.opening, Content(rest, True)]
        thought = thought.strip() if self.trimmed else thought.strip("\n")
        inside = [Content(thought + "\n", True)] if self.opened else [Control("<think>", True), Content(f"\n{thought}\n", True)]
        return [*self.opening, *inside, Control("</think>", True), Content("\n\n" + rest, True)]


def _thought(text: str) -> tuple[str, str]:
    """The reasoning in an answer's think block, and the text that follows."""
    if "</think>" not in text:
        return "", text.lstrip("\n")
    pieces = text.split("</think>")
    return pieces[0].split("<think>")[-1], pieces[-1].lstrip("\n")


def _thinking(messages: Sequence[Message], prompt: bool, frames: int, thinking: Thinking) -> list[Segment]:
    """The templates of Qwen3 and Qwen3.5, without tools."""
    out: list[Segment] = []
    last_question = max((n for n, message in enumerate(messages) if message.role == "user"), default=-1)
    for n, message in enumerate(messages):
        message = _trimmed(message) if thinking.trimmed else message
        out += [Control("<|im_start|>"), Content(message.role + "\n")]
        supervised = message.role == "assistant" and n > last_question
        if message.role == "assistant":
            text = "".join(part.text for part in message.parts if isinstance(part, Text))
            earlier = _thought(text)[1] if "</think>" in text else text
            answer = thinking.answer(text) if supervised else [Content(earlier)]
            out += answer if message.supervised else [part if isinstance(part, Media) else replace(part, masked=True) for part in answer]
        else:
            out += _parts(message, QWEN_MARKS, frames)
        out += [Control("<|im_end|>", supervised, not message.supervised), Content("\n")]
    if prompt:
        out += [Control("<|im_start|>"), Content("assistant\n"), *thinking.opening]
    return out


def _thinking_template(name: str, thinking: Thinking) -> Template:
    opening = "<think>\\n\\n</think>\\n\\n" if not thinking.on else "<think>\\n" if thinking.opened else ""
    text = "said(message['content'])" + (" | trim" if thinking.trimmed else "")
    thought = "''" if not thinking.on else "before | trim" if thinking.trimmed else "before.strip('\\n')"
    return Template(
        name=name,
        controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", *QWEN_MARKS.controls),
        media=QWEN_MARKS.controls,
        image=IMAGE,
        terminator="<|im_end|>",
        jinja=_said_jinja(QWEN_MARKS) + "{%- set last = namespace(question=-1) %}"
        "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}"
        "{%- set text = " + text + " %}"
        "{{- '<|im_start|>' + message['role'] + '\\n' }}"
        "{%- if message['role'] == 'assistant' %}"
        "{%- set before = text.split('</think>')[0].split('<think>')[-1] if '</think>' in text else '' %}"
        "{%- set text = text.split('</think>')[-1].lstrip('\\n') if '</think>' in text else text %}"
        "{%- if loop.index0 > last.question %}"
        "{{- '<think>\\n' + (" + thought + ") + '\\n</think>\\n\\n' + text.lstrip('\\n') }}"
        "{%- else %}{{- text }}{%- endif %}"
        "{%- else %}{{- text }}{%- endif %}"
        "{{- '<|im_end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n" + opening + "' }}{%- endif %}",
        render=partial(_thinking, thinking=thinking),
        notice=f"the template {name} trains on the last answer of a conversation only, and leaves out the reasoning (<think>...</think>) "
        + ("of earlier answers" if thinking.on else "of all answers"),
        learns="the last answer",
    )


def _trimmed(message: Message) -> Message:
    """The message without white space at its ends."""
    parts: list[Text | EncodedImage | Video] = []
    for part in message.parts:
        if isinstance(part, Text) and parts and isinstance(parts[-1], Text):
            parts[-1] = Text(parts[-1].text + part.text)
        else:
            parts.append(part)
    if parts and isinstance(parts[0], Text):
        parts[0] = Text(parts[0].text.lstrip())
    if parts and isinstance(parts[-1], Text):
        parts[-1] = Text(parts[-1].text.rstrip())
    return replace(message, parts=tuple(parts))


LLAMA_DATE = "26 Jul 2024"  # what Llama 3.1's template says today is, and 3.2's where no date is given
LLAMA_PREAMBLE = f"Cutting Knowledge Date: December 2023\nToday Date: {LLAMA_DATE}\n\n"


def _llama3(messages: Sequence[Message], prompt: bool, frames: int, preamble: str) -> list[Segment]:
    """Llama-3-Instruct's template. It begins with the only BOS that there is: the encoder adds none. A `preamble` begins the system
    message, which is there even if a conversation has none of its own."""
    out: list[Segment] = [Control("<|begin_of_text|>")]
    if preamble and (not messages or messages[0].role != "system"):
        messages = [Message("system", ()), *messages]
    for n, message in enumerate(messages):
        out += [*_header(message.role), Content(preamble if n == 0 and message.role == "system" else "")]
        out += _parts(_trimmed(message), Marks(IMAGE), frames)
        out += [Control("<|eot_id|>", message.role == "assistant", not message.supervised)]
    return [*out, *_header("assistant")] if prompt else out


def _header(role: str) -> list[Segment]:
    return [Control("<|start_header_id|>"), Content(role), Control("<|end_header_id|>"), Content("\n\n")]


def _llama3_template(name: str, preamble: str) -> Template:
    starts = "{%- macro begin(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{%- endmacro %}"
    said = "(said(message['content']) | trim) + '<|eot_id|>'"
    first = ""
    if preamble:
        starts += "{%- set preamble = '" + preamble.replace("\n", "\\n") + "' %}"
        said = "(preamble if loop.first and message['role'] == 'system' else '') + " + said
        first = "{%- if messages[0]['role'] != 'system' %}{{- begin('system') + preamble + '<|eot_id|>' }}{%- endif %}"
    return Template(
        name=name,
        controls=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", IMAGE),
        media=(IMAGE,),
        image=IMAGE,
        terminator="<|eot_id|>",
        jinja=_said_jinja(Marks(IMAGE)) + starts + "{{- '<|begin_of_text|>' }}" + first + "{%- for message in messages %}"
        "{{- begin(message['role']) + " + said + " }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- begin('assistant') }}{%- endif %}",
        render=partial(_llama3, preamble=preamble),
        end="<|end_of_text|>",
    )


def _plain(messages: Sequence[Message], prompt: bool, frames: int) -> list[Segment]:  # noqa: ARG001 - the question's newline opens the answer
    """Images and text, a newline, the answer, the end: few tokens, for models from scratch."""
    out: list[Segment] = []
    for message in messages:
        out += _parts(message, Marks(IMAGE), frames)
        out.append(Control("<|endoftext|>", True, not message.supervised) if message.role == "assistant" else Content("\n"))
    return out


PLAIN_JINJA = (
    _said_jinja(Marks(IMAGE)) + "{%- for message in messages %}{{- said(message['content']) }}"
    "{%- if message['role'] == 'assistant' %}{{- '<|endoftext|>' }}{%- else %}{{- '\\n' }}{%- endif %}"
    "{%- endfor %}"
)

_ALL = (
    _chatml_template("qwen2.5", replace(QWEN_MARKS, video=None), QWEN_SYSTEM),
    _chatml_template("qwen3", QWEN_MARKS, None),  # Qwen3-VL-Instruct and Qwen3-Instruct (2507), which do not think
    _thinking_template("qwen3-thinking", Thinking(on=True, opened=False, trimmed=False)),  # Qwen3 (2025-04) as it comes
    # Qwen3-VL-Thinking and Qwen3-Thinking (2507)
    _thinking_template("qwen3-vl-thinking", Thinking(on=True, opened=True, trimmed=False)),
    _thinking_template("qwen3-no-thinking", Thinking(on=False, opened=False, trimmed=False)),  # the same with enable_thinking=False
    _thinking_template("qwen3.5", Thinking(on=False, opened=True, trimmed=True)),  # with enable_thinking=False, the small ones' default
    _thinking_template("qwen3.5-thinking", Thinking(on=True, opened=True, trimmed=True)),
    _chatml_template("smollm2", Marks(IMAGE), SMOL_SYSTEM),
    _llama3_template("llama3", ""),
    _llama3_template("llama3.1", LLAMA_PREAMBLE),  # and 3.2's and 3.3's
    Template("plain", ("<|endoftext|>", IMAGE), (IMAGE,), IMAGE, "<|endoftext|>", PLAIN_JINJA, _plain),
)
TEMPLATES: dict[str, Template] = {template.name: template for template in _ALL}


def template_named(name: str) -> Template:
    """The template of that name, or Refused with the known ones."""
    if name not in TEMPLATES:
        raise Refused(f"template {name!r} is not known; there are {', '.join(TEMPLATES)}.{nearest(name, list(TEMPLATES))}")
    return TEMPLATES[name]
