"""Nothing is added to text, text never becomes a control token, and made tokenizers are the same each time."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eyeline.core.errors import BadSample, Refused
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import FILLER, Encoder, add_tokens, load_tokenizer, train_bpe
from tests.data.conftest import WORDS

PLAIN = TEMPLATES["plain"]


def test_training_is_deterministic_and_bounded() -> None:
    one, two = (train_bpe([WORDS, "abc abc"], 420, PLAIN) for _ in range(2))
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    assert len(one) <= 420
    assert max(one.get_vocab().values()) == len(one) - 1


def test_every_text_survives(plain: Encoder) -> None:
    text = "Ünïcode 🙂\x00\t\r\n 你好 <|endoftext|> \U0001f9d1\u200d"
    assert plain.decode(plain.ids(text)) == text


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(Refused, match="at least 258 ids, got 100"):
        train_bpe(["a"], 100, PLAIN)


def test_saved_and_loaded_it_is_the_same(tmp_path, qwen: Encoder, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    tokenizers["qwen2.5"].save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    again = Encoder(loaded, qwen.template)
    assert again.ids(WORDS) == qwen.ids(WORDS)
    assert (again.controls, again.stop_ids, again.image_token) == (qwen.controls, qwen.stop_ids, qwen.image_token)
    assert loaded.chat_template == qwen.template.jinja
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_decoding_equals_the_tokenizers_own(qwen: Encoder, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    ids = [qwen.controls["<|im_start|>"], *qwen.ids(" don't , 你好 !"), qwen.controls["<|im_end|>"], qwen.ids("🙂")[0]]
    for special in (True, False):
        assert qwen.decode(ids, special) == tokenizers["qwen2.5"].decode(ids, skip_special_tokens=not special)


def test_no_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(Refused, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Refused, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_missing_control_tokens_are_refused_and_can_be_added() -> None:
    tokenizer = train_bpe([WORDS], 400, PLAIN)
    with pytest.raises(Refused, match=r"no <\|im_start\|>, <\|im_end\|>, <\|vision_start\|>, <\|vision_end\|>"):
        Encoder(tokenizer, TEMPLATES["qwen2.5"])
    before = tokenizer.get_vocab()
    assert add_tokens(tokenizer, TEMPLATES["qwen2.5"]) == ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    after = tokenizer.get_vocab()
    assert {token: after[token] for token in before} == before
    assert sorted(after[t] for t in after.keys() - before.keys()) == list(range(len(before), len(before) + 4))
    assert add_tokens(tokenizer, TEMPLATES["qwen2.5"]) == []
    assert Encoder(tokenizer, TEMPLATES["qwen2.5"]).vocabulary == len(before) + 4


def test_no_bos_is_ever_added() -> None:
    """A tokenizer that puts BOS before everything, as Llama's does, puts none here."""
    tokenizer = train_bpe([WORDS], 400, PLAIN)
    bos = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[bos])
    assert tokenizer("a")["input_ids"][0] == bos[1]
    assert bos[1] not in Encoder(tokenizer, PLAIN).ids("a")


def test_settings_of_padding_and_cutting_are_not_inherited() -> None:
    tokenizer = train_bpe([WORDS], 400, PLAIN)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    encoder = Encoder(tokenizer, PLAIN)
    assert encoder.decode(encoder.ids(WORDS)) == WORDS
    assert len(encoder.ids("a")) == 1


