"""Balance of experts: the loss is transformers', biases move loads towards the mean, and what is counted is where tokens went."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from eyeline.core.batch import Batch, Budget
from eyeline.data.fetch.batches import batch_of
from eyeline.models.layers import EVERY_BLOCK, MLP
from eyeline.models.moe import Aux, Bias, Experts, Forced, Load, MoE, balance_loss, biases_of, move_biases, routers, set_balance
from eyeline.parallel.ranks import ONE_DEVICE
from tests.models import parity
from tests.models.cases.text import CASES
from tests.models.parity import Case, close

SPARSE = next(case for case in CASES if case.id == "qwen3 of experts")
EVERY_SPARSE = pytest.mark.parametrize("case", [case for case in CASES if case.spec.language.experts], ids=lambda case: case.id)


def padded(case: Case) -> Batch:
    return batch_of(case.documents, Budget(100, 0))


def logits_of_routers(model: nn.Module, batch: Batch) -> list[Tensor]:
    """For each layer, by hooks: what every token's router sees, times its weight."""
    seen: list[Tensor] = []
    hooks = [r.register_forward_pre_hook(lambda m, args: seen.append(F.linear(args[0], m.weight))) for r in routers(model)]
    model(batch)
    for hook in hooks:
        hook.remove()
    return seen


@EVERY_SPARSE
@pytest.mark.parametrize("recompute", [(), ("language",)])
def test_balance_loss_is_transformers(case: Case, recompute: tuple[str, ...]):
    """Value and gradients, over all layers together, without padding, and weighted by the pack's labels."""
    model, batch = parity.randomised(case), padded(case)
    experts = case.config.language.experts
    model.recompute(dict.fromkeys(recompute, EVERY_BLOCK))
    load = model(batch).load
    assert load is not None
    auxiliary = balance_loss(load, ONE_DEVICE.sum_of_pack)
    (0.3 * batch.counts.supervised * auxiliary).backward()
    ours = parity.gradients(model)

    model.zero_grad()
    model.recompute({})
    logits = tuple(logits_of_routers(model, batch))
    mask = (torch.arange(batch.counts.slots) < batch.counts.real)[None]
    want = load_balancing_loss_func(logits, experts.num_experts, experts.experts_per_token, mask)
    close(auxiliary.detach(), want.detach(), "balance loss")
    (0.3 * batch.counts.supervised * want).backward()
    theirs = parity.gradients(model)
    assert len(theirs) > 5
    parity.all_close({n: ours[n] for n in theirs}, theirs, tolerance=2e-4)


def test_balance_loss_of_even_routing():
    model = parity.randomised(SPARSE)
    with torch.no_grad():
        for router in routers(model):
            router.weight.zero_()  # all as likely: the mean of each is 1/E, whatever is chosen
    batch = batch_of(SPARSE.documents, None)
    load = model(batch).load
    assert load is not None
    close(balance_loss(load, ONE_DEVICE.sum_of_pack), torch.tensor(2.0), "loss")


@EVERY_SPARSE
def test_load_counts_real_tokens_of_each_layer(case: Case):
    model, batch = parity.randomised(case), padded(case)
    active = case.config.language.experts.experts_per_token
    want = []
    for logits_TE in logits_of_routers(model, batch):
        chosen = logits_TE[: batch.counts.real].topk(active).indices
        want.append(chosen.flatten().bincount(minlength=logits_TE.shape[1]))
    load = model(batch).load
    assert load is not None
    assert torch.equal(load.tokens_NE, torch.stack(want))


def test_a_dense_model_has_no_load():
    model = parity.randomised(CASES[0])
    assert model(batch_of(CASES[0].documents, None)).load is None


def test_biases_bring_loads_to_the_mean():
    """The router's own probabilities stay as they are; the busiest expert's share falls towards the mean."""
    model, batch = parity.randomised(SPARSE), batch_of(SPARSE.documents, None)
    set_balance(model, Bias(rate=0.01))
    history = []
    for _ in range(60):
        load = model(batch).load
        assert load is not None
        history.append(float((load.tokens_NE.amax(1) / load.tokens_NE.float().mean(1)).max()))
        before = {n: x.clone() for n, x in biases_of(model).items()}
        move_biases(model, load.tokens_NE, 0.01)
        for (name, x), tokens_E in zip(biases_of(model).items(), load.tokens_NE.float(), strict=True):
            moved = x - before[name]
            close(moved, 0.01 * torch.sign(tokens_E.mean() - tokens_E), name)
    assert history[0] > 1.5
    assert min(history[-5:]) < 1.2, history


