"""Every chat template is found again by what it renders."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eyeline.bundle.bundle import recognised
from eyeline.data.templates import TEMPLATES
from tests.data.published import LLAMA3_2, PUBLISHED


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_is_recognised(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = TEMPLATES[name].jinja
    assert recognised(tokenizer, Path("here")) == name


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_template_of_a_published_checkpoint_is_recognised(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = PUBLISHED[name]
    assert recognised(tokenizer, Path("here")) == name


def test_a_template_that_writes_the_day_is_recognised_on_any_day() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = LLAMA3_2
    spoken = str(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False))
    assert "Today Date: " in spoken and "26 Jul 2024" not in spoken
    assert recognised(tokenizer, Path("here")) == "llama3.1"
