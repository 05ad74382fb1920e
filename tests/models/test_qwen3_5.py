"""Qwen3.5's language model against transformers', one document at a time, every tensor random: what packing, caches and fused
tensors could break. The suite of cases goes over the rest."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from eyeline.checkpoint.tensors import write_file
from eyeline.core.batch import IGNORE, Batch, Document
from eyeline.core.errors import Refused
from eyeline.core.key_rules import KeyRule
from eyeline.core.randomness import torch_rng_for
from eyeline.data.fetch.batches import batch_of
from eyeline.kernels.gated_delta import gated_delta_rule_plain
from eyeline.models import hf, qwen3_5
from eyeline.models.decoder import Decoder
from eyeline.models.layers import EVERY_BLOCK
from eyeline.models.moe import Experts
from tests.fla_stand_in import install, kernel
from tests.models import parity
from tests.models.parity import all_close, close, document, token_inputs
from tests.weights import load_into

SIZES = {
    "vocab_size": parity.VOCABULARY,
    "hidden_size": 24,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "mrope_section": (2, 1, 1),
    "delta": qwen3_5.Delta(key_heads=2, value_heads=6, key_dim=8, value_dim=6),
    "eps": 1e-3,
    "rope_theta": 100.0,
}
LINEAR, FULL = "linear_attention", "full_attention"
DENSE = qwen3_5.Config(**SIZES, layers=3, layer_types=(LINEAR, FULL, LINEAR), intermediate_size=40, tie_embeddings=True)
SPARSE = qwen3_5.Config(
    **SIZES,
    layers=2,
    layer_types=(LINEAR, FULL),
    experts=Experts(num_experts=6, experts_per_token=2, intermediate_size=8),
    shared_expert_size=20,
    tie_embeddings=False,
)
each = pytest.mark.parametrize("c", [DENSE, SPARSE], ids=["dense", "of experts"])
DOCUMENTS = [document(f"{i}: {n} tokens", n) for i, n in enumerate((9, 1, 2, 3, 64, 9, 65, 17, 3, 130))]


def loss_of(model: Decoder, batch: Batch) -> Tensor:
    return model(model.enter(batch.tokens_T), batch).out


def filled(c: qwen3_5.Config, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = qwen3_5.Model(c, dtype)
    load_into(dict(model.named_parameters(remove_duplicate=False)), folder, hf.qwen3_5.keys(c), hf.qwen3_5.DROPPED)
    return model


def pair(c: qwen3_5.Config, folder: Path) -> tuple[PreTrainedModel, Decoder]:
    peer = parity.peer_of(hf.qwen3_5.to_hf(c))
    parity.randomise(peer)
    peer.save_pretrained(folder)
    return peer, filled(c, folder).eval()


def randomised(c: qwen3_5.Config) -> Decoder:
    model = qwen3_5.Model(c)
    parity.randomise(model)
    return model


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return parity.gradients(model)


# ---- packing


@each
def test_packed_equals_the_reference_one_by_one(c, tmp_path):
    peer, ours = pair(c, tmp_path / "peer")
    losses = []
    for d in DOCUMENTS:
        logits_TV, labels_T = peer(**token_inputs(d)).logits[0], torch.from_numpy(d.labels_T).long()
        losses.append(F.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=IGNORE))
    want = torch.stack(losses).sum()
    got = loss_of(ours, batch_of(DOCUMENTS, None))
    close(got.detach(), want.detach(), "loss")
    mine = gradients(ours, got)
    want.backward()
    with torch.no_grad():
        for p in peer.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    peer.save_pretrained(tmp_path / "gradients")
    all_close(mine, {n: p.detach() for n, p in filled(c, tmp_path / "gradients").named_parameters()}, 5e-5)


def by_loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cu: Tensor, fla: bool) -> Tensor:
    assert not fla
    return gated_delta_rule_plain(q, k, v, decay, beta, cu)[0]


@pytest.mark.parametrize("path", ["loop", "chunks"])
def test_packed_equals_one_by_one(path, monkeypatch):
    if path == "loop":
        monkeypatch.setattr(qwen3_5, "gated_delta_rule", by_loop)
    model = randomised(DENSE)
    alone = torch.stack([loss_of(model, batch_of([d], None)) for d in DOCUMENTS]).sum()
    want = gradients(model, alone)
    packed = loss_of(model, batch_of(DOCUMENTS, None))
    close(packed.detach(), alone.detach(), "loss")
    all_close(gradients(model, packed), want, 5e-5)


@pytest.mark.parametrize("leak", ["causal_conv", "gated_delta_rule"])
def test_a_leak_would_show(leak, monkeypatch):
    """Either kernel alone, told that all documents are one: far from what the tests above let pass."""
    model, batch = randomised(DENSE), batch_of(DOCUMENTS, None)
    with torch.no_grad():
        want = loss_of(model, batch)
        sound = getattr(qwen3_5, leak)
        bounds = batch.cu_S1

        def leaking(*given: object) -> Tensor:
            return sound(*(x[[0, -1]] if isinstance(x, Tensor) and x.dtype == bounds.dtype and x.ndim == 1 else x for x in given))

        monkeypatch.setattr(qwen3_5, leak, leaking)
        assert abs(float(loss_of(model, batch) / want) - 1) > 1e-3


@each
def test_bfloat16_is_near_float32(c):
    """A few roundings of eight bits a layer: per cents of the largest logit."""
    model = randomised(c)
    batch = replace(batch_of(DOCUMENTS, None), labels_L=None)
    with torch.no_grad():
        want = loss_of(model, batch)
        model.compute_dtype = torch.bfloat16
        got = loss_of(model, batch)
    assert got.dtype == torch.float32
    error_L = (got - want).abs().amax(1) / want.abs().max()
    # a token near the border between two experts may go to the other one: few do
    assert error_L.quantile(0.9) < 0.05, error_L


# ---- generation


@each
def test_generating_equals_the_reference(c, tmp_path):
    """Prompts of 5, 1, 3 and 70 tokens continue for four, two, four and three tokens: logits of each step."""
    peer, ours = pair(c, tmp_path)
    prompts, steps = [document(f"prompt {n}", n) for n in (5, 1, 3, 70)], [4, 2, 4, 3]
    tokens, logits = [], []
    for d, n in zip(prompts, steps, strict=True):
        how = {"max_new_tokens": n, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        ids = token_inputs(d)["input_ids"]
        out = peer.generate(ids, attention_mask=torch.ones_like(ids), **how, eos_token_id=None, pad_token_id=0)
        tokens.append(out.sequences[0, -n:].tolist())
        logits.append(torch.cat(out.logits))
    with torch.no_grad():
        cache, rows = ours.new_cache(4, 80), [0, 1, 2, 3]
        batch = batch_of(prompts, None, next_tokens=True)
        for step in range(4):
            got = ours(ours.enter(batch.tokens_T), batch, cache).out
            close(got, torch.stack([logits[row][step] for row in rows]), f"logits of step {step}")
            going_on = [i for i, row in enumerate(rows) if steps[row] > step + 1][::-1]
            rows = [rows[i] for i in going_on]
            for layer in cache:
                layer.keep(going_on)
            batch = batch_of([next_token(tokens[row][step]) for row in rows], None, next_tokens=True) if rows else batch
            batch.positions_T3.copy_(torch.tensor(cache[-1].lengths)[:, None].expand(-1, 3) if rows else batch.positions_T3)
        assert all(layer.lengths == cache[-1].lengths for layer in cache)


def next_token(token: int) -> Document:
    return Document("", np.array([token], np.int32), np.array([IGNORE], np.int32), np.empty(0, np.int32), ())


# ---- tensors


@each
def test_reference_loads_what_our_rules_write(c, tmp_path):
    """Byte for byte what the peer wrote; heads of queries and gates, of q, k and v are in the same order."""
    _, ours = pair(c, tmp_path / "peer")
    theirs = load_file(tmp_path / "peer" / "model.safetensors")
    for name, want in written(ours, hf.qwen3_5.keys(c)).items():
        assert torch.equal(theirs[name], want), name


def written(model: nn.Module, rules: tuple[KeyRule, ...]) -> dict[str, Tensor]:
    """Written by rules for one tensor of theirs each, block by block; stacked experts have tests where they are written."""
    held, out = dict(model.named_parameters()), {}
    for rule in rules:
        for i in range(8):
            names = [name.replace("{i}", str(i)) for name in ((rule.ours,) if isinstance(rule.ours, str) else rule.ours)]
            if "{e}" not in rule.theirs and all(name in held for name in names):
                values = [held[name].detach() for name in names]
                out[rule.theirs.replace("{i}", str(i))] = rule.write(*values) if rule.write else values[0]
    return out


def test_second_token_predictor_is_dropped(tmp_path):
    """What the published checkpoints hold beyond the model."""
    _, ours = pair(DENSE, tmp_path / "peer")
    tensors = load_file(tmp_path / "peer" / "model.safetensors")
    names = ("fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.experts.3.down_proj.weight")
    (tmp_path / "with").mkdir()
    write_file(tmp_path / "with" / "model.safetensors", tensors | {f"mtp.{name}": torch.ones(2) for name in names})
    again = filled(DENSE, tmp_path / "with")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_initial_tensors_are_the_references():
    model = qwen3_5.Model(DENSE)
    model.initialise(torch_rng_for(0, "weights"))
    delta = model.blocks[0].delta
    assert 0.01 < delta.A_log.exp().min() < delta.A_log.exp().max() < 16 and len(delta.A_log.unique()) == 6
    assert (delta.dt_bias == 1).all() and (delta.norm.weight == 1).all()
    assert (model.norm.weight == 0).all() and (model.blocks[1].attn.q_norm.weight == 0).all(), "zero-centred"


# ---- settings


@each
def test_settings_come_back(c, tmp_path):
    """Through transformers' own writer too, which adds all its defaults."""
    assert hf.qwen3_5.from_hf(hf.qwen3_5.to_hf(c)) == c
    parity.peer_of(hf.qwen3_5.to_hf(c)).config.save_pretrained(tmp_path)
    assert hf.qwen3_5.from_hf(json.loads((tmp_path / "config.json").read_text())) == c


