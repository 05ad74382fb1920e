"""A conversation with a model in the terminal: questions and images in, answers as they are made."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from eyeline.bundle.bundle import Opened, open_bundle
from eyeline.bundle.computing import choose_kernels
from eyeline.bundle.fill import load_for_generation
from eyeline.core.batch import Document, EncodedImage, Message, Text
from eyeline.core.errors import BadSample, Refused
from eyeline.core.log import warn
from eyeline.core.plan import Spec
from eyeline.core.words import counted
from eyeline.data.images.decode import width_and_height
from eyeline.data.text.tokenizer import Encoder
from eyeline.generate.generate import stream
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.generate.terminal import Read, Write, harmless, line_reader, to_screen
from eyeline.models import Model
from eyeline.models import spec as spec_of
from eyeline.parallel.launch import Machine, machine

HELP = "/image PATH shows an image with the next message · /new starts a new conversation · /help · /exit (or Ctrl-D)"


def chat(
    folder: Path,
    *,
    images: Sequence[Path],
    ask: str | None,
    sampling: Sampling,
    checkpoint: Literal["newest", "best"] = "newest",
    read: Read | None = None,
    write: Write = to_screen,
) -> None:
    """Talk with the model in `folder` (a run, of which `checkpoint` chooses one, an import or an export). `images` go with the first
    message; `read` is a terminal's lines when not given.

    With `ask`, put that one question, write the answer, and return. Raises Refused for a folder without a model, or an image that
    cannot be used.
    """
    opened = open_bundle(folder, checkpoint)
    here = machine()
    compute_dtype = torch.bfloat16 if here.capability is not None and here.capability >= (8, 0) else torch.float32
    model = load_for_generation(opened, here.device, compute_dtype)
    choose_kernels(model, here, compute_dtype, trains=False, quiet=True)
    spec = spec_of(opened.bundle.config)
    talk = Talk(model, spec, opened.bundle.encoder(), sampling)
    for path in images:
        talk.show(path)
    if ask is not None:
        for piece in talk.say(ask, warn):
            write(piece)
        write("\n")
    else:
        write(banner(opened, model, spec, here, compute_dtype))
        converse(talk, read or line_reader(), write)


def banner(opened: Opened, model: Model, spec: Spec, here: Machine, compute_dtype: torch.dtype) -> str:
    """The lines before the first message: the model, and the commands."""
    which = f" · {opened.checkpoint.folder.name} (step {opened.checkpoint.step})" if opened.checkpoint else ""
    size = sum(p.numel() for p in model.parameters())
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[compute_dtype]
    return (
        f"{opened.folder}{which} · {opened.bundle.config.family}, {size:,} parameters · {dtype} on {here.device.type} ({here.name}) · "
        f"context of {spec.max_positions:,} tokens\n{HELP}\n"
    )


def _unheard(_: str) -> None:
    pass


class Talk:
    """One conversation so far, and the images that wait for the next message."""

    def __init__(self, model: Model, spec: Spec, encoder: Encoder, sampling: Sampling):
        self.model, self.spec, self.encoder, self.sampling = model, spec, encoder, sampling
        self.prompts = Prompts(encoder, spec.image)
        self.messages: tuple[Message, ...] = ()
        self.waiting: tuple[EncodedImage, ...] = ()
        self.full = False  # whether the user was told that the conversation fills the context

    def show(self, path: Path) -> None:
        """Show an image with the next message. Refused when it is not one, or the model reads text only."""
        image = EncodedImage(str(path), path.expanduser().absolute())
        try:
            if self.spec.image is None:
                raise BadSample("image_without_tower", "image", f"{path} is an image, and this model reads text only")
            width_and_height(image)
        except BadSample as bad:
            raise Refused(f"{bad.message}. Give another image.") from bad
        self.waiting = (*self.waiting, image)

    def say(self, text: str, note: Callable[[str], None] = _unheard) -> Iterator[str]:
        """The answer in pieces; when it is complete, or its maker is closed early, the exchange is part of the conversation. `note`
        gets what else the user should know.

        Refused, with the conversation as it was, when the message cannot be answered.
        """
        text = text.encode("utf-8", "replace").decode()  # an argument may hold bytes that are no text
        asked, prompt = self._fitting((*self.messages, Message("user", (*self.waiting, Text(text)))))
        self._note_left_out(asked, note)
        answer, finish = "", None
        making = stream(self.model, self.spec, prompt, self.sampling, self.encoder)
        try:
            while True:
                try:
                    piece = next(making)
                except StopIteration as end:
                    finish = end.value
                    break
                answer += piece
                yield harmless(piece)
        finally:
            making.close()
            if answer:  # an exchange without an answer would leave two questions in a row
                self.messages, self.waiting = (*asked, Message("assistant", (Text(answer),))), ()
        if finish == "length":
            note(self._cut_reason(prompt))

    def _fitting(self, asked: tuple[Message, ...]) -> tuple[tuple[Message, ...], Document]:
        """The conversation without its oldest exchanges, as many as it takes to leave room for an answer, and its prompt."""
        longest = self.spec.max_positions
        room = min(self.sampling.max_new_tokens, longest // 4)
        while True:
            try:
                prompt = self.prompts.prompt(asked)
            except BadSample as bad:
                raise Refused(f"{bad.message}. Ask something else, or start again with /new.") from bad
            tokens = len(prompt.tokens_T)
            if tokens + room <= longest or (len(asked) == 1 and tokens < longest):
                return asked, prompt
            if len(asked) == 1:
                images = ", or show fewer or smaller images (/new drops those that wait)" if len(asked[0].parts) > 1 else ""
                raise Refused(
                    f"this message alone has {tokens:,} tokens, and the model's context holds {longest:,}, answer included. "
                    f"Shorten it{images}."
                )
            asked = asked[2:]  # a question and its answer

    def _note_left_out(self, asked: tuple[Message, ...], note: Callable[[str], None]) -> None:
        """Say once that the context is full, and each time which images the model no longer sees."""
        left_out = self.messages[: len(self.messages) + 1 - len(asked)]
        if left_out and not self.full:
            self.full = True
            note(
                f"The conversation fills the model's context ({self.spec.max_positions:,} tokens): its oldest messages are left out from "
                "now on. /new starts a new conversation."
            )
        for image in (part for message in left_out for part in message.parts if isinstance(part, EncodedImage)):
            note(f"The model no longer sees {image.name}. /image {image.name} shows it again.")

    def _cut_reason(self, prompt: Document) -> str:
        """The reason why an answer was cut."""
        if len(prompt.tokens_T) + self.sampling.max_new_tokens > self.spec.max_positions:
            return f"The answer is cut at the end of the model's context ({self.spec.max_positions:,} tokens)."
        return f"The answer is cut after {self.sampling.max_new_tokens} tokens. --max-new-tokens allows longer ones."

    def forget(self) -> None:
        self.messages, self.waiting, self.full = (), (), False


def converse(talk: Talk, read: Read, write: Write) -> None:
    """Read lines and write answers until the end of input or /exit. A refusal is printed, and the conversation continues."""
    while True:
        try:
            many = len(talk.waiting)
            line = read(f"[{counted(many, 'image')}] > " if many else "> ").strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        command, _, argument = line.partition(" ")
        try:
            match command:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/help":
                    write(HELP + "\n")
                case "/new":
                    talk.forget()
                    write("A new conversation: the model no longer sees the previous one.\n")
                case "/image":
                    talk.show(path_of(argument))
                case _ if command.startswith("/"):
                    write(f"{command} is not a command. {hint(line) or HELP}\n")
                case _:
                    answer(talk, line, write)
        except Refused as refused:
            write(f"{harmless(str(refused))}\n")


def path_of(argument: str) -> Path:
    """The path after /image, as typed, or in the quotes or with the backslashes that terminals write for a file dropped on them."""
    typed = argument.strip()
    if not typed:
        raise Refused("/image needs a path, such as /image photo.jpg")
    if Path(typed).expanduser().exists():
        return Path(typed)
    try:
        pieces = shlex.split(typed)
    except ValueError:  # a quote that is not closed belongs to the name
        pieces = []
    return Path(pieces[0] if len(pieces) == 1 else typed)


def hint(line: str) -> str | None:
    """A suggestion for a line that starts with a slash and is not a command."""
    word = line.split()[0]
    return f"To show that file, type /image {word}" if Path(word).is_file() else None


def answer(talk: Talk, text: str, write: Write) -> None:
    """Write one answer; Ctrl-C ends it, and what was said counts."""
    notes: list[str] = []
    pieces = talk.say(text, notes.append)
    try:
        for n, piece in enumerate(pieces):
            if n == 0:
                write("".join(f"({note})\n" for note in notes))
                notes.clear()
            write(piece)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]  # `say` is a generator
        write(" …")
    write("\n" + "".join(f"({note})\n" for note in notes))
