"""A conversation with a model in the terminal: questions and pictures in, answers as they are made."""

import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from eyeline.bundle.bundle import open_bundle
from eyeline.core.batch import Message, Picture, Text
from eyeline.core.errors import BadSample, Refused
from eyeline.core.facts import Facts
from eyeline.data.images import open_picture
from eyeline.data.tokenizer import Encoder
from eyeline.generate.generate import stream
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.models import Model, build
from eyeline.models import facts as facts_of
from eyeline.parallel.launch import machine

HELP = "/image PATH shows a picture with the next message · /new forgets the conversation · /help · /exit (or Ctrl-D)"
Read = Callable[[str], str]  # shows a prompt and returns a line; EOFError ends the conversation
Write = Callable[[str], None]


def chat(
    folder: Path, *, images: Sequence[Path], ask: str | None, sampling: Sampling, read: Read = input, write: Write | None = None
) -> None:
    """Talk with the model in `folder` (a run, an import or an export). `images` go with the first message.

    With `ask`, put that one question, write the answer, and return. Raises Refused for a folder without a model, or a picture
    that cannot be used.
    """
    write = write or to_screen
    opened = open_bundle(folder)
    here = machine()
    compute_dtype = torch.bfloat16 if here.device.type == "cuda" else torch.float32
    model = build(opened.bundle.config, here.device, compute_dtype=compute_dtype)
    opened.load(model)
    model.eval()
    talk = Talk(model, facts_of(opened.bundle.config), opened.bundle.encoder(), sampling)
    for path in images:
        talk.show(path)
    if ask is not None:
        for piece in talk.say(ask):
            write(piece)
        write("\n")
    else:
        write(HELP + "\n")
        converse(talk, read, write)


class Talk:
    """One conversation so far, and the pictures that wait for the next message."""

    def __init__(self, model: Model, facts: Facts, encoder: Encoder, sampling: Sampling):
        self.model, self.facts, self.encoder, self.sampling = model, facts, encoder, sampling
        self.prompts = Prompts(encoder, facts.image)
        self.messages: tuple[Message, ...] = ()
        self.waiting: tuple[Picture, ...] = ()

    def show(self, path: Path) -> None:
        """Show a picture with the next message. Refused when it is not one, or the model reads text only."""
        picture = Picture(str(path), path.expanduser().absolute())
        try:
            if self.facts.image is None:
                raise BadSample("picture_without_tower", "image", f"{path} is a picture, and this model reads text only")
            open_picture(picture)
        except BadSample as bad:
            raise Refused(f"{bad.message}. Give another picture.") from bad
        self.waiting = (*self.waiting, picture)

    def say(self, text: str) -> Iterator[str]:
        """The answer in pieces; when it is complete, or its maker is closed early, the exchange is part of the conversation.

        Refused, with the conversation as it was, when the message cannot be answered.
        """
        asked = (*self.messages, Message("user", (*self.waiting, Text(text))))
        try:
            prompt = self.prompts.prompt(asked)
        except BadSample as bad:
            raise Refused(f"{bad.message}. Ask something else.") from bad
        answer = ""
        try:
            for piece in stream(self.model, self.facts, prompt, self.sampling, self.encoder):
                answer += piece
                yield harmless(piece)
        finally:
            if answer:  # an exchange without an answer would leave two questions in a row
                self.messages, self.waiting = (*asked, Message("assistant", (Text(answer),))), ()

    def forget(self) -> None:
        self.messages, self.waiting = (), ()


def converse(talk: Talk, read: Read, write: Write) -> None:
    """Read lines and write answers until the end of input or /exit. What is refused is said, and the conversation goes on."""
    while True:
        try:
            many = len(talk.waiting)
            line = read(f"[{many} picture{'' if many == 1 else 's'}] > " if many else "> ").strip()
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
                case "/image":
                    talk.show(Path(argument.strip()))
                case _ if command.startswith("/"):
                    write(f"{command} is no command. {HELP}\n")
                case _:
                    answer(talk, line, write)
        except Refused as refused:
            write(f"{refused}\n")


def answer(talk: Talk, text: str, write: Write) -> None:
    """Write one answer; Ctrl-C ends it, and what was said counts."""
    pieces = talk.say(text)
    try:
        for piece in pieces:
            write(piece)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]  # `say` is a generator
        write(" …")
    write("\n")


def harmless(text: str) -> str:
    """Text without control characters, which could move the cursor or worse; line breaks and tabs stay."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def to_screen(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
