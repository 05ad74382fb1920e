"""LoRA against PEFT on the same weights; merging; where adapters go and where they do not."""

from dataclasses import replace

import peft
import pytest
import torch
from pydantic import ValidationError

from eyeline.checkpoint.tensors import renamed
from eyeline.core.errors import Refused
from eyeline.core.plan import part_of
from eyeline.core.randomness import seed_for, torch_rng_for
from eyeline.kernels.dropout import dropout_mask
from eyeline.models import hf, llava, lora
from eyeline.models.layers import EVERY_BLOCK, NEVER, Linear
from eyeline.models.lora import LoRA, LoRALinear, adapters
from eyeline.models.shape import build
from tests.models import parity
from tests.models.cases import each_case
from tests.models.cases.llava import CASES, EARLIER, language
from tests.models.parity import Case, close
from tests.planned import adapt, merged
from tests.weights import load_into

CASE = next(case for case in CASES if case.id == "shuffled untied")
C = CASE.config
SPEC = llava.spec(C)
DROPPING = LoRA(rank=2, alpha=2, dropout=0.3, targets="all-linear")


def built(c: llava.Config = C) -> llava.Model:
    model = build(c, "cpu")
    parity.randomise(model)
    return model


def wrapped(lora: LoRA, part="language", seed: int = 0, **kwargs) -> llava.Model:
    """With adapters that do something: B is random, not zero."""
    model = built(**kwargs)
    adapt(model, SPEC, part, lora, torch_rng_for(seed, "lora"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(0.3 * torch.randn(p.shape, generator=torch_rng_for(seed, name)))
    return model


def batch():
    return parity.batch_of(CASE.documents, None)


VARIANTS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "both": {"rslora": True, "dora": True}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_peft(tmp_path, variant):
    """The language model alone under PEFT with our A, B and lengths: logits, adapter gradients, and its own merge."""
    settings = VARIANTS[variant]
    config = language(tie_embeddings=False)
    reference = parity.peer_of(hf.qwen2.to_hf(config))
    parity.randomise(reference, seed=1)
    reference.save_pretrained(tmp_path)
    ours = built()
    load_into(dict(ours.language.named_parameters()), tmp_path, hf.qwen2.keys(config))
    targets = {"q": "q_proj", "v": "v_proj", "down": "down_proj"}
    adapt(ours, SPEC, "language", LoRA(rank=3, alpha=5, targets=tuple(targets.values()), **settings), torch_rng_for(0, "lora"))
    named = {f"use_{name}": value for name, value in settings.items()}
    theirs = peft.get_peft_model(reference, peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(targets.values()), **named))

    pairs = []
    for name in adapters(ours):
        path, _, leaf = name.removeprefix("language.").rpartition(".")
        path = path.replace("blocks", "layers").replace("attn", "self_attn")
        layer = theirs.get_submodule(f"base_model.model.model.{path}.{targets[leaf]}")
        mine = ours.get_submodule(name)
        pairs += [
            (name + ".lora_A", mine.lora_A, layer.lora_A["default"].weight),
            (name + ".lora_B", mine.lora_B, layer.lora_B["default"].weight),
        ]
        if "dora" in settings:
            theirs_O = layer.lora_magnitude_vector["default"].weight
            torch.testing.assert_close(mine.lora_magnitude, theirs_O, msg="lengths start as they are")
            pairs.append((name + ".lora_magnitude", mine.lora_magnitude, theirs_O))
    assert len(pairs) == (3 if "dora" in settings else 2) * len(targets) * config.layers
    with torch.no_grad():
        for name, mine, other in pairs:
            mine.copy_(torch.randn(mine.shape, generator=torch_rng_for(1, name)) * 0.4 + (1 if mine.ndim == 1 else 0))
            other.copy_(mine)

    texts = parity.batch_of(CASE.texts, None)
    want, want_logits = parity.reference(CASE, theirs, CASE.texts)
    got = ours(texts).out
    close(parity.logits_of(ours, texts), want_logits, "logits")
    want.backward()
    got.backward()
    for name, mine, other in pairs:
        close(mine.grad, other.grad, f"gradient of {name}")

    weights = dict(theirs.merge_and_unload().named_parameters())
    for name, p in renamed(merged(ours, C).language.named_parameters(), hf.qwen2.keys(config)):
        close(p, weights[name], name, tolerance=1e-6)


def test_fresh_adapters_change_nothing_and_start_as_stated():
    model, want = built(), parity.logits_of(built(), batch())
    adapt(model, SPEC, "language", LoRA(rank=4, alpha=8, targets="all-linear"), torch_rng_for(0, "lora"))
    assert torch.equal(parity.logits_of(model, batch()), want)
    layer = model.get_submodule("language.blocks.0.mlp.down")
    assert isinstance(layer, LoRALinear)
    assert layer.lora_A.shape == (4, C.language.intermediate_size)
    bound = C.language.intermediate_size**-0.5
    assert layer.lora_A.abs().max() <= bound
    assert layer.lora_A.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
    assert not layer.lora_B.any()


def test_same_address_same_adapters():
    lora = LoRA(rank=2, alpha=4, targets=("q_proj",))
    a, b, other = (wrapped(lora, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert any(not torch.equal(a[n], other[n]) for n in a)


@pytest.mark.parametrize("part", ["vision", "projector", "language"])
def test_all_linear_wraps_every_linear_layer_of_its_part(part):
    """q and v name layers of the tower and of the language model: a part's spec reach only its own (G1)."""
    model = built()
    linears = {n for n, m in model.named_modules() if isinstance(m, Linear) and part_of(n) == part}
    linears.discard("vision.embed")  # the patch embedding is a convolution to PEFT
    assert set(adapt(model, SPEC, part, LoRA(rank=2, alpha=2, targets="all-linear"), torch_rng_for(0, "lora"))) == linears
    assert set(adapters(model)) == linears
    assert linears


def test_only_adapters_get_gradients():
    """Frozen weights of the whole model: adapters in the tower learn through everything above them."""
    model = wrapped(LoRA(rank=2, alpha=2, targets=("q_proj", "v_proj")), part="vision")
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith(("lora_A", "lora_B")))
    model.vision.recompute = model.language.recompute = EVERY_BLOCK
    model(batch()).out.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert {n.split(".")[0] for n in gradients} == {"vision"}
    assert len(gradients) == 2 * 2 * C.vision.layers
    assert all(g.any() for g in gradients.values())


def test_unknown_target_is_refused_with_the_known_ones():
    known = r"Did you mean 'gate_proj'\? There are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or the word all-linear"
    with pytest.raises(Refused, match=r"LoRA targets of language: there is no linear layer 'gat_proj'\. " + known):
        adapt(built(), SPEC, "language", LoRA(rank=2, alpha=2, targets=("q_proj", "gat_proj")), torch_rng_for(0, "lora"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_model_gives_the_same_logits_and_has_no_adapters(variant):
    model = wrapped(LoRA(rank=3, alpha=7, targets="all-linear", **VARIANTS[variant]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_magnitude"):
                p.mul_(torch.linspace(0.6, 1.4, len(p)))
    names_before = {n for n, _ in built().named_parameters()}
    want = parity.logits_of(model, batch())
    assert (want - parity.logits_of(built(), batch())).abs().max() > 0.1
    plain = merged(model, C)
    close(parity.logits_of(plain, batch()), want, "logits")
    assert not adapters(plain)
    assert {n for n, _ in plain.named_parameters()} == names_before


def test_the_sum_of_a_merge_is_made_in_float32():
    """An update far below the weight's last bfloat16 bit survives, until the sum is stored."""
    layer = wrapped(LoRA(rank=2, alpha=2, targets=("q_proj",))).get_submodule("language.blocks.0.attn.q")
    weight_OI, a_rI, b_Or = (x.detach().bfloat16() for x in (layer.weight, layer.lora_A, layer.lora_B * 1e-4))
    want_OI = weight_OI.double() + layer.scale * b_Or.double() @ a_rI.double()
    got_OI = lora.merge(weight_OI, a_rI, b_Or, layer.scale)
    assert got_OI.dtype == torch.float32
    torch.testing.assert_close(got_OI.double(), want_OI, atol=1e-7, rtol=0)


def test_dropout_is_of_the_adapters_input_in_training_only():
    """W·x + α/r·B·A·dropout(x): the frozen weight sees all of x. In evaluation nothing is dropped."""
    layer = wrapped(LoRA(rank=2, alpha=6, dropout=0.4, targets=("q_proj",))).get_submodule("language.blocks.0.attn.q")
    x_TD = torch.randn(50, C.language.hidden_size, generator=torch.Generator().manual_seed(0))
    base_TD = x_TD @ layer.weight.T + layer.bias
    draws_T2 = draws(50)
    got = layer.train()(x_TD, draws_T2)
    mask_TD = dropout_mask(draws_T2, torch.tensor(seed_for(0, "language.blocks.0.attn.q")), C.language.hidden_size, 0.4)
    assert mask_TD.float().mean().item() == pytest.approx(0.4, abs=0.05)
    torch.testing.assert_close(got, base_TD + 3 * (x_TD * ~mask_TD / 0.6) @ layer.lora_A.T @ layer.lora_B.T)
    torch.testing.assert_close(layer.eval()(x_TD, draws_T2), base_TD + 3 * x_TD @ layer.lora_A.T @ layer.lora_B.T)


def test_dropout_with_dora_is_of_what_lengths_change_too():
    """W·x + (g - 1)·W·dropout(x) + g·s·B·A·dropout(x), as PEFT computes it, g being the length over that of the updated row."""
    layer = wrapped(LoRA(rank=2, alpha=6, dropout=0.4, dora=True, targets=("q_proj",))).get_submodule("language.blocks.0.attn.q")
    x_TD = torch.randn(50, C.language.hidden_size, generator=torch.Generator().manual_seed(0))
    draws_T2 = draws(50)
    with torch.no_grad():
        layer.lora_magnitude.mul_(torch.linspace(0.5, 2, len(layer.lora_magnitude)))
    mask_TD = dropout_mask(draws_T2, torch.tensor(seed_for(0, "language.blocks.0.attn.q")), C.language.hidden_size, 0.4)
    kept_TD, update_OI = x_TD * ~mask_TD / 0.6, 3 * layer.lora_B @ layer.lora_A
    gain_O = layer.lora_magnitude / (layer.weight + update_OI).norm(dim=1)
    want = x_TD @ layer.weight.T + layer.bias + (gain_O - 1) * (kept_TD @ layer.weight.T) + gain_O * (kept_TD @ update_OI.T)
    torch.testing.assert_close(layer.train()(x_TD, draws_T2), want)
    merged_OI = lora.merge(layer.weight, layer.lora_A, layer.lora_B, layer.scale, layer.lora_magnitude)
    torch.testing.assert_close(layer.eval()(x_TD, draws_T2), x_TD @ merged_OI.T + layer.bias)


def test_dora_on_rows_of_zeros_is_finite_and_trains():
    """As the layers are that end branches of a fresh model."""
    layer = wrapped(LoRA(rank=2, alpha=6, dora=True, targets=("q_proj",))).get_submodule("language.blocks.0.attn.q")
    with torch.no_grad():
        layer.weight.zero_()
    layer.initialise_adapter(torch_rng_for(0, "lora"))
    x_TD = torch.randn(5, C.language.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x_TD), layer.bias.expand(5, -1))
    with torch.no_grad():
        layer.lora_B.fill_(0.1)
    layer(x_TD).sum().backward()
    assert all(p.grad.isfinite().all() for p in (layer.lora_A, layer.lora_B, layer.lora_magnitude))
    assert layer.lora_magnitude.grad.any()
    assert lora.merge(layer.weight, layer.lora_A, layer.lora_B, layer.scale, layer.lora_magnitude).isfinite().all()


def test_frozen_layers_get_no_adapters():
    names = adapt(built(), SPEC, "language", LoRA(rank=2, alpha=2, targets=("q_proj",), freeze_layers=1), torch_rng_for(0, "lora"))
    assert names == [f"language.blocks.{i}.attn.q" for i in range(1, C.language.layers)]


def draws(rows: int) -> torch.Tensor:
    bits_T2 = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    return bits_T2 | torch.tensor([1, 0], dtype=torch.int32)


def test_layers_and_packs_drop_differently_and_rows_of_a_cut_alike():
    lora = LoRA(rank=C.language.hidden_size, alpha=1, dropout=0.5, targets=("q_proj", "k_proj"))
    model = wrapped(lora).train()
    layers = [model.get_submodule(f"language.blocks.{i}.attn.{name}") for i in range(2) for name in "qk"]
    batches = [replace(batch(), pack=pack).with_draws(0, step) for step, pack in ((0, 0), (0, 1), (1, 0))]
    ones_TD = torch.ones(len(batches[0].tokens_T), C.language.hidden_size)
    kept = set()
    with torch.no_grad():
        for layer in layers:  # it then gives what it keeps of its input
            layer.weight.zero_()
            layer.bias.zero_()
            layer.lora_A.copy_(torch.eye(C.language.hidden_size))
            layer.lora_B.copy_(torch.eye(C.language.hidden_size)[: len(layer.lora_B)])
            for one in batches:
                assert one.draws_T2 is not None
                out_TD = layer(ones_TD, one.draws_T2)
                assert torch.equal(layer(ones_TD[5:9], one.draws_T2[5:9]), out_TD[5:9])
                kept.add(out_TD[:, : layers[1].out_features].numpy().tobytes())
    assert len(kept) == len(layers) * len(batches)


@each_case
def test_every_adapter_is_given_draws_of_its_rows(case: Case):
    """In towers, projectors and every kind of layer; an adapter without them would fail."""
    model = parity.randomised(case)
    names = [name for part in case.spec.parts for name in adapt(model, case.spec, part, DROPPING, torch_rng_for(0, "lora"))]
    met = {}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: met.setdefault(name, args))
    one = parity.batch_of(case.documents, None).with_draws(0, 0)
    model.train()(one).out.backward()
    assert met.keys() == set(names)
    assert one.draws_T2 is not None and one.draws_P2 is not None
    for name, (x_RD, draws_R2) in met.items():
        assert len(draws_R2) == len(x_RD)
        of_tokens = part_of(name) == "language"
        rows_R2 = one.draws_T2 if of_tokens else one.draws_P2[:: len(one.draws_P2) // len(x_RD)]
        assert torch.equal(draws_R2, rows_R2), name


def test_compiled_blocks_with_adapters_of_other_names_are_one_graph():
    model = wrapped(LoRA(rank=2, alpha=2, dropout=0.5, targets="all-linear")).train()
    one = batch().with_draws(0, 0)
    want = model(one).out
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for block in model.language.blocks:
        block.compile(fullgraph=True, backend=backend)
    torch.testing.assert_close(model(one).out, want)
    assert len(model.language.blocks) > len(graphs) == 1


def test_recomputing_draws_the_same_dropout():
    """A checkpointed block with dropout computes its gradients with the mask of its forward pass."""
    gradients = []
    for recompute in (NEVER, EVERY_BLOCK):
        model = wrapped(LoRA(rank=2, alpha=2, dropout=0.5, targets=("q_proj", "v_proj"))).train()
        model.language.recompute = recompute
        model(batch().with_draws(0, 0)).out.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


def test_adapters_only_where_something_depends_on_them():
    names = adapt(built(EARLIER), llava.spec(EARLIER), "vision", LoRA(rank=2, alpha=2, targets=("q_proj",)), torch_rng_for(0, "lora"))
    assert names == ["vision.blocks.0.attn.q", "vision.blocks.1.attn.q"]


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0}, {"dropout": 1.0}, {"targets": ()}, {"targets": "everything"}, {"r": 4}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        LoRA(**({"rank": 2, "alpha": 4, "targets": ("q",)} | wrong))
