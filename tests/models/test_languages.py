"""Configs of Qwen3 and Llama: as the hub has them, there and back, defaults, and what is refused. Qwen2's are in test_hf_config.py."""

import json

import numpy as np
import pytest
import torch
import transformers

from eyeline.core.batch import IGNORE, Document
from eyeline.core.errors import Refused
from eyeline.data.fetch.batches import batch_of
from eyeline.models import hf, llama, qwen2, qwen3
from eyeline.models.hf.languages import language_from_hf
from eyeline.models.languages import LANGUAGES
from eyeline.models.moe import Experts
from tests.models.cases.text import CASES
from tests.models.parity import close, peer_of, randomise
from tests.weights import load_into

# config.json of the hub, what changes no mathematics left out; in the spelling of transformers 4, as they were published
COMMON = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
QWEN3_06B = COMMON | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "max_window_layers": 28, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "use_sliding_window": False,
}  # fmt: skip
QWEN3_30B_A3B = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 40960, "max_window_layers": 48, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False,
}  # fmt: skip
LLAMA_32_1B = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
}  # fmt: skip
SMOLLM2_135M = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
}  # fmt: skip
PUBLISHED = {
    "Qwen3-0.6B": (
        QWEN3_06B,
        qwen3.Config(vocab_size=151936, hidden_size=1024, layers=28, heads=16, kv_heads=8, intermediate_size=3072, tie_embeddings=True),
        596_049_920,
    ),
    "Qwen3-30B-A3B": (
        QWEN3_30B_A3B,
        qwen3.Config(
            vocab_size=151936, hidden_size=2048, layers=48, heads=32, kv_heads=4, intermediate_size=6144, tie_embeddings=False,
            experts=Experts(num_experts=128, experts_per_token=8, intermediate_size=768),
        ),
        30_532_122_624,
    ),
    "Llama-3.2-1B": (
        LLAMA_32_1B,
        llama.Config(
            vocab_size=128256, hidden_size=2048, layers=16, heads=32, kv_heads=8, intermediate_size=8192, eps=1e-5, rope_theta=5e5,
            rope_scaling=llama.RopeScaling(factor=32.0), max_positions=131072, tie_embeddings=True,
        ),
        1_235_814_400,
    ),
    "SmolLM2-135M": (
        SMOLLM2_135M,
        llama.Config(
            vocab_size=49152, hidden_size=576, layers=30, heads=9, kv_heads=3, intermediate_size=1536, eps=1e-5, rope_theta=1e5,
            max_positions=8192, tie_embeddings=True,
        ),
        134_515_008,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str):
    """As the hub describes them, of as many parameters as it states."""
    config_json, want, parameters = PUBLISHED[name]
    assert language_from_hf(config_json) == want
    with torch.device("meta"):
        model = LANGUAGES[want.family].Model(want)
    assert sum(p.numel() for p in model.parameters()) == parameters
    record = transformers.AutoConfig.for_model(**config_json)
    with torch.device("meta"):
        peer = getattr(transformers, config_json["architectures"][0])(record)
    assert sum(p.numel() for p in peer.parameters()) == parameters


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_there_and_back(case, tmp_path):
    """Through our own config.json, and through the one that transformers makes of it."""
    c = case.config.language
    assert language_from_hf(hf.languages.LANGUAGES[c.family].to_hf(c)) == c
    case.peer().config.save_pretrained(tmp_path)
    assert language_from_hf(json.loads((tmp_path / "config.json").read_text())) == c


SECTIONS = {"head_dim": 8, "mrope_section": (2, 1, 1)}
SHAPE = {"vocab_size": 53, "hidden_size": 24, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 40, "tie_embeddings": False}


@pytest.mark.parametrize("experts", [None, Experts(num_experts=5, experts_per_token=2, intermediate_size=8)])
def test_text_models_of_qwen3_vl_there_and_back(experts, tmp_path):
    c = qwen3.Config(**SHAPE, **SECTIONS, experts=experts)
    config_json = hf.qwen3.to_hf(c)
    assert config_json["model_type"] == ("qwen3_vl_text" if experts is None else "qwen3_vl_moe_text")
    transformers.AutoConfig.for_model(**config_json).save_pretrained(tmp_path)
    for stored in (config_json, json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}):
        assert hf.qwen3.from_hf(stored) == c


@pytest.mark.parametrize("type", [*hf.qwen3.MODEL_TYPES, *hf.llama.MODEL_TYPES])
def test_absent_keys_mean_the_reference_classes_defaults(type: str):
    record = transformers.AutoConfig.for_model(type)
    language = hf.qwen3 if type in hf.qwen3.MODEL_TYPES else hf.llama
    assert language.from_hf({"model_type": type}) == language.from_hf(record.to_dict() | {"model_type": type})


PAD = 7  # in every text below


