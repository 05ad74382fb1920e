"""Every case of a model, with every tensor random, and its export."""

import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyeline.bundle.bundle import Bundle
from eyeline.core.batch import Document
from eyeline.core.plan import PARTS, Part
from eyeline.data.fetch.batches import batch_of
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import load_tokenizer, save_tokenizer, train_bpe
from eyeline.models import Model, spec
from eyeline.models.hf import mapping_of
from eyeline.models.lora import LoRA
from eyeline.models.shape import build
from tests.models.cases import ALL
from tests.models.parity import IMAGE_TOKEN, Case, randomise
from tests.planned import adapt

ROWS = 320  # the cases' own vocabularies are too small for a tokenizer
VIDEO_TOKEN = IMAGE_TOKEN + 1


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """One whose tokens for media have the numbers that the cases' documents are written with."""
    made = train_bpe(["what is this, and what is that?"] * 3, 290, TEMPLATES["qwen2.5"])
    made.add_tokens(["<|video_pad|>"], special_tokens=True)
    content = json.loads(made.backend_tokenizer.to_str())
    ids, by_text = content["model"]["vocab"], {added["content"]: added for added in content["added_tokens"]}
    for token, number in (("<|image_pad|>", IMAGE_TOKEN), ("<|video_pad|>", VIDEO_TOKEN)):
        (there,) = (piece for piece, i in ids.items() if i == number)
        ids[there], by_text[token]["id"] = by_text[token]["id"], number
    ids |= {token: added["id"] for token, added in by_text.items()}
    swapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    swapped.chat_template = TEMPLATES["qwen2.5"].jinja
    assert swapped.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"]) == [IMAGE_TOKEN, VIDEO_TOKEN]
    with tempfile.TemporaryDirectory() as folder:  # one that was loaded is written with a few settings more
        save_tokenizer(swapped, Path(folder))
        return load_tokenizer(Path(folder))


WHOLE = [case for case in ALL if mapping_of(case.config).form(case.config).name != "parts"]
PARTED = [case for case in ALL if case not in WHOLE]


def bundle_of(case: Case) -> Bundle:
    language = case.config.language.model_copy(update={"vocab_size": ROWS})
    return Bundle(case.config.model_copy(update={"language": language}), tokenizer(), "qwen2.5")


def random_model(bundle: Bundle) -> Model:
    model = build(bundle.config, "cpu").eval()
    randomise(model)
    return model


@dataclass(frozen=True)
class Exported:
    bundle: Bundle
    model: Model
    folder: Path


@torch.no_grad()
def our_logits(model: Model, documents: tuple[Document, ...]) -> Tensor:
    return model(replace(batch_of(documents, None), labels_L=None)).out


def close(got: Tensor, want: Tensor, bound: float = 5e-5) -> None:
    error = float((got - want).abs().max() / want.abs().max())
    assert error < bound, f"off by {error:.1e} of the largest logit"


def adapted(bundle: Bundle, without: tuple[Part, ...] = ("projector",), language: tuple[str, ...] | None = None) -> Model:
    """With adapters that do something: of all linear layers, and with `language` of these targets of the language model."""
    model = random_model(bundle)
    stated = spec(bundle.config)
    for i, part in enumerate(part for part in PARTS if part in stated.parts and part not in without):
        targets = language if language is not None and part == "language" else "all-linear"
        adapt(model, stated, part, LoRA(rank=2 + i, alpha=3, targets=targets), torch.Generator().manual_seed(i))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    return model
