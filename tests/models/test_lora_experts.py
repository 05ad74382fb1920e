"""Adapters of experts: against each expert computed by itself, merged, and where they are not offered."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.errors import Refused
from eyeline.core.randomness import torch_rng_for
from eyeline.kernels.moe import grouped_linear
from eyeline.models.flops import Tally
from eyeline.models.lora import EXPERT_LEAVES, LoRA, LoRAExperts, adapters, merge
from tests.models import parity
from tests.models.cases.text import CASES
from tests.models.parity import close
from tests.planned import adapt, merged

CASE = next(case for case in CASES if case.id == "qwen3 of experts")
LORA = LoRA(rank=2, alpha=3, targets=("experts", "q_proj"))


def adapted(lora: LoRA = LORA):
    model = parity.randomised(CASE)
    adapt(model, CASE.spec, "language", lora, torch_rng_for(0, "lora"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(0.3 * torch.randn(p.shape, generator=torch_rng_for(1, name)))
    return model


def test_grouped_product_is_each_experts_own() -> None:
    """Values and gradients; the second expert has no row."""
    rng = torch.Generator().manual_seed(0)
    x_ND, weight_EFD = torch.randn(7, 4, generator=rng), torch.randn(3, 5, 4, generator=rng)
    ends = [3, 3, 7]
    outs, gradients = [], []
    for product in (lambda x, w: grouped_linear(x, w, torch.tensor(ends, dtype=torch.int32)), plain(ends)):
        x, w = x_ND.clone().requires_grad_(), weight_EFD.clone().requires_grad_()
        outs.append(product(x, w))
        (outs[-1] ** 2).sum().backward()
        gradients.append((x.grad, w.grad))
    close(outs[0].detach(), outs[1].detach(), "product")
    for ours, theirs in zip(*gradients, strict=True):
        close(ours, theirs, "gradient")
    assert not gradients[0][1][1].any()


def plain(ends: list[int]):
    def product(x_ND: Tensor, weight_EFD: Tensor) -> Tensor:
        starts = [0, *ends[:-1]]
        return torch.cat([F.linear(x_ND[a:b], weight_EFD[e]) for e, (a, b) in enumerate(zip(starts, ends, strict=True))])

    return product


def test_adapted_experts_are_each_experts_own_product() -> None:
    """Values, and gradients of A, B and the input, by autograd through weights that are merged one expert after another."""
    layer = adapted().get_submodule("language.blocks.1.mlp.experts")
    assert isinstance(layer, LoRAExperts)
    layer.gate.requires_grad_(False)
    x_ND, ends = torch.randn(9, layer.gate.shape[2], generator=torch.Generator().manual_seed(2)), [2, 2, 5, 8, 9]
    ours, theirs = x_ND.clone().requires_grad_(), x_ND.clone().requires_grad_()
    got = layer(ours, torch.tensor(ends, dtype=torch.int32))
    names = [f"{leaf}_lora_{end}" for leaf in EXPERT_LEAVES for end in "AB"]
    own = {name: layer.get_parameter(name).detach().clone().requires_grad_() for name in names}
    want = torch.cat([expert(layer, own, e, theirs[a:b]) for e, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))])
    close(got.detach(), want.detach(), "output")
    (got**2).sum().backward()
    (want**2).sum().backward()
    close(ours.grad, theirs.grad, "gradient of the input")
    for name in names:
        close(layer.get_parameter(name).grad, own[name].grad, f"gradient of {name}")


def expert(layer: LoRAExperts, own: dict[str, Tensor], e: int, x_ND: Tensor) -> Tensor:
    gate, up, down = (layer.get_parameter(leaf)[e] + 1.5 * own[f"{leaf}_lora_B"][e] @ own[f"{leaf}_lora_A"][e] for leaf in EXPERT_LEAVES)
    return F.linear(F.silu(F.linear(x_ND, gate)) * F.linear(x_ND, up), down)


def test_merged_model_computes_the_same() -> None:
    model = adapted()
    texts = parity.batch_of(CASE.documents, None)
    want, plainly = parity.logits_of(model, texts), parity.logits_of(parity.randomised(CASE), texts)
    assert (want - plainly).abs().max() > 0.1
    apart = merged(model, CASE.config)
    close(parity.logits_of(apart, texts), want, "logits")
    assert not adapters(apart)
    layer = model.get_submodule("language.blocks.0.mlp.experts")
    one = merge(layer.up[2], layer.up_lora_A[2], layer.up_lora_B[2], 1.5)
    close(apart.get_submodule("language.blocks.0.mlp.experts").up[2].detach(), one.detach(), "one expert")


def test_fresh_adapters_of_experts_change_nothing() -> None:
    model, texts = parity.randomised(CASE), parity.batch_of(CASE.documents, None)
    want = parity.logits_of(model, texts)
    adapt(model, CASE.spec, "language", LORA, torch_rng_for(0, "lora"))
    close(parity.logits_of(model, texts), want, "logits", tolerance=1e-6)
    layer = model.get_submodule("language.blocks.0.mlp.experts")
    assert layer.gate_lora_A.shape == (5, 2, CASE.config.language.hidden_size)
    assert layer.gate_lora_A.abs().max() <= CASE.config.language.hidden_size**-0.5
    assert len({float(x.sum()) for x in layer.gate_lora_A}) == 5, "each expert has its own"


def test_all_linear_leaves_experts_alone_and_others_are_refused() -> None:
    everywhere = adapted(LoRA(rank=2, alpha=3, targets="all-linear"))
    assert not any(isinstance(layer, LoRAExperts) for layer in everywhere.modules())
    for change, why in (
        ({"dora": True}, "dora: an adapter of experts is plain LoRA"),
        ({"dropout": 0.1}, "dropout: an adapter of experts"),
    ):
        with pytest.raises(Refused, match=why):
            adapted(LORA.model_copy(update=change))


def test_flops_of_adapters_are_counted() -> None:
    """Counted by hand: of a token's two experts three matrices, which are frozen, and their A and B, which train."""
    layer = adapted().get_submodule("language.blocks.0.mlp.experts")
    assert isinstance(layer, LoRAExperts)
    for leaf in EXPERT_LEAVES:
        layer.get_parameter(leaf).requires_grad_(False)
    _, hidden, width = layer.gate.shape
    tally = Tally()
    assert layer.count(tally, True, 2)
    frozen, adapter = 2 * 2 * 3 * width * hidden, 2 * 2 * 3 * 2 * (width + hidden)
    assert tally.forward == {("language", "token"): frozen + adapter}
    assert tally.backward == {("language", "token"): frozen + 2 * adapter}
