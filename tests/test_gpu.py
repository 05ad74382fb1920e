"""What only a GPU can show: `make test-gpu` runs these where there is one, and leaves a record in bench/results/gpu.json."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eyeline.checkpoint import store
from eyeline.core.batch import Budget, Document, Grid, Image
from eyeline.core.files import read_lines, write_json
from eyeline.data.batches import batch_of
from eyeline.kernels.attention import packed_attention
from eyeline.parallel.copies import on_device
from eyeline.parallel.launch import machine
from eyeline.train.environment import environment
from tests.bundle.tiny import save_language, save_vision
from tests.command import Command
from tests.test_end_to_end import TINY, write_llava_pretrain
from tests.train.test_resume import stopped_at

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
RECORD = Path(__file__).parent.parent / "bench" / "results" / "gpu.json"


def record(name: str, **figures: object) -> None:
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    write_json(RECORD, known | {"environment": environment(machine("cuda")), name: figures})


@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_in_bf16_is_near_fp32_on_the_cpu(causal: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    q_THK, k_TGK, v_TGK = (torch.randn(96, heads, 64, generator=rng) for heads in (4, 2, 2))
    cu_S1 = torch.tensor([0, 40, 41, 96], dtype=torch.int32)
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        leaves = [x.to(device, dtype).requires_grad_() for x in (q_THK, k_TGK, v_TGK)]
        out_THK = packed_attention(*leaves, cu_S1.to(device), 55, causal)
        out_THK.float().square().sum().backward()
        results.append([out_THK.detach(), *(leaf.grad for leaf in leaves)])
    for exact, got in zip(*results, strict=True):
        assert exact is not None
        assert got is not None
        torch.testing.assert_close(got.float().cpu(), exact, rtol=0.05, atol=0.08)


def first_losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "step"]


def test_easyvqa_recipe_on_the_gpu(eyeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe on the CPU and on the GPU in fp32 and in bf16: the same first losses, within their precision. Then a stop,
    a resume, and an evaluation."""
    short = ["stages.shapes.steps=20", "stages.all.steps=10", "save_every=5"]
    runs = {"cpu": ["device=cpu", "threads=4"], "fp32": ["device=cuda"], "bf16": ["device=cuda", "precision=bf16"]}
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
    again = first_losses(tmp_path / "stopped")
    assert len(again) == 30
    assert again == pytest.approx(losses["bf16"], rel=5e-2)  # kernels on a GPU add in no fixed order
    assert eyeline("eval", "bf16", "--limit", "500").code == 0
    steps = [line for line in read_lines(tmp_path / "bf16" / "metrics.jsonl") if line["kind"] == "step"]
    record("easyvqa-tiny", losses=losses, ms_a_step=[round(1000 * line["step_s"], 1) for line in steps[5:]])


def test_batches_arrive_whole_while_others_compute() -> None:
    """Copies run beside kernels that take far longer; what is summed on the device is what the host has."""
    rng = np.random.default_rng(0)
    made = [batch_of([document(rng, n)], Budget(4096, 1 << 15)) for n in range(12)]
    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    for batch in on_device(made, torch.device("cuda")):
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
    save_language(tmp_path / "qwen")
    write_llava_pretrain(tmp_path / "data" / "LLaVA-Pretrain")
    assert eyeline("import", "models/siglip2-qwen2.5", "--vision", "siglip", "--language", "qwen", "--no-feature-norm").code == 0
    settings = [*(s for s in TINY if not s.startswith(("device", "threads", "stages.tune.data.workers"))), "stages.tune.data.workers=2"]
    with monkeypatch.context() as patch:
        stopped_at(patch, {9})
        assert eyeline("train", "llava-siglip2-qwen2.5", *settings).code == 75
    done = eyeline("train", "llava-siglip2-qwen2.5", *settings)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "llava-siglip2-qwen2.5"
    newest = store.newest(run / "checkpoints")
    assert newest is not None
    assert newest.step == 12
    assert {t.dtype for t in newest.load("frozen").values()} == {torch.bfloat16}
    assert eyeline("eval", str(run)).code == 0
    assert (
        eyeline("chat", str(run), "--image", "data/LLaVA-Pretrain/00000/000000000.jpg", "--ask", "What is it?", "--max-tokens", "4").code
        == 0
    )
    record("llava-siglip2-qwen2.5", losses=first_losses(run))
