"""Conversations with a small random model, from a folder and line by line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from PIL import Image as Pillow

from eyeline.bundle.bundle import Bundle
from eyeline.bundle.exporting import export
from eyeline.core.batch import EncodedImage, Message, Text
from eyeline.core.errors import Refused
from eyeline.core.randomness import torch_rng_for
from eyeline.data.text.templates import template_named
from eyeline.data.text.tokenizer import train_bpe
from eyeline.generate import chat as module
from eyeline.generate.chat import Talk, chat, converse, path_of
from eyeline.generate.generate import generate
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.generate.terminal import harmless
from eyeline.models import llava, qwen2, siglip2
from eyeline.models.shape import build

SAMPLING = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    config = llava.Config(
        vision=siglip2.Config(image_size=16, patch=8, hidden_size=16, layers=1, heads=2, intermediate_size=16),
        language=qwen2.Config(
            vocab_size=300, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=32, max_positions=64, tie_embeddings=False
        ),
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
    return Talk(model, llava.spec(bundle.config), bundle.encoder(), SAMPLING)


@pytest.fixture
def image(tmp_path: Path) -> Path:
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


def without_cuts(written: str) -> str:
    """What is written but for notes that an answer was cut: a random model seldom ends one."""
    return "".join(line for line in written.splitlines(keepends=True) if not line.startswith("(The answer is cut"))


def expected(talk: Talk, *messages: Message) -> str:
    """The answer by `generate`, to a conversation that is written out."""
    prompt = Prompts(talk.encoder, talk.spec.image).prompt(messages)
    [answer] = generate(talk.model, talk.spec, [prompt], SAMPLING, talk.encoder.stop_ids)
    return talk.encoder.decode(answer.tokens)


def user(text: str, *images: Path) -> Message:
    return Message("user", (*(EncodedImage(str(p), p) for p in images), Text(text)))


def test_each_answer_sees_the_whole_conversation(talk: Talk, image: Path) -> None:
    written = said(talk, f"/image {image}", "what is it?", "", "and now?")
    first = expected(talk, user("what is it?", image))
    second = expected(talk, user("what is it?", image), Message("assistant", (Text(first),)), user("and now?"))
    assert without_cuts(written) == f"{harmless(first)}\n{harmless(second)}\n\n"
    assert second != expected(talk, user("and now?"))
    assert [m.role for m in talk.messages] == ["user", "assistant", "user", "assistant"]
    assert len(talk.messages[2].parts) == 1  # an image is shown once


def test_a_new_conversation_remembers_nothing(talk: Talk, image: Path) -> None:
    written = said(talk, "what is it?", f"/image {image}", "/new", "and now?")
    assert without_cuts(written).split("\n")[2] == harmless(expected(talk, user("and now?")))
    assert "A new conversation: the model no longer sees the previous one." in written


def test_unusable_image_is_reported_and_dropped(talk: Talk, image: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(image.read_bytes()[:60])
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
    for part in ("absent.png does not exist", "page.png is HTML", "/imgae is not a command", "this message alone has "):
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


@pytest.mark.parametrize("form", ["auto", "parts"])
def test_chat_works_on_exported_folders(
    bundle: Bundle, model: llava.Model, talk: Talk, image: Path, tmp_path: Path, form: Literal["auto", "parts"]
) -> None:
    export(bundle, model, tmp_path / "out", form=form)
    out: list[str] = []
    chat(tmp_path / "out", images=[image], ask="what is it?", sampling=SAMPLING, write=out.append)
    assert "".join(out) == harmless(expected(talk, user("what is it?", image))) + "\n"
    with pytest.raises(Refused, match="does not exist"):
        chat(tmp_path / "out", images=[tmp_path / "absent.png"], ask="what?", sampling=SAMPLING, write=out.append)
    lines = iter(["what is it?"])
    out.clear()
    chat(tmp_path / "out", images=[image], ask=None, sampling=SAMPLING, read=ending(lines), write=out.append)
    assert out[0].startswith(f"{tmp_path / 'out'} · llava, ")
    assert "parameters · fp32 on cpu (" in out[0] and " · context of 64 tokens\n/image PATH" in out[0]
    assert without_cuts("".join(out[1:])) == harmless(expected(talk, user("what is it?", image))) + "\n\n"


def ending(lines: Iterator[str]) -> Callable[[str], str]:
    def read(_prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    return read


# ---- a full context


def exchanges(talk: Talk) -> list[str]:
    """The user's messages that the model still sees."""
    return ["".join(part.text for part in m.parts if isinstance(part, Text)) for m in talk.messages if m.role == "user"]


