"""Published sizes: as many parameters as transformers' class makes of the config.json that we write, and as the model cards say."""

import pytest
import torch
import transformers
from torch import nn

from eyeline.models import family_of, siglip2
from eyeline.models.forms import MediaTokens
from eyeline.models.languages import LANGUAGES as MODULES
from eyeline.models.sizes import LANGUAGES, MODELS, TOWERS

TOKENS = MediaTokens(image=9, written="<image>", video=8, start=7, end=6)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def theirs(config: dict) -> int:
    with torch.device("meta"):
        record = transformers.AutoConfig.for_model(**config)
        return count(getattr(transformers, config["architectures"][0])(record))


@pytest.mark.parametrize("name", TOWERS)
def test_towers(name):
    with torch.device("meta"):
        assert count(siglip2.Model(TOWERS[name])) == theirs(siglip2.to_hf(TOWERS[name]))


@pytest.mark.parametrize("name", LANGUAGES)
def test_languages(name):
    c = LANGUAGES[name]
    with torch.device("meta"):
        assert count(MODULES[c.family].Model(c, torch.float32)) == theirs(MODULES[c.family].to_hf(c))


@pytest.mark.parametrize("name", [name for name, c in MODELS.items() if c.family != "llava"])
def test_models(name):
    c, family = MODELS[name], family_of(MODELS[name])
    with torch.device("meta"):
        assert count(family.Model(c, torch.float32)) == theirs(dict(family.to_hf(c, family.form(c), TOKENS)["config.json"]))


BILLIONS = {  # as the model cards round them
    "Qwen/Qwen2.5-0.5B": "0.49",
    "Qwen/Qwen2.5-1.5B": "1.54",
    "Qwen/Qwen2.5-3B": "3.09",
    "Qwen/Qwen3-0.6B": "0.6",
    "Qwen/Qwen3-1.7B": "1.7",
    "Qwen/Qwen3-4B": "4.0",
    "Qwen/Qwen3-8B": "8.2",
    "Qwen/Qwen3-14B": "14.8",
    "Qwen/Qwen3-32B": "32.8",
    "Qwen/Qwen3-30B-A3B": "30.5",
    "Qwen/Qwen3-235B-A22B": "235",
    "HuggingFaceTB/SmolLM2-135M": "0.135",
    "HuggingFaceTB/SmolLM2-360M": "0.36",
    "HuggingFaceTB/SmolLM2-1.7B": "1.7",
    "Qwen/Qwen3-VL-2B-Instruct": "2",
    "Qwen/Qwen3-VL-4B-Instruct": "4",
    "Qwen/Qwen3-VL-8B-Instruct": "9",
    "Qwen/Qwen3-VL-32B-Instruct": "33",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "31",
    "Qwen/Qwen3-VL-235B-A22B-Instruct": "236",
    "Qwen/Qwen3.5-27B": "27",
    "Qwen/Qwen3.5-35B-A3B": "35",
    "Qwen/Qwen3.5-397B-A17B": "397",
    "lusxvr/nanoVLM-460M-8k": "0.46",
}


@pytest.mark.parametrize("name", BILLIONS)
def test_model_cards(name):
    c = {**LANGUAGES, **MODELS}[name]
    module = MODULES[c.family] if name in LANGUAGES else family_of(c)
    with torch.device("meta"):
        billions = count(module.Model(c, torch.float32)) / 1e9
    digits = len(BILLIONS[name].partition(".")[2])
    assert f"{billions:.{digits}f}" == BILLIONS[name]
