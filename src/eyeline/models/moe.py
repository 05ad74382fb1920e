"""Mixture of experts (MoE): a feed-forward layer of many experts, of which each token uses a few (Shazeer et al. 2017; Qwen3, Qwen3.5).

    probability_TE = softmax(router(x))          in float32
    y = Σ_a weight_a · expert_a(x)               over the A likeliest; a shared expert, which every token uses, may be added

Left alone, a router may come to use few experts. `Balance` says what is done about that:

- `aux`: an auxiliary loss, E · Σ_e (share of choices that were e) · (mean probability of e), over all layers together, as transformers
  computes it (Fedus et al. 2021). It is A where all is even. Defined for one pack of documents, padding excluded, and weighted by the
  pack's labels: a step's loss is Σ over its packs of (cross-entropy + coef · labels · balance loss), divided once by all labels.
- `bias`: auxiliary-loss-free; a bias of each expert is added for the choice alone and moved after each step, by `rate`, up for experts that
  had fewer tokens than the mean and down for those that had more (Wang et al. 2024). No class of transformers has such a bias.
- `forced`: experts round-robin, whatever the token. For benchmarks only: such a model learns nothing that it can use.

Dims: T tokens  D width  E experts  A experts per token  F feed-forward of one  N = T·A rows, sorted by expert
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from eyeline.core.plan import EXPERTS, Traits
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.kernels import float32
from eyeline.kernels.moe import by_expert, choose, grouped_swiglu, permute, round_robin, unpermute, weights_of
from eyeline.models.flops import Tally
from eyeline.models.layers import MLP, Linear, ReplaceableModule


class Experts(Settings):
    num_experts: Positive
    experts_per_token: Positive  # of them, used per token
    intermediate_size: Positive  # hidden width of one expert
    norm_topk_prob: bool = True  # the weights of a token's experts add up to 1

    @model_validator(mode="after")
    def _fits(self) -> "Experts":
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"a token cannot use experts_per_token={self.experts_per_token} of num_experts={self.num_experts} experts")
        return self


class Aux(Settings):
    """Balance by an auxiliary loss."""

    balance: Literal["aux"] = "aux"
    coef: PositiveFloat = 0.001  # of the auxiliary loss, which is in nats per supervised token


class Bias(Settings):
    """Balance without an auxiliary loss, by a bias per expert."""

    balance: Literal["bias"] = "bias"
    rate: PositiveFloat = 0.001  # what a bias moves per step, in probability


class Forced(Settings):
    """Experts round-robin: for benchmarks only."""

    balance: Literal["forced"] = "forced"


Balance = Annotated[Aux | Bias | Forced, Field(discriminator="balance")]


class Routed(NamedTuple):
    """The routing of the non-padding tokens of a batch in one layer."""

    load_E: Tensor  # int64: tokens that each expert got
    mass_E: Tensor  # float32: sum of the tokens' probabilities


class Load(NamedTuple):
    """The expert load of a batch, for all MoE layers in order; padding is not counted."""

    tokens_NE: Tensor  # int64: tokens that each expert of each layer got
    mass_NE: Tensor  # float32: sum of the tokens' probabilities


def load_of(routed: Sequence[Routed]) -> Load:
    return Load(torch.stack([one.load_E for one in routed]), torch.stack([one.mass_E for one in routed]))


class Router(nn.Module):
    """Choose the experts of each token. In float32: a rounded logit would change the choice."""

    bias_E: Tensor | None  # only where experts are balanced by it

    def __init__(self, c: Experts, width: int):
        super().__init__()
        self.experts_per_token, self.norm_topk_prob, self.forced = c.experts_per_token, c.norm_topk_prob, False
        self.weight = nn.Parameter(torch.empty(c.num_experts, width))
        self.register_buffer("bias_E", None)

    def traits(self) -> dict[str, Traits]:
        return {"weight": Traits(exact=True), "bias_E": Traits(exact=True, decays=False, role="buffer")}

    def forward(self, x_TD: Tensor, real_T: Tensor) -> tuple[Tensor, Tensor, Routed]:
        """chosen_TA, weight_TA in x's dtype, and where the non-padding tokens went."""
        probability_TE = float32.linear(x_TD, self.weight).softmax(-1)
        if self.forced:
            chosen_TA = round_robin(len(x_TD), len(self.weight), self.experts_per_token, x_TD.device)
            weight_TA = weights_of(probability_TE, chosen_TA, self.norm_topk_prob)
        else:
            chosen_TA, weight_TA = choose(probability_TE, self.experts_per_token, self.norm_topk_prob, self.bias_E)
        load_E = torch.zeros(len(self.weight), dtype=torch.int64, device=x_TD.device)
        load_E = load_E.scatter_add(0, chosen_TA.flatten(), real_T.long().repeat_interleave(self.experts_per_token))
        return chosen_TA, weight_TA.to(x_TD.dtype), Routed(load_E, (probability_TE * real_T[:, None]).sum(0))

    def count(self, tally: Tally, reached: bool) -> bool:
        experts, width = self.weight.shape
        return tally.product("token", width, experts, reached, self.weight.requires_grad)


