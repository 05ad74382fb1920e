"""Tokenizers and images that the tests of data share. Small, made here, no downloads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast

from eyeline.core.image_rule import ImageRule, Square
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder, train_bpe

WORDS = (
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant. system user assistant what is the colour of this shape? "
    "It is a red circle. Is there a blue triangle in the image? yes no 12 345 don't we'll <|not a control|> \n\n héllo wörld 你好 "
)


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """One for each template."""
    return {name: train_bpe([WORDS] * 3, 600, template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="session")
def qwen(tokenizers: dict[str, PreTrainedTokenizerFast]) -> Encoder:
    return Encoder(tokenizers["qwen2.5"], TEMPLATES["qwen2.5"])


@pytest.fixture(scope="session")
def plain(tokenizers: dict[str, PreTrainedTokenizerFast]) -> Encoder:
    return Encoder(tokenizers["plain"], TEMPLATES["plain"])


@pytest.fixture(scope="session")
def thinking(tokenizers: dict[str, PreTrainedTokenizerFast]) -> Encoder:
    return Encoder(tokenizers["qwen3-thinking"], TEMPLATES["qwen3-thinking"])


@pytest.fixture(scope="session")
def rule() -> ImageRule:
    """32 pixels, 4×4 patches, 2×2 of them a token: 4 tokens an image."""
    return ImageRule(8, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", Square(32))


@pytest.fixture
def draw(tmp_path: Path) -> Callable[..., Path]:
    """`draw("a.png", seed)` writes a small image of noise below the test's folder."""

    def write(name: str, seed: int = 0, width: int = 20, height: int = 12) -> Path:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Pillow.fromarray(pixels).save(path)
        return path

    return write
