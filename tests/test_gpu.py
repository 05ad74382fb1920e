"""What only a GPU can show: `make test-gpu` runs these where there is one, and leaves a record in bench/results/gpu.json."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyeline.checkpoint import store
from eyeline.core.batch import Batch, Budget, Document, Grid, Image
from eyeline.core.files import read_lines, write_json
from eyeline.core.plan import PARTS, materialise
from eyeline.core.step import step_alone
from eyeline.data.fetch.batches import batch_of
from eyeline.data.fetch.full_batch import full_batch
from eyeline.kernels import fla, float32
from eyeline.kernels.attention import packed_attention
from eyeline.kernels.float8 import Scaling, float8_fault, float8_linear
from eyeline.kernels.float32 import linear as linear_in_float32
from eyeline.kernels.gated_delta import gated_delta_rule, gated_delta_rule_plain
from eyeline.kernels.gpu import float8_obstacle
from eyeline.kernels.moe import grouped_swiglu, grouped_swiglu_plain
from eyeline.kernels.one_kernel import compiler_obstacle
from eyeline.kernels.self_test import _batch, fla_fault
from eyeline.models import CONFIG
from eyeline.models.compiled import compile_blocks
from eyeline.models.kernel_paths import choose
from eyeline.models.layers import EVERY_BLOCK
from eyeline.models.lora import LoRA
from eyeline.models.shape import shape
from eyeline.parallel.copies import on_device
from eyeline.parallel.launch import machine
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train import loop
from eyeline.train.compile import made_up_batches
from eyeline.train.cuda_graph import GraphedUpdate, captures
from eyeline.train.environment import environment
from eyeline.train.fixed_batch import capacities_of
from eyeline.train.optim import AdamW, make_optimizers, set_learning_rates
from eyeline.train.step import update
from tests.bundle.tiny import save_language, save_vision
from tests.command import Command
from tests.kernels.passes import PASSES, given, results
from tests.llava_pretrain import TINY, write_llava_pretrain
from tests.models import parity
from tests.models.cases import each_case
from tests.models.parity import Case
from tests.train.ends import digest, stopped_at
from tests.train.recipe import tiny_run

SIZES = {"vocab_size": 512, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "tie_embeddings": True}
QWEN3 = {"family": "qwen3", **SIZES, "head_dim": 16, "intermediate_size": 96}
TOWER = {"image_size": 64, "patch": 8, "hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 128}
SPARSE = {"num_experts": 8, "experts_per_token": 2, "intermediate_size": 32}
DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16}
LLAVA = {"vision": TOWER, "language": QWEN3}
EXPERTS = {"family": "text", "language": QWEN3 | {"experts": SPARSE}}
HYBRID = {
    "family": "text",
    "language": {
        "family": "qwen3_5",
        **SIZES,
        "layers": 4,
        "head_dim": 32,
        "mrope_section": [2, 1, 1],
        "delta": DELTA,
        "intermediate_size": 96,
    },
}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"
RECORD = Path(__file__).parent.parent / "bench" / "results" / "gpu.json"


def record(name: str, **figures: object) -> None:
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    write_json(RECORD, known | {"environment": environment(machine(DEVICE)), name: figures})


@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_in_bf16_is_near_fp32_on_the_cpu(causal: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    q_THK, k_TGK, v_TGK = (torch.randn(96, heads, 64, generator=rng) for heads in (4, 2, 2))
    cu_S1 = torch.tensor([0, 40, 41, 96], dtype=torch.int32)
    results = []
    for device, dtype in (("cpu", torch.float32), (DEVICE, torch.bfloat16)):
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in (q_THK, k_TGK, v_TGK)]
        out_THK = packed_attention(*leaves, cu_S1.to(device), 55, causal)
        out_THK.float().square().sum().backward()
        results.append([out_THK.detach(), *(leaf.grad for leaf in leaves)])
    for exact, got in zip(*results, strict=True):
        assert exact is not None
        assert got is not None
        torch.testing.assert_close(got.float().cpu(), exact, rtol=0.05, atol=0.08)


@pytest.mark.parametrize("name", PASSES)
def test_compiled_passes_on_this_gpu(name: str) -> None:
    """Norms, rotations and the like as kernels of PyTorch's compiler, in bfloat16, near float32 on the CPU, gradients too."""
    one = PASSES[name]
    assert compiler_obstacle(torch.device(DEVICE, torch.cuda.current_device())) is None
    inputs = [x.detach() for x in given(one, torch.bfloat16)]
    exact = results(one.plain, [x.float().requires_grad_() for x in inputs])
    got = results(one.fast, [x.to(DEVICE).requires_grad_() for x in inputs])
    for x, want in zip(got, exact, strict=True):
        assert (x.float().cpu() - want).norm() <= 0.02 * want.norm()