def test_tokenizer_with_control_strings_as_pieces_rejects() -> None:
    """Some keep control strings among their pieces; a text that hits one is rejected rather than trained on."""
    vocabulary = {"[unknown]": 0, "hello": 1, "<|endoftext|>": 2, "<|image_pad|>": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[unknown]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"), PLAIN)
    assert encoder.ids("hello hello") == [1, 1]
    with pytest.raises(BadSample, match="would be read as a control token") as caught:
        encoder.ids("hello <|endoftext|>")
    assert caught.value.cause == "control_token"


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(Refused, match=r"no tokenizer\.json behind it"):
        Encoder(object(), PLAIN)  # type: ignore[arg-type]


@pytest.mark.timeout(30)
def test_one_endless_word_does_not_hold_up_the_training() -> None:
    train_bpe(["z" * 500_000, "hello world"], 300, TEMPLATES["plain"])


# Tokenizers of every make


def byte_fallback(controls: tuple[str, ...]) -> Tokenizer:
    """As Llama 2's: pieces of letters, bytes for what is none of them, and spaces as marks."""
    letters = sorted({*"▁", *WORDS.replace(" ", "▁")} - {"\n"})
    pieces = [*("<unk>", "<s>", "</s>"), *(f"<0x{n:02X}>" for n in range(256)), *letters, "▁a", "▁t", "he", "▁the"]
    merges = [("▁", "a"), ("▁", "t"), ("h", "e"), ("▁t", "he")]
    model = models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>", *controls])
    return backend


def unigram(controls: tuple[str, ...]) -> Tokenizer:
    """As T5's and Gemma's, whose control tokens are among the pieces that text is cut into."""
    letters = sorted({*"▁", *WORDS.replace(" ", "▁")} - {"\n"})
    pieces = [*(("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)), *((f"<0x{n:02X}>", -20.0) for n in range(256))]
    pieces += [*((letter, -5.0) for letter in letters), ("▁the", -3.0)]
    backend = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>", *controls])
    return backend


def byte_level(controls: tuple[str, ...]) -> Tokenizer:
    return train_bpe([WORDS], 400, PLAIN).backend_tokenizer


MAKES = {"byte level": byte_level, "byte fallback": byte_fallback, "unigram": unigram}
SPECIAL = ["<s>", "</s>", "<unk>", "<|endoftext|>", "<|image_pad|>", "<|im_end|>"]


@lru_cache
def encoder_of(make: Callable[[tuple[str, ...]], Tokenizer]) -> Encoder:
    roles = {} if make is byte_level else {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=make(PLAIN.controls), **roles), PLAIN)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("text", ["the cat", " two  spaces ", "a\nb\r\n", "ünï 你好 🙂", "\0\x01", "e\u0301", "\u202eabc", "<0x0", "▁"])
def test_text_survives_every_make(make: str, text: str) -> None:
    """But for what its own marks mean: ▁ is a space where spaces are marks, and the byte level composes letters and accents."""
    encoder = encoder_of(MAKES[make])
    wanted = normalize("NFC", text) if make == "byte level" else text.replace("▁", " ")
    assert encoder.decode(encoder.ids(text), special=True) == wanted


@pytest.mark.parametrize("make", MAKES)
@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.lists(st.sampled_from([*WORDS.split(), " ", "\n", "é", "e\u0301", "你", "<0x0A>", "▁"])).map("".join))
def test_ids_are_those_of_the_plain_call(make: str, text: str) -> None:
    encoder = encoder_of(MAKES[make])
    wanted = encoder._plain.encode(text, add_special_tokens=False).ids
    assert not encoder._control_ids.isdisjoint(wanted) or encoder.ids(text) == wanted


@pytest.mark.parametrize("form", [normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD, normalizers.Lowercase])
@pytest.mark.parametrize("pieces", [True, False])
def test_ids_of_ascii_are_those_of_the_plain_call(form: Callable[[], Any], pieces: bool) -> None:
    """Whether or not the tokenizer cuts text before it merges, and also in another process."""
    backend = byte_level(PLAIN.controls)
    backend.normalizer = form()
    backend.pre_tokenizer = backend.pre_tokenizer if pieces else None  # type: ignore[assignment]
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend), PLAIN)
    texts = [WORDS, "".join(map(chr, range(128))), "", "Don't SHOUT,  it's 12:30\r\n\t", "e\u0301 \ufb01"]
    wanted = [encoder._plain.encode(text, add_special_tokens=False).ids for text in texts]
    assert [encoder.ids(text) for text in texts] == wanted
    assert [pickle.loads(pickle.dumps(encoder)).ids(text) for text in texts] == wanted
    assert (encoder._without_forms is encoder._plain) == (form is normalizers.Lowercase)