def padded(c, pad: int | None) -> torch.nn.Module:
    """transformers' model of a config whose pad_token_id is this one."""
    files = hf.languages.LANGUAGES[c.family].to_hf(c) | {"pad_token_id": pad}
    peer = peer_of(files)
    randomise(peer)
    return peer


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_of_the_padding_token_has_its_gradient(tied, tmp_path):
    """A document that holds the token, as one of SmolLM2's does (its padding is `<|im_end|>`). transformers' embedding gives that row no
    gradient (padding_idx); without a padding token it gives the one that ours has, and that finite differences find."""
    c = llama.Config(**SHAPE | {"tie_embeddings": tied})
    ids = torch.tensor([3, PAD, 5, PAD, 9, 11, 2, PAD])
    found = {}
    for pad in (PAD, None):
        peer = padded(c, pad)
        peer(input_ids=ids[None], labels=ids[None]).loss.backward()
        found[pad] = peer.model.embed_tokens.weight.grad.clone()
    others = [row for row in range(c.vocab_size) if row != PAD]
    close(found[PAD][others], found[None][others], "other rows")
    assert (found[PAD][PAD] - found[None][PAD]).abs().max() > 1e-2
    assert tied or not found[PAD][PAD].any()

    peer.save_pretrained(tmp_path)
    model = llama.Model(c)
    load_into(dict(model.named_parameters(remove_duplicate=False)), tmp_path, hf.llama.keys(c), hf.llama.DROPPED)
    batch = batch_of([Document("d", ids.int().numpy(), np.array([*ids[1:], IGNORE], np.int32), np.empty(0, np.int32), (), None)], None)

    def loss() -> torch.Tensor:
        return model(model.enter(batch.tokens_T), batch).out / (len(ids) - 1)

    loss().backward()
    row = model.embed.weight.grad[PAD].clone()
    close(row, found[None][PAD], "the padding token's row")
    with torch.no_grad():
        differences = torch.zeros_like(row)
        for d in range(len(row)):
            values = []
            for step in (4e-3, -4e-3):
                model.embed.weight[PAD, d] += step
                values.append(loss())
                model.embed.weight[PAD, d] -= step
            differences[d] = (values[0] - values[1]) / 8e-3
    close(row, differences, "the row by differences", 2e-3)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config_json", "change", "message"),
    [
        (QWEN3_06B, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (QWEN3_06B, {"attention_bias": True}, "attention_bias=True"),
        (QWEN3_06B, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (QWEN3_06B, {"rope_scaling": YARN}, "rope_type='yarn'"),
        (QWEN3_06B, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, "use_sliding_window=True"),
        (QWEN3_30B_A3B, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 48}, "use_sliding_window=True"),
        (QWEN3_30B_A3B, {"mlp_only_layers": "all"}, "mlp_only_layers='all'"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 100}, "leave no layer"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "experts_per_token=129 of num_experts=128"),
        (QWEN3_30B_A3B, {"norm_topk_prob": "yes"}, "norm_topk_prob='yes'"),
        (LLAMA_32_1B, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'; Eyeline computes default and llama3"),
        (LLAMA_32_1B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (LLAMA_32_1B, {"rope_scaling": YARN}, "rope_type='yarn'"),
        (LLAMA_32_1B, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "have no low_freq_factor, high_freq_factor"),
        (LLAMA_32_1B, {"rope_scaling": {"type": "default", "attention_factor": 2.0}}, "have attention_factor"),
        (LLAMA_32_1B, {"attention_bias": True}, "attention_bias=True"),
        (LLAMA_32_1B, {"mlp_bias": True}, "mlp_bias=True"),
        (SMOLLM2_135M, {"num_attention_heads": 10}, "heads=10 must divide hidden_size=576"),
        (SMOLLM2_135M, {"model_type": "mistral"}, "model_type='mistral'; the language models that Eyeline has are qwen2"),
    ],
)
def test_refusals(config_json, change, message):
    with pytest.raises(Refused, match=message):
        language_from_hf(config_json | change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SHAPE | {"mrope_section": (1, 2, 3)}, "must add up to 64, half of head_dim=128"),
        (SHAPE | {"sparse_every": 2}, "experts is not given"),
        (SHAPE | {"experts": {"num_experts": 4, "experts_per_token": 5, "intermediate_size": 8}}, "experts_per_token=5 of num_experts=4"),
        (SHAPE | {"experts": {"num_experts": 4, "experts_per_token": 1, "intermediate_size": 8}, "dense_layers": (0, 1)}, "leave no layer"),
        (
            SHAPE | SECTIONS | {"experts": {"num_experts": 4, "experts_per_token": 1, "intermediate_size": 8, "norm_topk_prob": False}},
            "norm_topk_prob: true",
        ),
        (SHAPE | {"head_dim": 7}, "head_dim=7 must be even"),
        (SHAPE | {"kv_heads": 3}, "kv_heads=3 must divide heads=4"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        qwen3.Config(**settings)


def test_rope_scaling_with_equal_factors_is_refused():
    with pytest.raises(ValueError, match=r"rope_scaling\.low_freq_factor=4\.0 must be below rope_scaling\.high_freq_factor=4\.0"):
        llama.RopeScaling(factor=8.0, low_freq_factor=4.0)


def test_a_config_that_says_no_family_is_a_qwen2():
    """As recipes had it when there was no other."""
    from pydantic import TypeAdapter

    from eyeline.models.languages import LanguageConfig

    adapter = TypeAdapter(LanguageConfig)
    assert isinstance(adapter.validate_python(SHAPE), qwen2.Config)
    for case in CASES:
        assert adapter.validate_json(adapter.dump_json(case.config.language)) == case.config.language