def test_full_context_drops_oldest_messages_with_one_warning(talk: Talk) -> None:
    """Every message is answered, however many there were: what the model sees is the newest that fit, with room for an answer."""
    asked = [f"what is it, {n}?" for n in range(8)]
    written = said(talk, *asked)
    note = "(The conversation fills the model's context (64 tokens): its oldest messages are left out from now on. "
    assert written.count("fills the model's context") == 1
    assert note + "/new starts a new conversation.)\n" in written
    kept = exchanges(talk)
    assert 1 <= len(kept) < 8 and kept == asked[-len(kept) :]
    assert "prompt" not in written
    last = expected(talk, *talk.messages[:-1])
    assert talk.messages[-1] == Message("assistant", (Text(last),)), "the last answer saw what was kept, and nothing else"
    assert [message.role for message in talk.messages] == ["user", "assistant"] * len(kept)
    for n in range(8):
        said(talk, "what " + "is " * n + "it?")
        prompt = Prompts(talk.encoder, talk.spec.image).prompt(talk.messages[:-1])
        assert len(prompt.tokens_T) + SAMPLING.max_new_tokens <= 64, "there is room for the answer"
        assert [message.role for message in talk.messages[:2]] == ["user", "assistant"], "questions leave with their answers"

    assert "fills the model's context" in said(talk, "/new", *asked), "a new conversation may fill up too"


def test_image_that_is_left_out_is_named(talk: Talk, image: Path) -> None:
    written = said(talk, f"/image {image}", *(f"what is it, {n}?" for n in range(8)))
    assert written.count(f"(The model no longer sees {image}. /image {image} shows it again.)") == 1


def test_too_long_message_is_refused_with_its_size(talk: Talk, image: Path) -> None:
    long = "a red circle " * 30
    written = said(talk, long, f"/image {image}", long, "/new", "what is it?")
    first, second = (line for line in written.splitlines() if "this message alone has" in line)
    assert first.endswith(" tokens, and the model's context holds 64, answer included. Shorten it.")
    assert second.endswith("Shorten it, or show fewer or smaller images (/new drops those that wait).")
    assert exchanges(talk) == ["what is it?"]


def test_cut_answer_says_what_cut_it(bundle: Bundle, model: llava.Model) -> None:
    for most, words in ((2, "cut after 2 tokens. --max-new-tokens allows"), (500, "cut at the end of the model's context (64 tokens)")):
        talk = Talk(model, llava.spec(bundle.config), bundle.encoder(), Sampling(max_new_tokens=most))
        written = said(talk, "what is it?")
        ended = expected_finish(talk, most)
        assert (words in written) == (ended == "length")


def expected_finish(talk: Talk, most: int) -> str:
    prompt = Prompts(talk.encoder, talk.spec.image).prompt((user("what is it?"),))
    [answer] = generate(talk.model, talk.spec, [prompt], Sampling(max_new_tokens=most), talk.encoder.stop_ids)
    return answer.finish


def test_bytes_that_are_no_text_are_asked_as_question_marks(talk: Talk) -> None:
    said(talk, "what \udcff is it?")
    assert exchanges(talk) == ["what ? is it?"]


# ---- paths and commands


def test_path_may_be_quoted_or_escaped_as_terminals_drop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my photo's.png"
    file.write_bytes(b"")
    for typed in (str(file), f'"{file}"', str(file).replace(" ", "\\ ").replace("'", "\\'"), f"  {file} "):
        assert path_of(typed) == file, typed
    assert path_of("it's.png") == Path("it's.png")
    assert path_of("two words.png") == Path("two words.png"), "a name that is not there stays as it was typed"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("~/my photo's.png").expanduser() == file
    with pytest.raises(Refused, match="/image needs a path"):
        path_of(" ")


def test_path_in_place_of_a_command_is_explained(talk: Talk, image: Path) -> None:
    written = said(talk, f"{image} what is it?", "/image")
    assert f"{image} is not a command. To show that file, type /image {image}" in written
    assert "/image needs a path" in written


def test_checkpoint_is_of_runs_only(bundle: Bundle, model: llava.Model, tmp_path: Path) -> None:
    export(bundle, model, tmp_path / "out")
    with pytest.raises(Refused, match="is not a run folder, so it has no best checkpoint"):
        chat(tmp_path / "out", images=[], ask="what?", sampling=SAMPLING, checkpoint="best")