def test_router_bias_changes_choices_and_aux_loss_replaces_it():
    model, batch = parity.randomised(SPARSE), batch_of(SPARSE.documents, None)
    plain = model(batch).out
    set_balance(model, Bias())
    assert torch.equal(model(batch).out, plain), "biases start at zero"
    with torch.no_grad():
        for bias in biases_of(model).values():
            bias[0] = 10
    biased = model(batch).out
    assert not torch.equal(biased, plain)
    set_balance(model, None)
    assert torch.equal(model(batch).out, biased), "a stage without balance keeps them"
    set_balance(model, Aux(coef=1e-30))
    assert not biases_of(model)
    close(model(batch).out, plain, "without them")


def test_forced_balance_is_even():
    model = parity.randomised(SPARSE)
    set_balance(model, Forced())
    batch = batch_of(SPARSE.documents, Budget(75, 0))
    loss, load, _ = model(batch)
    loss.backward()
    assert load is not None
    assert int(load.tokens_NE.max() - load.tokens_NE.min()) <= 1
    assert all(p.grad is not None for p in model.parameters()), "routers too: the weights are theirs"


def test_shared_expert_sees_every_token():
    """Computed by hand: the chosen experts' sum and the shared one's, weighted by its own gate."""
    c = Experts(num_experts=4, experts_per_token=2, intermediate_size=6)
    moe = MoE(c, 8, shared=10)
    parity.randomise(moe)
    x_TD, real_T = torch.randn(7, 8, generator=torch.Generator().manual_seed(0)), torch.ones(7, dtype=torch.bool)
    got, _ = moe(x_TD, real_T)
    alone = MoE(c, 8)
    alone.load_state_dict({n: x for n, x in moe.state_dict().items() if not n.startswith("shared")})
    shared, gate = moe.shared, moe.shared_gate
    assert isinstance(shared, MLP)
    assert gate is not None
    close(got, alone(x_TD, real_T)[0] + torch.sigmoid(x_TD @ gate.weight.T) * shared(x_TD), "sum")


def test_router_computes_in_float32():
    """A choice between logits that bfloat16 cannot tell apart."""
    moe = MoE(Experts(num_experts=2, experts_per_token=1, intermediate_size=6), 8)
    with torch.no_grad():
        moe.router.weight.fill_(1.0)
        moe.router.weight[1] += 2e-3
    chosen_TA, weight_TA, _ = moe.router(torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bool))
    assert chosen_TA.tolist() == [[1]]
    assert weight_TA.dtype == torch.bfloat16


def test_ranks_that_share_a_pack_add_up_to_its_auxiliary_loss():
    """Each has some of the rows: choices and tokens are the pack's, probabilities its own. The loss is linear in those."""
    generator = torch.Generator().manual_seed(0)
    probability_LTE = torch.randn(3, 11, 5, generator=generator).softmax(-1).requires_grad_()
    chosen_LTA = torch.randint(0, 5, (3, 11, 2), generator=generator)

    def load(rows: slice) -> Load:
        tokens_NE = torch.stack([chosen_TA[rows].flatten().bincount(minlength=5) for chosen_TA in chosen_LTA])
        return Load(tokens_NE, probability_LTE[:, rows].sum(1))

    whole = balance_loss(load(slice(None)), ONE_DEVICE.sum_of_pack)
    parts, shares = [load(slice(0, 4)), load(slice(4, None))], []
    for own in parts:
        sums = {5 * 3: sum(part.tokens_NE for part in parts), 1: sum(part.mass_NE.detach().sum() for part in parts)}
        shares.append(balance_loss(own, lambda x, sums=sums: sums[x.numel()]))
    close(shares[0] + shares[1], whole, "loss")
    [want] = torch.autograd.grad(whole, probability_LTE, retain_graph=True)
    [got] = torch.autograd.grad(shares[0] + shares[1], probability_LTE)
    close(got, want, "gradient")