def test_products_in_float32_on_this_gpu() -> None:
    """The split weight of a router: as good as float32, out of bfloat16."""
    rng = torch.Generator().manual_seed(0)
    x_TD, weight_ED = torch.randn(256, 512, generator=rng).bfloat16(), torch.randn(64, 512, generator=rng)
    leaves = [x_TD.to(DEVICE).requires_grad_(), weight_ED.to(DEVICE).requires_grad_()]
    out = linear_in_float32(*leaves)
    out.square().sum().backward()
    want = x_TD.double() @ weight_ED.double().T
    assert float32.GIVES_FLOAT32
    assert (out.double().cpu() - want).norm() <= 2**-15 * want.norm()
    assert leaves[1].grad is not None
    assert (leaves[1].grad.double().cpu() - 2 * want.T @ x_TD.double()).norm() <= 2**-13 * (2 * want.T @ x_TD.double()).norm()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_products_in_fp8_on_this_gpu(scaling: Scaling) -> None:
    """A linear layer's output and gradients, by the GPU's FP8 units, against the emulation on the CPU; rows are no multiple of 16."""
    if float8_obstacle(torch.cuda.get_device_capability()) is not None:
        pytest.skip("this GPU has no products in FP8")
    assert float8_fault(torch.device(DEVICE), scaling) is None
    rng = torch.Generator().manual_seed(0)
    x_TI, weight_OI, dout_TO = (torch.randn(*size, generator=rng).bfloat16() for size in ((1001, 512), (256, 512), (1001, 256)))
    results = []
    for device in ("cpu", DEVICE):
        leaves = [x.to(device, copy=True).requires_grad_() for x in (x_TI, weight_OI)]
        out = float8_linear(*leaves, scaling)
        out.backward(dout_TO.to(device))
        results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)])
    for want, got in zip(*results, strict=True):
        assert (got.float() - want.float()).norm() <= 0.01 * want.float().norm()


@pytest.mark.parametrize("precision", ["fp16", "float8"])
def test_a_run_in_fewer_bits_on_this_gpu_is_near_bf16(precision: str, tmp_path: Path) -> None:
    """The tiny run in fp16, with its loss scale, and in FP8 where there is some."""
    wide = ["model.config.language.hidden_size=32", "model.config.language.intermediate_size=48", "validation_steps=null"]
    if precision == "float8" and float8_obstacle(torch.cuda.get_device_capability()) is not None:
        pytest.skip("this GPU has no products in FP8")
    narrow = ["precision=fp16"] if precision == "fp16" else ["precision=bf16", "float8=tensorwise"]
    found = []
    for name, how in {"bf16": ["precision=bf16"], precision: narrow}.items():
        loop.train(tiny_run(tmp_path, f"device={DEVICE}", f"out={tmp_path / name}", *wide, *how))
        found.append(first_losses(tmp_path / name))
    assert None not in found[1], "an overflow is of gradients, and its loss is known"
    assert found[1][0] == pytest.approx(found[0][0], abs=0.05)


def first_losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "step"]


