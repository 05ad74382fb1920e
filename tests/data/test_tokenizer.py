"""Nothing is added to text, text never becomes a control token, and made tokenizers are the same each time."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eyeline.core.errors import BadSample, Refused
from eyeline.data.templates import TEMPLATES
from eyeline.data.tokenizer import Encoder, add_tokens, load_tokenizer, train_bpe
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


def test_a_tokenizer_whose_own_pieces_are_control_strings_rejects_the_sample() -> None:
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
