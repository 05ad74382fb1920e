"""Templates equal the tokenizers' own, token for token, and what is learned is what the assistant says, with its end."""

import json
import re
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from eyeline.core.batch import IGNORE, EncodedImage, Message, Sample, Text, Video
from eyeline.core.errors import BadSample, Refused
from eyeline.core.image_rule import Area, ImageRule, Square
from eyeline.data.images.patches import grey_images
from eyeline.data.text.documents import document_of, prompt_of, tokenise
from eyeline.data.text.templates import TEMPLATES, template_named
from eyeline.data.text.tokenizer import Encoder, train_bpe
from tests.data.conftest import WORDS
from tests.data.published_templates import PUBLISHED
from tests.data.short_samples import DOT, said, sample

Tokenizers = dict[str, PreTrainedTokenizerFast]


def theirs(tokenizers: Tokenizers, name: str, messages: tuple[Message, ...], prompt: bool, jinja: str) -> list[int]:
    """The reference: the tokenizer renders and tokenises the whole text at once; images are written into the text."""
    tokenizer = copy(tokenizers[name])
    tokenizer.chat_template = jinja
    wrap = "<|vision_start|><|image_pad|><|vision_end|>" if name.startswith("qwen") else "<|image_pad|>"

    def written(part: Text | EncodedImage | Video) -> str:
        match part:
            case Text():
                return part.text
            case EncodedImage():
                return wrap
            case Video():  # slices of two frames, each with the time between them
                pairs = zip(part.seconds[::2], [*part.seconds[1::2], part.seconds[-1]], strict=False)
                return "".join(f"<{(a + b) / 2:.1f} seconds>" + wrap.replace("image", "video") for a, b in pairs)

    spoken = [{"role": m.role, "content": "".join(map(written, m.parts))} for m in messages]
    return tokenizer.apply_chat_template(spoken, tokenize=True, add_generation_prompt=prompt, return_dict=False)


RULE = ImageRule(8, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", Square(32))


def ours(encoder: Encoder, messages: tuple[Message, ...], prompt: bool) -> list[int]:
    return tokenise(messages, encoder, RULE, prompt).ids_U.tolist()


CONVERSATIONS = {
    "short": said("Hi!", "Hello."),
    "no space": said("what is the colour?", "red"),
    "two exchanges": said("one", "1", "two", "2"),
    "system": said("Hi", "Hello", system="You answer in verse."),
    "empty system": said("Hi", "Hello", system=""),
    "image first": said((DOT, "what is it?"), "a circle"),
    "image last": said(("what is it?", DOT), "a circle"),
    "images in two turns": said((DOT, "this?"), "a circle", ("and", DOT, "or", DOT, "?"), "neither"),
    "two texts side by side": said(("first ", "second"), "third"),
    "lines": said("a\n\nb\n", "c\n\nd\n"),
    "spaces at the ends": said("  a  ", "b  "),
    "numbers and marks": said("12345 + 67.8 = ?", "12,412.8!!!"),
    "other scripts": said("你好 wörld 🙂", "e\u0301t\u00e9"),
    "reasoning": said("what?", "<think>\nA square?\n</think>\n\nA circle.", "sure?", "<think>\n\n Look again. \n</think>\n\n\nYes."),
    "an empty thought": said("what?", "<think>\n\n</think>\n\nA circle."),
    "half of a reasoning": said("what?", "So a circle.</think>\n\nA circle."),
    "looks like a role": said("assistant\nI am the user", "user\nI am the assistant"),
}
REASONING = {message for name in ("reasoning", "half of a reasoning") for message in CONVERSATIONS[name] if message.role == "assistant"}


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_tokens_equal_the_tokenizers_own(name: str, messages: tuple[Message, ...], tokenizers: Tokenizers) -> None:
    """With our jinja, which is exported, and with the one that the published checkpoint carries."""
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    for jinja in [encoder.template.jinja, *([PUBLISHED[name]] if name in PUBLISHED else [])]:
        assert ours(encoder, messages[:-1], True) == theirs(tokenizers, name, messages[:-1], True, jinja)
        if jinja in (PUBLISHED["qwen3-no-thinking"], PUBLISHED["qwen3.5"]) and REASONING.intersection(messages):
            continue  # a model that is not to think is not taught the reasoning of the data
        found, wanted = ours(encoder, messages, False), theirs(tokenizers, name, messages, False, jinja)
        if TEMPLATES[name].jinja.endswith("<think>\\n' }}{%- endif %}") and "<think>\n\n" in encoder.decode(wanted, special=True):
            # the prompt ends after the first newline of an empty thought, and the model writes the second: never one token here
            found, wanted = ([encoder.decode(ids, special=True)] for ids in (found, wanted))
        assert found == wanted


def test_every_template_but_our_own_is_a_published_one() -> None:
    assert [name for name in TEMPLATES if name not in PUBLISHED] == ["plain"]


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "plain"])
@pytest.mark.parametrize("strips", [{}, {"lstrip": True, "rstrip": True}])
def test_added_tokens_in_messages_equal_the_tokenizers_own(name: str, strips: dict[str, bool]) -> None:
    """Tokens of locations, of tools, special or not; also where the control token that ends an answer takes the spaces around it."""
    template = TEMPLATES[name]
    tokenizer = train_bpe([WORDS], 420, template)
    if strips:
        record = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in record["added_tokens"]:
            token |= strips if token["content"] == template.terminator else {}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(record)), eos_token=template.terminator)
    tokenizer.add_tokens(["<loc_1>", "<loc_7>", "<tool_call>"])
    tokenizer.add_tokens(["<|box_start|>"], special_tokens=True)
    messages = said("Where is <loc_1> ?", "the box is <loc_1><loc_7>. ", " <tool_call>", "<|box_start|>(1,2)  ")
    found = ours(Encoder(tokenizer, template), messages, False)
    tokenizers = {name: tokenizer}
    assert found == theirs(tokenizers, name, messages, False, template.jinja)
    assert {tokenizer.convert_tokens_to_ids(token) for token in ("<loc_1>", "<loc_7>", "<tool_call>", "<|box_start|>")} <= {*found}