def test_easyvqa_recipe_on_the_gpu(eyeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe on the CPU and on the GPU in fp32 and in bf16: the same first losses, within their precision. Then, with
    deterministic algorithms, a stop and a resume that give the same bits, and an evaluation."""
    short = ["stages.shapes.steps=20", "stages.all.steps=10", "save_steps=5"]
    runs = {
        "cpu": ["device=cpu", "threads=4"],
        "fp32": [f"device={DEVICE}"],
        "bf16": [f"device={DEVICE}", "precision=bf16", "deterministic=true"],
    }
    for name, settings in runs.items():
        done = eyeline("train", "easyvqa-tiny", *short, *settings, f"out={name}")
        assert done.code == 0, done.err
    losses = {name: first_losses(tmp_path / name) for name in runs}
    assert losses["fp32"][:3] == pytest.approx(losses["cpu"][:3], rel=2e-3)
    assert losses["bf16"][:3] == pytest.approx(losses["cpu"][:3], rel=5e-2)
    with monkeypatch.context() as patch:
        stopped_at(patch, {12})
        assert eyeline("train", "easyvqa-tiny", *short, *runs["bf16"], "out=stopped").code == 75
    assert eyeline("train", "easyvqa-tiny", *short, *runs["bf16"], "out=stopped").code == 0
    assert first_losses(tmp_path / "stopped") == losses["bf16"]
    ends = [store.newest(tmp_path / name / "checkpoints") for name in ("bf16", "stopped")]
    assert digest(ends[0]) == digest(ends[1])
    assert eyeline("eval", "bf16", "--limit", "500").code == 0
    steps = [line for line in read_lines(tmp_path / "bf16" / "metrics.jsonl") if line["kind"] == "step"]
    record("easyvqa-tiny", losses=losses, ms_a_step=[round(1000 * line["step_s"], 1) for line in steps[5:]])


@pytest.mark.parametrize("gradients", [True, False], ids=["trained", "generated"])
def test_fla_on_this_gpu(gradients: bool) -> None:
    """Heads as Qwen3.5 has them. A fault is not a failure here, since a stage then uses our own kernel; it is recorded."""
    pytest.importorskip("fla")
    fault = fla_fault(16, 32, 128, 128, torch.bfloat16, torch.device(DEVICE), gradients)
    record(f"fla, {'gradients' if gradients else 'memories'}", fault=fault, versions=fla.versions())


def test_our_gated_delta_rule_equals_the_loop_on_this_gpu() -> None:
    """Chunks on the GPU in bfloat16 against one token after another on the CPU in float32."""
    inputs, cu_S1 = _batch(2, 4, 32, 32, torch.device("cpu"))
    want, _ = gated_delta_rule_plain(*inputs, cu_S1)
    half = [x.to(DEVICE, torch.bfloat16 if i < 3 else torch.float32).requires_grad_() for i, x in enumerate(inputs)]
    got = gated_delta_rule(*half, cu_S1.to(DEVICE))
    got.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in half)
    assert (got.float().cpu() - want).norm() <= 0.02 * want.norm()


def test_experts_without_rows_on_this_gpu() -> None:
    """Three of six experts got nothing: bfloat16 on the GPU against the loop on the CPU, and zeros where nothing was."""
    rng = torch.Generator().manual_seed(0)
    ends_E = torch.tensor([0, 40, 40, 41, 96, 96], dtype=torch.int32)
    leaves = [torch.randn(*shape, generator=rng) * 0.3 for shape in ((96, 64), (6, 32, 64), (6, 32, 64), (6, 64, 32))]
    results = []
    for device, dtype in (("cpu", torch.float32), (DEVICE, torch.bfloat16)):
        here = [x.to(device, dtype, copy=True).requires_grad_() for x in leaves]
        out_ND = (grouped_swiglu_plain if device == "cpu" and dtype == torch.float32 else grouped_swiglu)(*here, ends_E.to(device))
        out_ND.float().square().sum().backward()
        results.append([out_ND.detach(), *(x.grad for x in here)])
    for want, got in zip(*results, strict=True):
        assert (got.float().cpu() - want).norm() <= 0.03 * want.norm()
    for gradient in results[1][2:]:
        assert not gradient[[0, 2, 5]].any()


@each_case
@torch.no_grad()
def test_every_family_in_bf16_on_this_gpu(case: Case) -> None:
    """Logits near those of float32 on the CPU, by weights that were cast once. With experts, a rounded token may choose another one."""
    exact, plan = parity.randomised(case), shape(case.config, trains={}, compute_dtype=torch.bfloat16, narrow=PARTS)
    materialise(plan, DEVICE)
    half = plan.model
    for name, p in half.named_parameters():
        p.copy_(exact.get_parameter(name))
    batch = batch_of(case.documents, None, next_tokens=True)
    want, got = exact.eval()(batch).out, half.eval()(batch.to(torch.device(DEVICE))).out.cpu()
    assert got.isfinite().all()
    if case.spec.language.experts is None:
        assert (got - want).abs().max() <= case.half * want.abs().max()


COMPILED = {
    "llava": LLAVA,
    "experts": EXPERTS,
    "delta": HYBRID,
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_on_this_gpu(name: str) -> None:
    """Loss and every gradient in bf16 near those without, recomputation in the graph; fla where it passes its test."""
    results = []
    for compiles in (False, True):
        plan = shape(CONFIG.validate_python(COMPILED[name]), compute_dtype=torch.bfloat16)
        plan.model.recompute({"language": EVERY_BLOCK})
        materialise(plan, DEVICE)
        parity.randomise(plan.model)
        here = machine(DEVICE)
        choose(plan.model, here.device, here.capability, torch.bfloat16, trains=True)
        if compiles:
            compile_blocks(plan)
        batch = full_batch(plan.spec.image, plan.spec.vocab_size, Budget(2048, 2048), (64, 64))
        plan.model(batch.to(torch.device(DEVICE))).out.backward()
        results.append({n: p.grad.float() for n, p in plan.model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    for n, want in results[0].items():
        assert (results[1][n] - want).norm() <= 0.05 * want.norm() + 1e-3, n


VL = {
    "family": "qwen3_vl",
    "vision": {"hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 128, "deepstack_layers": [0]},
    "language": QWEN3 | {"mrope_section": [3, 3, 2]},
}
GRAPHED = {"text": {"family": "text", "language": QWEN3}, "llava": LLAVA, "qwen3_vl": VL}
ADAPTED: dict[str, Any] = {
    "trains": {"language": "adapters", "projector": "full"},
    "adapters": {"language": LoRA(rank=4, alpha=8, dropout=0.25, targets="all-linear")},
}


def noisy(batch: Batch) -> Batch:
    """The same with random tokens, labels and pixels."""
    rng = torch.Generator().manual_seed(0)
    assert batch.labels_L is not None
    ids = {name: torch.randint(512, getattr(batch, name).shape, generator=rng) for name in ("tokens_T", "labels_L")}
    return replace(batch, patches_PC=torch.randint(256, batch.patches_PC.shape, generator=rng, dtype=torch.uint8), **ids)


@pytest.mark.parametrize(
    ("name", "how"), [("text", "full"), ("llava", "full"), ("llava", "lora"), ("qwen3_vl", "full"), ("qwen3_vl", "lora")]
)
def test_replayed_steps_on_this_gpu(name: str, how: str) -> None:
    """Loss and every gradient of three steps in bf16 near those of eager ones, and the weights after them: with images, of text alone, and
    both; and a step that is not finite changes nothing."""
    budget, device = Budget(2048, 2048), torch.device(DEVICE, torch.cuda.current_device())
    results: list[tuple[list[Any], dict[str, torch.Tensor]]] = []
    for graphed in (False, True):
        plan = shape(CONFIG.validate_python(GRAPHED[name]), compute_dtype=torch.bfloat16, **(ADAPTED if how == "lora" else {}))
        plan.model.recompute({"language": EVERY_BLOCK})
        materialise(plan, DEVICE)
        parity.randomise(plan.model)
        here = machine(DEVICE)
        choose(plan.model, here.device, here.capability, torch.bfloat16, trains=True)
        plan.model.train()
        optimizers = make_optimizers(plan, AdamW(weight_decay=0.1))
        batches = [noisy(batch) for batch in made_up_batches(plan, budget)]
        graphs = (
            GraphedUpdate(plan.model, optimizers, capacities_of(plan.spec.image, budget), batches, 1.0, captures(device))
            if graphed
            else None
        )
        set_learning_rates(optimizers, {"vision": 1e-3, "projector": 1e-3, "language": 1e-3}, 1.0)
        seen: list[Any] = []

        def keep(loss: float, norm: float, outcome: str, plan: Any = plan, seen: list[Any] = seen) -> None:
            assert outcome == "applied"
            gradients = {n: p.grad.float().clone() for n, p in plan.model.named_parameters() if p.grad is not None and p.grad.any()}
            seen.append((loss, norm, gradients))

        for n, step in enumerate((step_alone(batches[:1]), step_alone(batches[-1:]), step_alone(batches))):
            if graphs is not None:
                graphs.update(step, 5, n, keep)
            else:
                update(plan.model, optimizers, step, ONE_DEVICE, max_grad_norm=1.0, balance=None, seed=5, step=n, before_update=keep)
        after = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
        results.append((seen, after))
        if graphs is not None:
            with torch.no_grad():
                plan.model.get_parameter("language.norm.weight")[0] = float("nan")
            assert graphs.update(step_alone(batches), 5, 3).outcome == "not finite"
            assert all(torch.equal(p, after[n]) for n, p in plan.model.named_parameters() if n != "language.norm.weight")
            assert graphs.without_graph == 0
    (want, eager), (got, replayed) = results
    for (loss, norm, gradients), (loss_, norm_, gradients_) in zip(want, got, strict=True):
        assert (loss_, norm_) == (pytest.approx(loss, rel=2e-2), pytest.approx(norm, rel=5e-2))
        assert gradients_.keys() == gradients.keys()
        for n, x in gradients.items():
            assert (gradients_[n] - x).norm() <= 0.05 * x.norm() + 1e-3 * norm, n
    for n, x in eager.items():
        assert (replayed[n] - x).float().norm() <= 0.02 * x.float().norm() + 1e-3, n


def test_memory_in_reserve_does_not_grow(eyeline: Command, tmp_path: Path) -> None:
    """The allocator's, after the first steps: a stream a step for copies would add a batch to it in each."""
    reserved = []
    for steps in (10, 40):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        settings = [f"device={DEVICE}", "precision=bf16", f"stages.shapes.steps={steps}", "stages.all.steps=1", f"out=run-{steps}"]
        assert eyeline("train", "easyvqa-tiny", *settings).code == 0
        reserved.append(torch.cuda.max_memory_reserved())
    record("reserved bytes after 10 and 40 steps", reserved=reserved)
    assert reserved[1] <= 1.2 * reserved[0]


def test_batches_arrive_whole_while_others_compute() -> None:
    """Copies run while kernels run that take far longer; what is summed on the device is what the host has."""
    rng = np.random.default_rng(0)
    made = [batch_of([document(rng, n)], Budget(4096, 1 << 15)) for n in range(12)]
    busy = torch.randn(4096, 4096, device=DEVICE)
    sums = []
    for _, batch in on_device(made, torch.device(DEVICE)):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append([batch.patches_PC.long().sum(), batch.tokens_T.sum(), (batch.places_P2 * batch.places_P2).sum()])
        del batch
    for batch, (patches, tokens, places) in zip(made, sums, strict=True):
        assert patches == batch.patches_PC.long().sum()
        assert tokens == batch.tokens_T.sum()
        assert places == (batch.places_P2 * batch.places_P2).sum()


def document(rng: np.random.Generator, n: int) -> Document:
    rows = 64 + n
    places_P2 = np.stack(np.divmod(np.arange(rows * 64, dtype=np.int32), 64), 1).astype(np.int32)
    image = Image(str(n), rng.integers(0, 256, (rows * 64, 768), dtype=np.uint8), places_P2, Grid(rows, 64), 8)
    tokens_T = rng.integers(1, 1000, 4000 - n).astype(np.int32)
    return Document(str(n), tokens_T, tokens_T, np.arange(rows, dtype=np.int32) + 5, (image,))


def test_llava_recipe_on_the_gpu(eyeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe in its own precision: LoRA and recomputation in bf16, workers and pinned copies, a stop, a resume, an answer."""
    save_vision(tmp_path / "siglip")
    save_language(tmp_path / "qwen", width=32)  # head dims of 8: flash attention takes multiples of 8
    write_llava_pretrain(tmp_path / "data" / "LLaVA-Pretrain")
    assert eyeline("import", "models/siglip2-qwen2.5", "--vision", "siglip", "--language", "qwen", "--no-feature-norm").code == 0
    settings = [*(s for s in TINY if not s.startswith(("device=", "threads=", "stages.tune.data.workers"))), "stages.tune.data.workers=2"]
    with monkeypatch.context() as patch:
        stopped_at(patch, {9})
        assert eyeline("train", "llava-siglip2-qwen2.5", *settings).code == 75
    done = eyeline("train", "llava-siglip2-qwen2.5", *settings)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "llava-siglip2-qwen2.5"
    newest = store.newest(run / "checkpoints")
    assert newest is not None
    assert newest.step == 12
    assert {(t.ndim > 1, t.dtype) for t in newest.load("frozen").values()} == {(True, torch.bfloat16), (False, torch.float32)}
    assert eyeline("eval", str(run)).code == 0
    assert (
        eyeline(
            "chat", str(run), "--image", "data/LLaVA-Pretrain/00000/000000000.jpg", "--ask", "What is it?", "--max-new-tokens", "4"
        ).code
        == 0
    )
    record("llava-siglip2-qwen2.5", losses=first_losses(run))
