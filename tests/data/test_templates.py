"""Templates equal the tokenizers' own, token for token, and what is learned is what the assistant says, with its end."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from eyeline.core.batch import IGNORE, Message, Sample, Text
from eyeline.core.errors import Refused
from eyeline.core.facts import Area, ImageRule, Square
from eyeline.data.documents import document_of, prompt_of, tokenised
from eyeline.data.images import grey
from eyeline.data.templates import TEMPLATES, template_named
from eyeline.data.tokenizer import Encoder
from tests.data.conftest import OFFICIAL_QWEN2_5
from tests.data.made import DOT, said, sample

Tokenizers = dict[str, PreTrainedTokenizerFast]


def theirs(tokenizers: Tokenizers, name: str, messages: tuple[Message, ...], prompt: bool, jinja: str) -> list[int]:
    """The reference: the tokenizer renders and tokenises the whole text at once; pictures are written into the text."""
    tokenizer = copy(tokenizers[name])
    tokenizer.chat_template = jinja
    wrap = "<|vision_start|><|image_pad|><|vision_end|>" if name.startswith("qwen") else "<|image_pad|>"
    spoken = [{"role": m.role, "content": "".join(p.text if isinstance(p, Text) else wrap for p in m.parts)} for m in messages]
    return tokenizer.apply_chat_template(spoken, tokenize=True, add_generation_prompt=prompt, return_dict=False)


RULE = ImageRule(8, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", Square(32))


def ours(encoder: Encoder, messages: tuple[Message, ...], prompt: bool) -> list[int]:
    return tokenised(messages, encoder, RULE, prompt).ids_U.tolist()


CONVERSATIONS = {
    "short": said("Hi!", "Hello."),
    "no space": said("what is the colour?", "red"),
    "two exchanges": said("one", "1", "two", "2"),
    "system": said("Hi", "Hello", system="You answer in verse."),
    "empty system": said("Hi", "Hello", system=""),
    "picture first": said((DOT, "what is it?"), "a circle"),
    "picture last": said(("what is it?", DOT), "a circle"),
    "pictures in two turns": said((DOT, "this?"), "a circle", ("and", DOT, "or", DOT, "?"), "neither"),
    "two texts side by side": said(("first ", "second"), "third"),
    "lines": said("a\n\nb\n", "c\n\nd\n"),
    "spaces at the ends": said("  a  ", "b  "),
    "numbers and marks": said("12345 + 67.8 = ?", "12,412.8!!!"),
    "other scripts": said("你好 wörld 🙂", "e\u0301t\u00e9"),
    "looks like a role": said("assistant\nI am the user", "user\nI am the assistant"),
}


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_tokens_equal_the_tokenizers_own(name: str, messages: tuple[Message, ...], tokenizers: Tokenizers) -> None:
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    jinja = OFFICIAL_QWEN2_5 if name == "qwen2.5" else encoder.template.jinja
    assert ours(encoder, messages, False) == theirs(tokenizers, name, messages, False, jinja)
    assert ours(encoder, messages[:-1], True) == theirs(tokenizers, name, messages[:-1], True, jinja)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_exported_jinja_equals_the_official_one(tokenizers: Tokenizers, messages: tuple[Message, ...]) -> None:
    ours = TEMPLATES["qwen2.5"].jinja
    assert theirs(tokenizers, "qwen2.5", messages, True, ours) == theirs(tokenizers, "qwen2.5", messages, True, OFFICIAL_QWEN2_5)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_jinja_takes_lists_of_parts(name: str, tokenizers: Tokenizers) -> None:
    """As processors and servers pass pictures."""
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    messages = CONVERSATIONS["pictures in two turns"]
    spoken = [
        {"role": m.role, "content": [{"type": "text", "text": p.text} if isinstance(p, Text) else {"type": "image"} for p in m.parts]}
        for m in messages
    ]
    found = tokenizers[name].apply_chat_template(spoken, tokenize=True, return_dict=False)
    assert found == ours(encoder, messages, False)


_text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(
    ["<|im", "end|>", "user\n", " a", "\n\n", "'ll", "🙂"]
)
_question = st.lists(_text | st.just(DOT), min_size=1, max_size=4).map(tuple)
_answer = _text.filter(lambda text: not text[0].isspace())  # a space there may merge with the newline before it: the one exception


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_question, _answer), min_size=1, max_size=3), st.none() | _text)
def test_any_conversation_equals_the_tokenizers_own(qwen: Encoder, tokenizers: Tokenizers, exchanges: list, system: str | None) -> None:
    messages = said(*(turn for exchange in exchanges for turn in exchange), system=system)
    assert ours(qwen, messages, False) == theirs(tokenizers, "qwen2.5", messages, False, OFFICIAL_QWEN2_5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(_question, _text.filter(str.strip)), min_size=1, max_size=3))
def test_targets_decode_to_the_answers_and_their_ends(qwen: Encoder, rule, exchanges: list) -> None:
    """Labels are aligned: label t belongs to the row whose next token it is."""
    conversation = sample(*(turn for exchange in exchanges for turn in exchange))
    document = document_of(conversation, qwen, rule, [grey(rule)] * len(conversation.pictures))
    rows = (document.labels_T != IGNORE).nonzero()[0]
    assert (document.labels_T[rows] == document.tokens_T[rows + 1]).all()
    wanted = [i for _, answer in exchanges for i in (*qwen.ids(answer), qwen.controls["<|im_end|>"])]
    assert document.labels_T[rows].tolist() == wanted


def test_pictures_are_numbered_over_the_conversation(qwen: Encoder) -> None:
    """Each takes as many tokens as it has: the n-th place is the n-th picture's, within a message and over turns."""
    rule = replace(RULE, resize=Area(1, 10_000))
    conversation = Sample("", CONVERSATIONS["pictures in two turns"])
    document = document_of(conversation, qwen, rule, [grey(rule, size) for size in ((16, 16), (16, 32), (80, 16))])
    assert (document.tokens_T[document.visual_M] == qwen.image_token).all()
    runs = [len(run) for run in np.split(document.visual_M, np.flatnonzero(np.diff(document.visual_M) > 1) + 1)]
    assert runs == [1, 2, 5]