THOUGHT = "<think>\nA square?\n</think>\n\n"
VIDEO = Video("f", (DOT,) * 5, (0.0, 0.5, 1.0, 1.5, 2.0))


@pytest.mark.parametrize("parts", [(VIDEO, "what?"), ("Look:", VIDEO, "and", DOT, VIDEO), ("at 3", VIDEO), (" ", VIDEO)])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if "<|video_pad|>" in TEMPLATES[name].controls])
def test_videos_are_slices_with_times(name: str, parts: tuple, tokenizers: Tokenizers) -> None:
    """Also where a time follows text that the tokenizer would join it to."""
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    messages = said(parts, "a", "b", THOUGHT + "c")
    rule = replace(RULE, frames=2)
    for prompt in (False, True):
        found = tokenise(messages[: -1 if prompt else None], encoder, rule, prompt)
        wanted = theirs(tokenizers, name, messages[: -1 if prompt else None], prompt, encoder.template.jinja)
        assert found.ids_U.tolist() == wanted
        assert found.slices == tuple(3 if isinstance(part, Video) else 1 for part in parts if not isinstance(part, str))
    assert "<0.2 seconds><|vision_start|><|video_pad|><|vision_end|><1.2 seconds>" in encoder.decode(found.ids_U.tolist(), special=True)


def test_a_template_without_videos_rejects_them(plain: Encoder) -> None:
    with pytest.raises(BadSample, match="does not support videos"):
        tokenise(said((VIDEO, "what?"), "a"), plain, replace(RULE, frames=2))


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_jinja_takes_lists_of_parts(name: str, tokenizers: Tokenizers) -> None:
    """As processors and servers pass images."""
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    messages = CONVERSATIONS["images in two turns"]
    spoken = [
        {"role": m.role, "content": [{"type": "text", "text": p.text} if isinstance(p, Text) else {"type": "image"} for p in m.parts]}
        for m in messages
    ]
    found = tokenizers[name].apply_chat_template(spoken[:-1], tokenize=True, add_generation_prompt=True, return_dict=False)
    assert found == ours(encoder, messages[:-1], True)


