"""How models are made: ties, initial weights, spec that fit them, configs that contradict themselves."""

import copy
import math

import pytest
import torch

from eyeline.core.plan import PARTS, materialise
from eyeline.core.randomness import torch_rng_for
from eyeline.data.fetch.batches import batch_of
from eyeline.models import llava, qwen2, siglip2
from eyeline.models.layers import LayerNorm, Linear, RMSNorm
from eyeline.models.shape import build, shape
from tests.models import parity
from tests.models.cases import each_case
from tests.models.cases.llava import CONFIGS, SHUFFLING, VISION, language
from tests.planned import initialise

TIED = llava.Config(vision=VISION, language=language(tie_embeddings=True))


def test_tied_head_is_the_embedding_however_the_model_is_made():
    """Storage, not the config, says whether it is tied: `to_empty` of a meta model makes two tensors of one (H1)."""
    for model in (llava.Model(TIED), build(TIED, "cpu"), copy.deepcopy(build(TIED, "cpu"))):
        assert model.language.head.weight is model.language.embed.weight
        with torch.no_grad():
            model.language.embed.weight.fill_(3.0)
        assert model.language.head.weight.untyped_storage().data_ptr() == model.language.embed.weight.untyped_storage().data_ptr()
        assert "language.head.weight" not in dict(model.named_parameters())
    untied = build(SHUFFLING, "cpu")
    assert untied.language.head.weight is not untied.language.embed.weight
    assert "language.head.weight" in dict(untied.named_parameters())


def test_built_model_has_no_tensor_left_on_meta():
    model = build(TIED, "cpu", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.bfloat16)}
    assert not list(model.buffers()), "a buffer would be cast and moved with the weights"


@each_case
def test_spec_fits_the_model(case):
    model, spec = build(case.config, "meta"), case.spec
    assert tuple(name for name, _ in model.named_children()) == spec.parts
    names = {name for name, _ in model.named_modules()}
    assert set(spec.unused) <= names
    assert spec.vocab_size == model.language.embed.num_embeddings
    assert spec.language.layers == len(model.language.blocks)
    assert spec.language.hidden_size == model.language.embed.embedding_dim
    if spec.vision is not None:
        assert spec.vision.layers == len(model.vision.blocks)
        assert spec.vision.hidden_size == model.vision.embed.out_features
    for image in (i for d in case.documents for i in d.images):
        assert image.patches_PC.shape[1] == 3 * spec.image.frames * spec.image.patch**2
        assert image.merge == spec.image.merge


# ---- initial weights


@each_case
def test_initial_loss_is_that_of_guessing(case):
    """Blocks start as the identity, so an untrained model knows nothing: ln(vocabulary) a label."""
    model = parity.built(case)
    initialise(model)
    batch = parity.batch_of(case.documents, None)
    assert model(batch).out.item() / len(batch.labels_L) == pytest.approx(math.log(case.spec.vocab_size), rel=0.02)


@each_case
def test_initial_weights_have_an_address_and_reach_every_tensor(case):
    models = [parity.built(case) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(torch.nan)
        initialise(model, seed)
    a, b, other = (m.state_dict() for m in models)
    assert all(x.isfinite().all() for x in a.values())
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["language.embed.weight"], other["language.embed.weight"])


@each_case
def test_every_tensor_learns_within_three_steps(case):
    """The ends of the branches start at zero, so the language model's inside learns a step later than they do, and the
    tower's another: it is behind them."""
    model = parity.built(case)
    initialise(model)
    before = {n: p.clone() for n, p in model.named_parameters() if case.spec.uses(n)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = parity.batch_of(case.documents, None)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).out.backward()
        optimizer.step()
    assert [n for n, p in before.items() if torch.equal(p, model.get_parameter(n))] == []


def test_positions_start_as_half_the_sine_table():
    model = siglip2.Model(VISION)
    model.initialise(torch_rng_for(0, "weights"))
    table = model.positions.weight.detach().unflatten(0, (4, 4))
    row, column, quarter = 2, 3, 4  # width 16
    omega = 10_000.0 ** -(torch.arange(quarter) / 3)
    want = 0.5 * torch.cat([(column * omega).sin(), (column * omega).cos(), (row * omega).sin(), (row * omega).cos()])
    torch.testing.assert_close(table[row, column], want)


def test_normalisation_by_hand():
    """Red 255, green 0, blue 51 under mean (.4 .5 .6) and std (.3 .4 .5): 2, -1.25, -0.8."""
    patch = torch.tensor([[255] * 9 + [0] * 9 + [51] * 9], dtype=torch.uint8)
    got = siglip2.normalised(patch, VISION.mean, VISION.std)
    torch.testing.assert_close(got, torch.tensor([[2.0] * 9 + [-1.25] * 9 + [-0.8] * 9]))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_round_once(kind):
    """The result in bfloat16 is that of float32, weights included, rounded at the end."""
    norm = kind(16, 1e-3)
    parity.randomise(norm)
    x_TD = (3 * torch.randn(200, 16, generator=torch.Generator().manual_seed(0))).bfloat16()
    got = norm(x_TD)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, norm(x_TD.float()).bfloat16())