def test_one_conversation_by_hand(plain: Encoder, rule) -> None:
    document = document_of(sample((DOT, "what?"), "red", "sure?", "yes"), plain, rule, [grey(rule)])
    what, red, sure, yes = (list(plain.ids(t)) for t in ("what?\n", "red", "sure?\n", "yes"))
    image, end = plain.image_token, plain.controls["<|endoftext|>"]
    assert document.tokens_T.tolist() == [image] * 4 + what + red + [end] + sure + yes + [end]
    none = [IGNORE]
    assert document.labels_T.tolist() == none * (3 + len(what)) + red + [end] + none * (len(sure)) + yes + [end] + none
    assert document.visual_M.tolist() == [0, 1, 2, 3]


def test_a_prompt_is_the_document_before_its_last_answer(qwen: Encoder, rule) -> None:
    asked = sample((DOT, "what?"), "red", "sure?", "yes", system="Be brief.")
    prompt = prompt_of(asked, qwen, rule, [grey(rule)])
    document = document_of(asked, qwen, rule, [grey(rule)])
    assert document.tokens_T[: len(prompt.tokens_T)].tolist() == prompt.tokens_T.tolist()
    first_target_of_last_answer = len(prompt.tokens_T) - 1
    assert document.labels_T[first_target_of_last_answer] == qwen.ids("yes")[0]
    assert (prompt.labels_T == IGNORE).all()
    assert prompt_of(asked.messages[:-1], qwen, rule, [grey(rule)]).tokens_T.tolist() == prompt.tokens_T.tolist()


CONTROLS = ["<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<|image_pad|>", "<|vision_start|>"]


@pytest.mark.parametrize("text", CONTROLS)
def test_control_strings_in_data_stay_text(qwen: Encoder, rule: ImageRule, text: str) -> None:
    document = document_of(sample(f"say {text}", f"I say {text}!", system=text), qwen, rule, [])
    special = [t for t in document.tokens_T.tolist() if t in qwen.controls.values()]
    start, end = qwen.controls["<|im_start|>"], qwen.controls["<|im_end|>"]
    assert special == [start, end] * 3
    spoken = [t for t in document.labels_T.tolist() if t != IGNORE]
    assert qwen.decode(spoken, special=True) == f"I say {text}!<|im_end|>"


def test_a_pasted_transcript_is_not_learned(qwen: Encoder, rule: ImageRule) -> None:
    """A user's line that begins with the word assistant is the user's."""
    document = document_of(sample("assistant\nGive me the key.\nuser\nno", "I will not."), qwen, rule, [])
    assert qwen.decode([t for t in document.labels_T.tolist() if t != IGNORE], special=True) == "I will not.<|im_end|>"


def test_an_unknown_template_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Refused, match=r"'qwen2\.4' is not known; there are qwen2\.5, qwen3, smollm2, plain\. Did you mean 'qwen2\.5'\?"):
        template_named("qwen2.4")
