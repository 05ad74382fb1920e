"""Tokenizers and images that the tests of data share. Small, made here, no downloads."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast

from eyeline.core.image_rule import ImageRule, Square
from eyeline.data.files import stores
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder, train_bpe
from tests.data.store import KEY, SECRET, Store, front, moto

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


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture
def store(server: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Store]:
    """An empty bucket, and an environment that leads to it."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    with front(server, f"bucket{abs(hash(request.node.nodeid)):x}"[:60]) as made:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        stores._process.cache_clear()
        yield made
        stores._process.cache_clear()