_CONTROLS = {control for template in TEMPLATES.values() for control in template.controls}
_text = (
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
    # Hypothesis tries strings that it finds in the code; of control strings the reference makes control tokens, and we do not
    .filter(lambda text: not any(control in text for control in _CONTROLS))
    | st.sampled_from(["<|im", "end|>", "user\n", " a", "\n\n", "'ll", "🙂"])
)
_any_text = _text | st.sampled_from(sorted(_CONTROLS)).flatmap(lambda control: _text.map(lambda text: text + control + "!"))
_question = st.lists(_text | st.just(DOT), min_size=1, max_size=4).map(tuple)
_answer = _text.filter(lambda text: not text[0].isspace())  # a space there may merge with the newline before it: the one exception


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(PUBLISHED)), st.lists(st.tuples(_question, _answer), min_size=1, max_size=3), st.none() | _text)
def test_any_conversation_equals_the_tokenizers_own(tokenizers: Tokenizers, name: str, exchanges: list, system: str | None) -> None:
    messages = said(*(turn for exchange in exchanges for turn in exchange), system=system)
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    for jinja in (encoder.template.jinja, PUBLISHED[name]):
        found, wanted = ours(encoder, messages, False), theirs(tokenizers, name, messages, False, jinja)
        if "<think>" in encoder.controls:  # an empty thought's second newline, and one that an answer begins with
            found, wanted = ([encoder.decode(ids, special=True)] for ids in (found, wanted))
        assert found == wanted


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(st.tuples(_question, _any_text.filter(str.strip)), min_size=1, max_size=3),
    st.none() | _any_text,
)
def test_targets_decode_to_the_answers_and_their_ends(
    tokenizers: Tokenizers, rule: ImageRule, name: str, exchanges: list, system: str | None
) -> None:
    """Labels are aligned: label t belongs to the row whose next token it is. Whatever the texts say, controls' names too."""
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    conversation = sample(*(turn for exchange in exchanges for turn in exchange), system=system)
    document = document_of(conversation, encoder, rule, [grey_images(rule)] * len(conversation.images))
    rows = (document.labels_T != IGNORE).nonzero()[0]
    assert (document.labels_T[rows] == document.tokens_T[rows + 1]).all()
    answers = [answer for _, answer in exchanges][-1 if encoder.template.learns == "the last answer" else 0 :]
    assert encoder.decode(document.labels_T[rows].tolist(), special=True) == "".join(map(partial(written, name), answers))
    ends = document.labels_T[rows] == encoder.controls[encoder.template.terminator]
    assert (ends.sum(), ends[-1]) == (len(answers), True)


def written(name: str, answer: str) -> str:
    """What the model should write for an answer of the data."""
    template = TEMPLATES[name]
    if name.startswith("llama3") or name.startswith("qwen3.5"):
        answer = answer.strip()
    if template.learns == "the last answer":
        thought, _, said = answer.rpartition("</think>")
        thought = thought.split("</think>")[0].split("<think>")[-1]
        thought = thought.strip() if name.startswith("qwen3.5") else thought.strip("\n")
        opened = name in ("qwen3.5-thinking", "qwen3-vl-thinking")
        answer = said.lstrip("\n")
        if name not in ("qwen3.5", "qwen3-no-thinking"):
            answer = ("" if opened else "<think>\n") + f"{thought}\n</think>\n\n{answer}"
    return normalize("NFC", answer) + template.terminator  # as these tokenizers do


def test_images_are_numbered_over_the_conversation(qwen: Encoder) -> None:
    """Each takes as many tokens as it has: the n-th place is the n-th image's, within a message and over turns."""
    rule = replace(RULE, resize=Area(1, 10_000))
    conversation = Sample("", CONVERSATIONS["images in two turns"])
    document = document_of(conversation, qwen, rule, [grey_images(rule, size) for size in ((16, 16), (16, 32), (80, 16))])
    assert (document.tokens_T[document.visual_M] == qwen.image_token).all()
    runs = [len(run) for run in np.split(document.visual_M, np.flatnonzero(np.diff(document.visual_M) > 1) + 1)]
    assert runs == [1, 2, 5]


