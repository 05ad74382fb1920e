"""Every chat template is found again by what it renders."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eyeline.bundle.bundle import recognised
from eyeline.data.templates import TEMPLATES


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_is_recognised(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = TEMPLATES[name].jinja
    assert recognised(tokenizer, Path("here")) == name