def test_no_thread_is_started() -> None:
    code = """
import os
os.environ.pop("TOKENIZERS_PARALLELISM", None)
from eyeline.parallel.threads import calm_threads
calm_threads()
from tests.data.test_tokenizer import byte_level, encoder_of
before = len(os.listdir("/proc/self/task"))
encoder_of(byte_level).ids("a text of some words")
print(len(os.listdir("/proc/self/task")) - before)
"""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}{code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == "0\n"


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("text", SPECIAL)
def test_no_make_lets_text_become_a_control_token(make: str, text: str) -> None:
    """Its pieces are letters; where a make knows no such way to write it, the sample is rejected."""
    encoder = encoder_of(MAKES[make])
    if make == "unigram" and text in ("<s>", "</s>"):
        with pytest.raises(BadSample) as caught:
            encoder.ids(f"say {text}!")
        assert caught.value.cause == "control_token"
        return
    ids = encoder.ids(f"say {text}!")
    assert not {*encoder.controls.values(), *(encoder._backend.token_to_id(t) for t in ("<s>", "</s>", "<unk>"))} & {*ids}
    assert encoder.decode(ids, special=True) == f"say {text}!"


# Added tokens that are not control tokens


def added(make: Callable[[tuple[str, ...]], Tokenizer], lower: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer to which control tokens were added between others, as by a `resize_token_embeddings` before and after."""
    backend = make(())
    if lower:
        backend.normalizer = normalizers.Lowercase()
    roles = {} if make is byte_level else {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    tokenizer.add_tokens(["<loc_1>", "<loc_10>", "<LOUD>"])
    tokenizer.add_tokens([*PLAIN.controls, "<|box|>"], special_tokens=True)
    flags = [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": False}, {"lstrip": True, "rstrip": True}]
    tokenizer.add_tokens([AddedToken(f"<flag_{n}>", **flag) for n, flag in enumerate(flags)])
    tokenizer.add_tokens(["<é>", AddedToken("word", single_word=True), "\ufb01"])
    return tokenizer


PIECES = ["<loc_1>", "<loc_10>", "<loc_1", "<LOUD>", "<loud>", "<|box|>", *(f"<flag_{n}>" for n in range(5)), "<é>", "<e\u0301>", "word"]
MIXED = st.lists(st.sampled_from([*PIECES, *WORDS.split()[:4], "fi", "\ufb01", "s", " ", "  ", "\n", ".", "é", "1", ">", "<"])).map("".join)


@lru_cache
def added_and_encoder(make: str, lower: bool) -> tuple[PreTrainedTokenizerFast, Encoder, Encoder]:
    tokenizer = added(MAKES[make], lower)
    encoder = Encoder(tokenizer, PLAIN)
    return tokenizer, encoder, pickle.loads(pickle.dumps(encoder))


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("make", MAKES)
@settings(max_examples=150, deadline=None)
@given(text=MIXED)
def test_added_tokens_are_read_as_transformers_reads_them(make: str, lower: bool, text: str) -> None:
    """Special or not, with every flag, in another process too."""
    tokenizer, encoder, sent = added_and_encoder(make, lower)
    assume(not any(control in text for control in encoder.all_controls))  # such as "<s>", of three pieces
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.unk_token_id in wanted and tokenizer.unk_token_id is not None:
        with pytest.raises(BadSample):
            encoder.ids(text)
        return
    assert encoder.ids(text) == sent.ids(text) == wanted


@pytest.mark.parametrize("make", MAKES)
@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from([*PIECES, *PLAIN.controls, "the", " ", "<|image", "_pad|>", "<|im_end|>", FILLER])).map("".join))
def test_no_text_becomes_a_control_token_among_added_tokens(make: str, text: str) -> None:
    tokenizer, encoder, _ = added_and_encoder(make, False)
    ids = encoder.ids(text)
    assert not {*encoder.all_controls.values()} & {*ids}
    assert {tokenizer.convert_tokens_to_ids(token) for token in PLAIN.controls} <= {*encoder.all_controls.values()}
    flags = ("<flag_0>", "<flag_1>", "<flag_4>", "<é>", "<e\u0301>")  # strip spaces, or come back composed
    assert any(flag in text for flag in flags) or encoder.decode(ids) == text


def test_a_token_with_a_role_is_a_control_token() -> None:
    """BOS, EOS, padding and what is put around a text, whatever the template; a special token without a role is not."""
    tokenizer = train_bpe([WORDS], 400, PLAIN)
    names = ["<bos>", "<pad>", "<mask>", "<image>", "<cls>", "<|video_pad|>", "<|box_start|>"]
    tokenizer.add_tokens(names, special_tokens=True)
    around = [("<cls>", tokenizer.convert_tokens_to_ids("<cls>"))]
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing(single="<cls> $A", special_tokens=around)]
    )
    roles = {"bos_token": "<bos>", "pad_token": "<pad>", "mask_token": "<mask>", "extra_special_tokens": {"image_token": "<image>"}}
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **roles), PLAIN)
    assert {*encoder.all_controls} == {*names, *PLAIN.controls} - {"<|box_start|>"}
    for name in names:
        [*ids] = encoder.ids(name)
        assert (ids == [tokenizer.convert_tokens_to_ids(name)]) == (name == "<|box_start|>")


def test_roberta_like_ends_are_control_tokens() -> None:
    tokenizer = train_bpe([WORDS], 400, PLAIN)
    tokenizer.add_tokens(["<s>", "</s>"], special_tokens=True)
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("</s>", "<s>")]
    tokenizer.backend_tokenizer.post_processor = processors.RobertaProcessing(*ends)
    assert {"<s>", "</s>"} < {*Encoder(tokenizer, PLAIN).all_controls}


def test_an_added_token_whose_normal_form_is_ascii_is_read_in_ascii() -> None:
    tokenizer = train_bpe([WORDS], 400, PLAIN)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens(["\ufb01\ufb01"])  # a ligature, fi as two letters in this form
    assert Encoder(tokenizer, PLAIN).ids("a fifi") == tokenizer("a fifi", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_tokens_to_ids("\ufb01\ufb01") in Encoder(tokenizer, PLAIN).ids("a fifi")


def test_special_tokens_that_a_tokenizer_splits_are_split() -> None:
    tokenizer = train_bpe([WORDS], 400, PLAIN)
    tokenizer.add_tokens(["<|box|>"], special_tokens=True)
    tokenizer.add_tokens(["<loc>"])
    tokenizer.split_special_tokens = True
    text = "a <|box|><loc>"
    assert Encoder(tokenizer, PLAIN).ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<|box|>") not in Encoder(tokenizer, PLAIN).ids(text)


def test_ids_of_added_tokens_are_kept_where_a_vocabulary_has_gaps() -> None:
    """As pruned ones do: an added token is behind the last id, or in a gap, as the library has put it."""
    vocabulary = {"[unknown]": 0, "hello": 1, "<|endoftext|>": 9, "<|image_pad|>": 12}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[unknown]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|endoftext|>", "<|image_pad|>"])
    backend.add_tokens(["<loc>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    for behind, wanted in ((False, tokenizer("<loc>")["input_ids"]), (True, [13])):
        if behind:
            tokenizer._tokenizer = backend
        encoder = Encoder(tokenizer, PLAIN)
        assert encoder.ids("hello<loc> hello") == pickle.loads(pickle.dumps(encoder)).ids("hello<loc> hello") == [1, *wanted, 1]


def test_what_is_decoded_holds_added_tokens_and_no_control_tokens() -> None:
    _, encoder, _ = added_and_encoder("byte level", False)
    text = "at <loc_1><|box|> the"
    ids = [encoder.image_token, *encoder.ids(text), *encoder.stop_ids]
    assert encoder.decode(ids) == text
    assert encoder.decode(ids, special=True) == f"<|image_pad|>{text}<|endoftext|>"


def test_the_identity_knows_which_added_tokens_are_control_tokens() -> None:
    """An index made when `<loc_1>` was a control token is not taken for one that reads it."""
    plain = train_bpe([WORDS], 400, PLAIN)
    plain.add_tokens(["<loc_1>"], special_tokens=True)
    before = Encoder(plain, PLAIN)
    plain.pad_token = "<loc_1>"
    after = Encoder(plain, PLAIN)
    assert before.ids("<loc_1>") != after.ids("<loc_1>")
    assert before.identity != after.identity


@pytest.mark.parametrize("single", [[], ["<|endoftext|>", "$A", "<|endoftext|>"], ["$A:1"]])
def test_what_is_put_around_texts_is_left_out(single: list[str]) -> None:
    """Also a processor that puts the text out."""
    tokenizer = train_bpe([WORDS], 400, PLAIN)
    wanted = Encoder(tokenizer, PLAIN).ids("hello")
    ends = [("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    assert Encoder(tokenizer, PLAIN).ids("hello") == wanted


def test_a_text_that_no_model_could_read_is_rejected(plain: Encoder) -> None:
    with pytest.raises(BadSample, match="11,000,001 characters") as caught:
        plain.ids(" " * 11_000_000 + "x")
    assert caught.value.cause == "too_long"


# Hostile files


def edit(*path: str | int, value: Any) -> Callable[[dict], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def add(token: Any) -> Callable[[dict], None]:
    return lambda content: content["added_tokens"].append(token)


EVIL = {"id": 900, "content": "<evil>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
HOSTILE: dict[str, tuple[Callable[[dict], None], str]] = {
    "a pattern that backtracks": (edit("pre_tokenizer", value=SPLIT | {"pattern": {"Regex": "(a+)+$"}}), "does not terminate"),
    "a pattern that backtracks over digits": (
        edit("pre_tokenizer", value=SPLIT | {"pattern": {"Regex": r"(\d+)+$"}}),
        "does not terminate",
    ),
    "a pattern that is none": (edit("pre_tokenizer", value=SPLIT | {"pattern": {"Regex": "(((("}}), "cannot be read"),
    "an id of another piece": (add(EVIL | {"id": 0}), "gives id 0 to both"),
    "an id twice": (lambda content: content["added_tokens"].extend([EVIL, EVIL | {"content": "<other>"}]), "gives id 900 to both"),
    "an id of two thousand million": (add(EVIL | {"id": 2**31}), r"id 2,147,483,648, over 4,194,304"),
    "a piece's id of two thousand million": (edit("model", "vocab", "a", value=2**31), r"id 2,147,483,648, over 4,194,304"),
    "an id below 0": (add(EVIL | {"id": -1}), "cannot be read"),
    "an id that is no number": (add(EVIL | {"id": "7"}), "cannot be read"),
    "an added token that is text": (add("<evil>"), "not a list of objects"),
    "added tokens that are no list": (edit("added_tokens", value={"a": 1}), "not a list of objects"),
    "merges of unknown pieces": (edit("model", "merges", value=[["qq", "zz"]]), "cannot be read"),
    "a model of another kind": (edit("model", "type", value="Evil"), "cannot be read"),
    "no model": (edit("model", value=None), "cannot be read"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizers_are_refused(name: str, tmp_path: Path) -> None:
    change, message = HOSTILE[name]
    content = json.loads(train_bpe([WORDS], 300, PLAIN).backend_tokenizer.to_str())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.timeout(60)
def test_ten_million_merges_are_not_read(tmp_path: Path) -> None:
    text = json.dumps(json.loads(train_bpe([WORDS], 300, PLAIN).backend_tokenizer.to_str()))
    (tmp_path / "tokenizer.json").write_text(text.replace('"merges": [', '"merges": [' + '["a","b"],' * 10**7))
    with pytest.raises(Refused, match=r"tokenizer\.json has 100,.* bytes; wanted at most 67,108,864"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(Refused, match="is not JSON"):
        load_tokenizer(tmp_path)