def learned(encoder: Encoder, conversation: Sample) -> str:
    document = document_of(conversation, encoder, RULE, [grey_images(RULE)] * len(conversation.media))
    return encoder.decode([t for t in document.labels_T.tolist() if t != IGNORE], special=True)


LEARNED = {  # of answers without reasoning, and with it
    "qwen2.5": ("A.<|im_end|>B.<|im_end|>", f"{THOUGHT}A.<|im_end|>{THOUGHT}B.<|im_end|>"),
    "qwen3": ("A.<|im_end|>B.<|im_end|>", f"{THOUGHT}A.<|im_end|>{THOUGHT}B.<|im_end|>"),
    "qwen3-thinking": ("<think>\n\n</think>\n\nB.<|im_end|>", f"{THOUGHT}B.<|im_end|>"),
    "qwen3-vl-thinking": ("\n</think>\n\nB.<|im_end|>", "A square?\n</think>\n\nB.<|im_end|>"),
    "qwen3-no-thinking": ("B.<|im_end|>", "B.<|im_end|>"),
    "qwen3.5": ("B.<|im_end|>", "B.<|im_end|>"),
    "qwen3.5-thinking": ("\n</think>\n\nB.<|im_end|>", "A square?\n</think>\n\nB.<|im_end|>"),
    "smollm2": ("A.<|im_end|>B.<|im_end|>", f"{THOUGHT}A.<|im_end|>{THOUGHT}B.<|im_end|>"),
    "llama3": ("A.<|eot_id|>B.<|eot_id|>", f"{THOUGHT}A.<|eot_id|>{THOUGHT}B.<|eot_id|>"),
    "llama3.1": ("A.<|eot_id|>B.<|eot_id|>", f"{THOUGHT}A.<|eot_id|>{THOUGHT}B.<|eot_id|>"),
    "plain": ("A.<|endoftext|>B.<|endoftext|>", f"{THOUGHT}A.<|endoftext|>{THOUGHT}B.<|endoftext|>"),
}


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_trained_answers_equal_generated_format(name: str, tokenizers: Tokenizers) -> None:
    """Every answer with its end. Where answers follow reasoning, the last one alone: the others are shown without theirs."""
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    assert learned(encoder, sample((DOT, "one?"), "A.", "two?", "B.")) == LEARNED[name][0]
    assert learned(encoder, sample("one?", THOUGHT + "A.", "two?", THOUGHT + "B.")) == LEARNED[name][1]
    assert encoder.template.learns == ("every answer" if "A." in LEARNED[name][0] else "the last answer")


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_prompt_starts_every_document(name: str, tokenizers: Tokenizers) -> None:
    """What is learned last begins where the prompt ends: training and use look the same."""
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    asked = sample((DOT, "what?"), "red", "sure?", THOUGHT + "yes", system="Be brief.")
    document, prompt = (make(asked, encoder, RULE, [grey_images(RULE)]) for make in (document_of, prompt_of))
    assert document.tokens_T[: len(prompt.tokens_T)].tolist() == prompt.tokens_T.tolist()
    assert (document.labels_T[len(prompt.tokens_T) - 1 :] != IGNORE).sum() > 1
    assert document.labels_T[len(prompt.tokens_T) - 1] == document.tokens_T[len(prompt.tokens_T)]
    assert (prompt.labels_T == IGNORE).all()


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_there_is_one_bos_or_none_whatever_the_tokenizer_adds(name: str, tokenizers: Tokenizers) -> None:
    """The template's own, where it has one; and a text that spells it is text."""
    first = "<|begin_of_text|>" if name.startswith("llama3") else TEMPLATES[name].end
    bos = tokenizers[name].convert_tokens_to_ids(first)
    backend = Tokenizer.from_str(tokenizers[name].backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, bos)])
    adds = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=first, eos_token=TEMPLATES[name].terminator)
    assert adds.encode("hi")[0] == bos
    encoder, without = Encoder(adds, TEMPLATES[name]), Encoder(tokenizers[name], TEMPLATES[name])
    for messages in (CONVERSATIONS["two exchanges"], CONVERSATIONS["system"]):
        for prompt in (False, True):
            assert ours(encoder, messages, prompt) == ours(without, messages, prompt)
            assert not name.startswith("llama3") or ours(encoder, messages, prompt).count(bos) == 1
    assert bos not in encoder.ids(f"{first}hi")


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_stop_tokens_are_the_terminator_and_the_end_of_text(name: str, tokenizers: Tokenizers) -> None:
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    assert {encoder.decode([token], special=True) for token in encoder.stop_ids} == {encoder.template.terminator, encoder.template.end}
    assert tokenizers[name].pad_token == encoder.template.end


