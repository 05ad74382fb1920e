"""Conversations with a small random model, from a folder and line by line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from PIL import Image as Pillow

from eyeline.bundle.bundle import Bundle
from eyeline.bundle.exporting import export
from eyeline.core.batch import Message, Picture, Text
from eyeline.core.errors import Refused
from eyeline.core.randomness import torch_rng_for
from eyeline.data.templates import template_named
from eyeline.data.tokenizer import train_bpe
from eyeline.generate import chat as module
from eyeline.generate.chat import Talk, chat, converse, harmless
from eyeline.generate.generate import generate
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.models import build, llava, qwen2, siglip2

SAMPLING = Sampling(max_tokens=6)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    config = llava.Config(
        vision=siglip2.Config(image_size=16, patch=8, width=16, layers=1, heads=2, feed_forward=16),
        language=qwen2.Config(vocabulary=300, width=32, layers=2, heads=2, kv_heads=1, feed_forward=32, longest=64, tied=False),
        feature_norm=False,
    )
    return Bundle(config, train_bpe(["what is it?", "a red circle"], 300, template_named("plain")), "plain")


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> llava.Model:
    model = build(bundle.config, "cpu").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch_rng_for(0, name)) * 0.4)
    return model


@pytest.fixture
def talk(bundle: Bundle, model: llava.Model) -> Talk:
    return Talk(model, llava.facts(bundle.config), bundle.encoder(), SAMPLING)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Pillow.new("RGB", (20, 10), "red").save(tmp_path / "red.png")
    return tmp_path / "red.png"


def said(talk: Talk, *lines: str | BaseException) -> str:
    """Everything that is written in a conversation of these lines."""
    left = iter(lines)
    out: list[str] = []

    def read(_prompt: str) -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    converse(talk, read, out.append)
    return "".join(out)


def expected(talk: Talk, *messages: Message) -> str:
    """The answer by `generate`, to a conversation that is written out."""
    prompt = Prompts(talk.encoder, talk.facts.image).prompt(messages)
    [answer] = generate(talk.model, talk.facts, [prompt], SAMPLING, talk.encoder.stop_ids)
    return talk.encoder.decode(answer.tokens)


def user(text: str, *pictures: Path) -> Message:
    return Message("user", (*(Picture(str(p), p) for p in pictures), Text(text)))


def test_each_answer_sees_the_whole_conversation(talk: Talk, picture: Path) -> None:
    written = said(talk, f"/image {picture}", "what is it?", "", "and now?")
    first = expected(talk, user("what is it?", picture))
    second = expected(talk, user("what is it?", picture), Message("assistant", (Text(first),)), user("and now?"))
    assert written == f"{harmless(first)}\n{harmless(second)}\n\n"
    assert second != expected(talk, user("and now?"))
    assert [m.role for m in talk.messages] == ["user", "assistant", "user", "assistant"]
    assert len(talk.messages[2].parts) == 1  # a picture is shown once


def test_a_new_conversation_remembers_nothing(talk: Talk, picture: Path) -> None:
    written = said(talk, "what is it?", f"/image {picture}", "/new", "and now?")
    assert written.split("\n")[1] == harmless(expected(talk, user("and now?")))


def test_what_cannot_be_used_is_said_and_forgotten(talk: Talk, picture: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(picture.read_bytes()[:60])
    (tmp_path / "page.png").write_text("<html>")
    lines = [
        f"/image {tmp_path / 'absent.png'}",
        f"/image {tmp_path / 'page.png'}",
        "/imgae x",
        "long " * 60,
        "what is it?",
        "/exit",
        "never",
    ]
    written = said(talk, *lines)
    for part in ("absent.png does not exist", "page.png is HTML", "/imgae is no command", "and the model 64 positions"):
        assert part in written
    assert harmless(expected(talk, user("what is it?"))) in written
    assert len(talk.messages) == 2


def test_an_interrupted_answer_counts_as_far_as_it_came(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[str]:
        yield "as \x1bfar"
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "stream", interrupted)
    assert said(talk, "what is it?", KeyboardInterrupt()) == "as \ufffdfar …\n\n"
    assert talk.messages == (user("what is it?"), Message("assistant", (Text("as \x1bfar"),)))


def test_a_model_cannot_steer_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x07\x9b\r\n\tä") == "a\ufffd[2Jb\ufffd\ufffd\ufffd\n\tä"


@pytest.mark.parametrize("form", ["auto", "parts"])
def test_chat_works_on_exported_folders(
    bundle: Bundle, model: llava.Model, talk: Talk, picture: Path, tmp_path: Path, form: Literal["auto", "parts"]
) -> None:
    export(bundle, model, tmp_path / "out", form=form)
    out: list[str] = []
    chat(tmp_path / "out", images=[picture], ask="what is it?", sampling=SAMPLING, write=out.append)
    assert "".join(out) == harmless(expected(talk, user("what is it?", picture))) + "\n"
    with pytest.raises(Refused, match="does not exist"):
        chat(tmp_path / "out", images=[tmp_path / "absent.png"], ask="what?", sampling=SAMPLING, write=out.append)
    lines = iter(["what is it?"])
    out.clear()
    chat(tmp_path / "out", images=[picture], ask=None, sampling=SAMPLING, read=ending(lines), write=out.append)
    assert out[0].startswith("/image PATH")
    assert "".join(out[1:]) == harmless(expected(talk, user("what is it?", picture))) + "\n\n"


def ending(lines: Iterator[str]) -> Callable[[str], str]:
    def read(_prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    return read