class ExpertWeights(nn.Module):
    """All experts of a layer, stacked: each is a gated feed-forward layer."""

    def __init__(self, c: Experts, width: int):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(c.num_experts, c.intermediate_size, width)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(c.num_experts, width, c.intermediate_size))

    def traits(self) -> dict[str, Traits]:
        return dict.fromkeys(self._parameters, Traits(EXPERTS))

    def forward(self, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        """Rows sorted by expert; expert e's end before ends_E[e]."""
        gate_EFD, up_EFD, down_EDF = (weight.to(x_ND.dtype) for weight in (self.gate, self.up, self.down))
        return grouped_swiglu(x_ND, gate_EFD, up_EFD, down_EDF, ends_E)

    def count(self, tally: Tally, reached: bool, active: int) -> bool:
        _, width, hidden = self.down.shape
        gate, up = (tally.product("token", width, hidden, reached, x.requires_grad, active) for x in (self.gate, self.up))
        return tally.product("token", hidden, width, gate or up, self.down.requires_grad, active)


class Dispatch(ReplaceableModule):
    """Every token to its experts and back."""

    kind = "dispatch"

    def forward(self, x_TD: Tensor, chosen_TA: Tensor, weight_TA: Tensor, experts: ExpertWeights) -> Tensor:
        order_N, inverse_N, ends_E = by_expert(chosen_TA, len(experts.gate))
        y_ND = experts(permute(x_TD, order_N, inverse_N), ends_E)
        return unpermute(y_ND, weight_TA, order_N, inverse_N)


class Agree(ReplaceableModule):
    """The load of the rows that are here -> the load of the whole pack, where its rows are shared out over ranks."""

    kind = "agree"

    def forward(self, load: Load) -> Load:
        return load


class MoE(nn.Module):
    """`shared`: hidden width of the shared expert, which is weighted by the sigmoid of a gate of its own; None: there is none."""

    def __init__(self, c: Experts, width: int, shared: int | None = None):
        super().__init__()
        self.router, self.experts, self.dispatch = Router(c, width), ExpertWeights(c, width), Dispatch()
        self.shared = None if shared is None else MLP(width, shared, prefix="shared_")
        self.shared_gate = None if shared is None else Linear(width, 1, bias=False)

    def forward(self, x_TD: Tensor, real_T: Tensor, draws_T2: Tensor | None = None) -> tuple[Tensor, Routed]:
        chosen_TA, weight_TA, routed = self.router(x_TD, real_T)
        y_TD, gate_T1 = self.apart(x_TD, chosen_TA, weight_TA)
        return self.joined(x_TD, y_TD, gate_T1, draws_T2), routed

    def apart(self, x_TD: Tensor, chosen_TA: Tensor, weight_TA: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the chosen experts give, and the gate of the shared one: their weights may be sharded over other ranks than the rest."""
        y_TD = self.dispatch(x_TD, chosen_TA, weight_TA, self.experts)
        return y_TD, None if self.shared_gate is None else self.shared_gate(x_TD)

    def joined(self, x_TD: Tensor, y_TD: Tensor, gate_T1: Tensor | None, draws_T2: Tensor | None) -> Tensor:
        """`y_TD`, with what the shared expert adds."""
        if self.shared is None or gate_T1 is None:
            return y_TD
        return y_TD + gate_T1.sigmoid() * self.shared(x_TD, draws_T2)

    def count(self, tally: Tally, reached: bool) -> bool:
        routes = self.router.count(tally, reached)
        out = self.experts.count(tally, reached, self.router.experts_per_token) or routes
        if self.shared is not None and self.shared_gate is not None:
            out |= self.shared_gate.count(tally, reached, "token")
            out |= self.shared.count(tally, reached)
        tally.all_kept()  # each expert's weight keeps what the expert gave
        return out


# ---- balance


def set_balance(model: nn.Module, by: Balance | None) -> None:
    """Say how routers choose while training. Biases of an earlier stage stay unless an auxiliary loss takes their place."""
    for router in routers(model):
        router.forced = isinstance(by, Forced)
        if isinstance(by, Aux):
            router.bias_E = None
    if isinstance(by, Bias):
        add_biases(model)


def balance_loss(load: Load, sum_of_pack: Callable[[Tensor], Tensor]) -> Tensor:
    """The auxiliary loss, E · Σ_e f_e · p_e of all layers together: f_e the choices of e per token and layer, p_e its mean probability.

    Of a pack whose rows several ranks share, `sum_of_pack` sums over them what is not differentiated. The loss is linear in the rest,
    the probabilities of a rank's own rows, so each rank gets its share of the pack's loss."""
    load_E = sum_of_pack(load.tokens_NE).sum(0).float()
    mass_E = load.mass_NE.sum(0)
    tokens = sum_of_pack(mass_E.detach().sum()).round().clamp_min(1)  # times layers: the probabilities of each add up to 1
    return len(load_E) * (load_E / tokens * (mass_E / tokens)).sum()


def routers(model: nn.Module) -> list[Router]:
    """The routers of all layers, in order."""
    return [module for module in model.modules() if isinstance(module, Router)]


def add_biases(model: nn.Module) -> None:
    """Give every router its bias, zero, unless it has one."""
    for router in routers(model):
        if router.bias_E is None:
            router.bias_E = torch.zeros(len(router.weight), device=router.weight.device)


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    """The biases by name; none of a model that was never balanced by them."""
    return {name: x for name, x in model.named_buffers() if name.endswith("router.bias_E")}


@torch.no_grad()
def move_biases(model: nn.Module, load_NE: Tensor, rate: float) -> None:
    """A step towards balance: load_NE is what the experts of each of N layers got."""
    for router, load_E in zip(routers(model), load_NE.float(), strict=True):
        assert router.bias_E is not None, "add_biases comes first"
        router.bias_E += rate * (load_E.mean() - load_E).sign()