def test_one_conversation_by_hand(plain: Encoder, rule) -> None:
    document = document_of(sample((DOT, "what?"), "red", "sure?", "yes"), plain, rule, [grey_images(rule)])
    what, red, sure, yes = (list(plain.ids(t)) for t in ("what?\n", "red", "sure?\n", "yes"))
    image, end = plain.image_token, plain.controls["<|endoftext|>"]
    assert document.tokens_T.tolist() == [image] * 4 + what + red + [end] + sure + yes + [end]
    none = [IGNORE]
    assert document.labels_T.tolist() == none * (3 + len(what)) + red + [end] + none * (len(sure)) + yes + [end] + none
    assert document.visual_M.tolist() == [0, 1, 2, 3]


def test_a_prompt_is_the_document_before_its_last_answer(qwen: Encoder, rule) -> None:
    asked = sample((DOT, "what?"), "red", "sure?", "yes", system="Be brief.")
    prompt = prompt_of(asked, qwen, rule, [grey_images(rule)])
    document = document_of(asked, qwen, rule, [grey_images(rule)])
    assert document.tokens_T[: len(prompt.tokens_T)].tolist() == prompt.tokens_T.tolist()
    first_target_of_last_answer = len(prompt.tokens_T) - 1
    assert document.labels_T[first_target_of_last_answer] == qwen.ids("yes")[0]
    assert (prompt.labels_T == IGNORE).all()
    assert prompt_of(asked.messages[:-1], qwen, rule, [grey_images(rule)]).tokens_T.tolist() == prompt.tokens_T.tolist()


FOREIGN = ("<s>", "</s>", "<bos>", "[INST]", "<|image|>", "<image>", "<|endoftext|>", "<|im_start|>assistant\n", "<|eot_id|>")


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_control_strings_in_data_stay_text(name: str, tokenizers: Tokenizers) -> None:
    """Its own and those of other models, in every role, next to ASCII and other letters: the control tokens are those of the same
    conversation without them."""
    encoder = Encoder(tokenizers[name], TEMPLATES[name])

    def controls(text: str, answer: str) -> list[int]:
        document = document_of(sample((DOT, f"say {text}"), answer, system=text), encoder, RULE, [grey_images(RULE)])
        spoken = encoder.decode([t for t in document.labels_T.tolist() if t != IGNORE], special=True)
        assert spoken.endswith(answer + encoder.template.terminator)
        return [t for t in document.tokens_T.tolist() if t in encoder.controls.values()]

    wanted = controls("hello", "I say hello!")
    assert len(wanted) > 4
    for text in sorted(_CONTROLS.union(FOREIGN)):
        for letter in ("e", "é"):
            answer = f"I say {letter}{text.replace('</think>', '')}!"  # in an answer, that one ends a thought
            assert controls(letter + text, answer) == wanted, letter + text


def test_pasted_transcript_is_not_in_the_loss(qwen: Encoder, rule: ImageRule) -> None:
    """A user's line that begins with the word assistant is the user's."""
    document = document_of(sample("assistant\nGive me the key.\nuser\nno", "I will not."), qwen, rule, [])
    assert qwen.decode([t for t in document.labels_T.tolist() if t != IGNORE], special=True) == "I will not.<|im_end|>"


def test_an_unknown_template_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Refused, match=r"'qwen2\.4' is not known; there are qwen2\.5, qwen3, .*, plain\. Did you mean 'qwen2\.5'\?"):
        template_named("qwen2.4")


def test_docs_list_every_template_and_its_loss() -> None:
    manual = Path(__file__).parents[2].joinpath("docs/data.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| .* \| (every answer|the last answer)\b.* \|$", manual, re.MULTILINE)
    assert dict(rows) == {name: template.learns for name, template in TEMPLATES.items()}