def test_rms_norm_by_hand():
    norm = RMSNorm(4, 9.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    torch.testing.assert_close(norm(torch.tensor([[4.0, -4.0, 4.0, 4.0]])), torch.tensor([[0.8, -1.6, 2.4, 3.2]]))  # 4 / √(16 + 9)


# ---- configs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"projector": {"shuffle": 3}}, r"shuffle=3 must divide the 4×4 patches .*valid: \[1, 2, 4\]"),
        ({"projector": {"kind": "linear", "hidden_size": 8}}, "projector.hidden_size is the hidden width of an mlp"),
        ({"feature_layer": -2}, "set feature_norm: false"),
        ({"feature_layer": 4, "feature_norm": False}, "not among the 4 hidden states of 3 layers"),
        ({"feature_layer": -5, "feature_norm": False}, "not among the 4 hidden states of 3 layers"),
        ({"vision": {"heads": 3}}, "heads=3 must divide hidden_size=16"),
        ({"vision": {"patch": 14}}, "patch=14 is larger than image_size=13"),
        ({"vision": {"std": (0.5, 0.0, 0.5)}}, "greater than 0"),
        ({"language": {"heads": 5}}, "heads=5 must divide hidden_size=24, or head_dim"),
        ({"language": {"kv_heads": 3}}, "kv_heads=3 must divide heads=4"),
        ({"language": {"head_dim": 5}}, "head_dim=5 must be even"),
        ({"language": {"hidden": 5}}, "Extra inputs are not permitted"),
    ],
)
def test_contradictions_are_refused(wrong, message):
    raw = TIED.model_dump()
    for key, value in wrong.items():
        raw[key] = raw[key] | value if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=message):
        llava.Config(**raw)


def test_config_survives_json():
    for c in CONFIGS.values():
        assert llava.Config.model_validate_json(c.model_dump_json()) == c


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_projector_kinds(kind):
    """Linear: one matrix on r² joined patches. MLP: two, of its own hidden width, with an exact GELU."""
    projector = llava.ProjectorConfig(kind=kind, hidden_size=10 if kind == "mlp" else None, shuffle=2)
    p = llava.Projector(llava.Config(vision=VISION, projector=projector, language=language(tie_embeddings=True)))
    p.initialise(torch_rng_for(0, "weights"))
    x_PD = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    joined = torch.stack([x_PD[:4].flatten(), x_PD[4:].flatten()])
    if kind == "linear":
        want = joined @ p.out.weight.T
    else:
        hidden = joined @ p.up.weight.T
        assert hidden.shape == (2, 10)
        want = (hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))) @ p.down.weight.T
    torch.testing.assert_close(p(x_PD), want, atol=1e-5, rtol=1e-5)


def test_head_width_is_free_of_the_width():
    c = language(tie_embeddings=True, head_dim=8)
    assert (c.K, language(tie_embeddings=True).K) == (8, 6)
    assert qwen2.Model(c).blocks[0].attn.q.weight.shape == (32, 24)


@each_case
@torch.no_grad()
def test_weights_cast_once_give_the_same_bits(case):
    """What is cast to bfloat16 at every use may be so from the beginning; what computes in float32 (routers, positions) may not."""
    at_use = parity.built(case, torch.bfloat16)
    parity.randomise(at_use)
    plan = shape(case.config, trains={}, compute_dtype=torch.bfloat16, narrow=PARTS)
    materialise(plan, "cpu")
    once = plan.model
    for name, p in once.named_parameters():
        p.copy_(at_use.get_parameter(name))
    held = dict(once.named_parameters())
    for name, module in once.named_modules():
        if isinstance(module, Linear):
            assert module.weight.dtype == torch.bfloat16, name
    single = {name for name, p in held.items() if p.dtype == torch.float32}
    assert all(held[name].ndim == 1 or "router" in name or "positions" in name or "conv" in name for name in single)
    assert {name for name, p in held.items() if p.ndim == 1} <= single, "few numbers, which stay exact"
    assert {"language.embed.weight", "language.blocks.0.norm1.weight"} - single == {"language.embed.weight"}
    for documents in (case.documents, case.texts):
        batch = batch_of(documents, None, next_tokens=True)
        want = at_use.eval()(batch).out
        assert want.isfinite().all()
        assert torch.equal(once.eval()(batch).out, want)