@pytest.mark.parametrize("type", hf.qwen3_5.MODEL_TYPES)
def test_absent_settings_are_those_of_transformers(type):
    record = transformers.AutoConfig.for_model(type)
    ours = hf.qwen3_5.to_hf(hf.qwen3_5.from_hf({"model_type": type}))
    theirs = record.to_dict()
    older = {
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "torch_dtype",
    }  # the names that transformers 4 reads; 5 has them in rope_parameters and dtype
    for key in ours.keys() - {"architectures", "rope_parameters"} - older:
        assert ours[key] == theirs[key], key
    assert ours["rope_theta"] == theirs["rope_parameters"]["rope_theta"]
    for key in ("rope_type", "rope_theta", "partial_rotary_factor"):
        assert ours["rope_parameters"][key] == theirs["rope_parameters"][key]


@pytest.mark.parametrize("type", hf.qwen3_5.MODEL_TYPES)
def test_default_size_is_that_of_transformers(type):
    """9 and 35 billion parameters, nowhere in memory."""
    record = transformers.AutoConfig.for_model(type)
    with torch.device("meta"):
        ours, theirs = qwen3_5.Model(hf.qwen3_5.from_hf({"model_type": type})), transformers.AutoModelForCausalLM.from_config(record)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert sizes[0] == sizes[1] > 8e9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen3_next"}, "model_type='qwen3_next'"),
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "each of 3 layers"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"linear_num_value_heads": 5}, "delta.key_heads=2 must divide delta.value_heads=5"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "factor": 2.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1]}}, "mrope_section"),
    ],
)
def test_what_we_do_not_compute_is_refused(change, said):
    with pytest.raises(Refused, match=said):
        hf.qwen3_5.from_hf(hf.qwen3_5.to_hf(DENSE) | change)


def test_dense_or_of_experts():
    with pytest.raises(ValueError, match="intermediate_size alone, or experts with shared_expert_size"):
        qwen3_5.Config(**SIZES, layers=2, tie_embeddings=True)
    with pytest.raises(ValueError, match="must add up to 4"):
        qwen3_5.Config(**(SIZES | {"mrope_section": (2, 2, 1)}), layers=2, intermediate_size=8, tie_embeddings=True)


def test_every_layer_gives_fla_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor itself, recomputed blocks included: fla waits for the GPU once for each that it has not seen."""
    model = qwen3_5.Model(DENSE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    calls: list[Tensor] = []
    install(monkeypatch, kernel(calls=calls))
    for module in model.modules():
        if isinstance(module, qwen3_5.Scan):
            module.fla = True
    model.recompute = EVERY_BLOCK
    batch = batch_of(DOCUMENTS[:4], None)
    loss_of(model, batch).backward()
    assert len(calls) == 4  # two layers, forward and again
    assert all(bounds is batch.cu_S1 for bounds in calls)
