"""AdamW with moments in 8 bits: against float32, bitsandbytes, over a stop, over ranks; what it keeps, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import eyeline.train.loop as loop
from eyeline.checkpoint import store
from eyeline.core.errors import Refused, Stopped
from eyeline.core.shards import whole
from eyeline.core.world import World
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.train import small_adamw
from eyeline.train.memory import memory_of
from eyeline.train.optim import AdamW, AdamW8bit, state_tensors
from eyeline.train.run import Run
from eyeline.train.small_adamw import SmallAdamW, bytes_in_8_bits, in_8_bits
from eyeline.train.trainable import plan_of, rank_problems
from tests.ranks import on_ranks
from tests.train.ends import end_of, losses, stopped_at
from tests.train.recipe import tiny_run

SHAPES = ((24, 512), (10, 600), (3, 256, 8), (7, 9), (5000,))
WIDE = ("model.config.language.hidden_size=64", "model.config.language.intermediate_size=96", "stages.whole.steps=4")


def tensors(seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for shape in shapes]


def in_8(parameters: list[nn.Parameter], offload: bool = False, dtype: torch.dtype = torch.uint8) -> SmallAdamW:
    group = {"params": parameters, "names": [f"p{n}" for n in range(len(parameters))], "lr": 0.01, "weight_decay": 0.1}
    return SmallAdamW([group], (0.9, 0.95), 1e-8, dtype, offload, seed=3)


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 20) -> list[Tensor]:
    for step in range(steps):
        for parameter, gradient in zip(parameters, tensors(10 + step, tuple(tuple(p.shape) for p in parameters)), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def adamw_run(folder: Path, kind: str, *more: str) -> Run:
    run = tiny_run(folder, *WIDE, f"stages.whole.optimizer={{{kind}, weight_decay: 0.1}}", *more)
    return run.model_copy(update={"stages": run.stages[:1]})


@pytest.mark.parametrize("offload", [False, True])
def test_moments_of_matrices_are_in_8_bits_and_near_float32(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors and vectors take the bits of AdamW in float32."""
    monkeypatch.setattr(small_adamw, "CHUNK", 3000)  # several of each matrix
    ours, theirs = ([nn.Parameter(x) for x in tensors(0)] for _ in range(2))
    optimizer = in_8(ours, offload)
    got, want = stepped(optimizer, ours), stepped(in_8(theirs, dtype=torch.float32), theirs)
    for n, (x, y, shape) in enumerate(zip(got, want, SHAPES, strict=True)):
        dtypes = {key: (value.dtype, tuple(value.shape)) for key, value in optimizer.state[ours[n]].items() if key != "step"}
        if n < 3:
            largest = (torch.float32, (*shape[:-1], -(-shape[-1] // 256)))
            packed = (torch.uint8, shape)
            assert dtypes == {"exp_avg": packed, "exp_avg_sq": packed, "exp_avg_largest": largest, "exp_avg_sq_largest": largest}
            assert not torch.equal(x, y)
            assert (x - y).abs().mean() < 0.03 * (y - tensors(0)[n]).abs().mean()
        else:
            assert set(dtypes.values()) == {(torch.float32, shape)}
            assert torch.equal(x, y)


def test_weight_without_gradient_is_not_thrown_far() -> None:
    """A small gradient next to a large one, and then none at all: the second moment is not zero, by which the first would be divided."""
    parameter = nn.Parameter(torch.zeros(16, 256))
    optimizer = in_8([parameter])
    parameter.grad = torch.ones(16, 256)
    parameter.grad[:, 1:] = 1e-5
    optimizer.step()
    before = parameter.detach().clone()
    parameter.grad = torch.zeros(16, 256)
    optimizer.step()
    assert (parameter - before).abs().max() < 0.05


@pytest.mark.qlora
def test_twenty_steps_are_those_of_bitsandbytes() -> None:
    """Rows are of whole blocks: in bitsandbytes other rows share blocks."""
    import bitsandbytes

    shapes = ((24, 512), (16, 256), (40,))
    ours, theirs, plain = ([nn.Parameter(x) for x in tensors(0, shapes)] for _ in range(3))
    reference = bitsandbytes.optim.AdamW8bit(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    got, want, dense = stepped(in_8(ours), ours), stepped(reference, theirs), stepped(in_8(plain, dtype=torch.float32), plain)
    for x, y, z, start in zip(got, want, dense, tensors(0, shapes), strict=True):
        moved = (z - start).abs().mean()
        assert (x - y).abs().mean() < 0.01 * moved
        assert (x - z).abs().mean() <= (y - z).abs().mean() * 1.05 + 1e-7


def test_stopped_run_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoints have the codes, and its losses are near those of AdamW in float32."""
    full, cut, plain = (adamw_run(tmp_path, kind, f"out={tmp_path / out}") for kind, out in
                        (("kind: adamw_8bit", "full"), ("kind: adamw_8bit, offload: true", "cut"), ("kind: adamw", "plain")))  # fmt: skip
    loop.train(full)
    with monkeypatch.context() as patch:
        stopped_at(patch, {2})
        with pytest.raises(Stopped):
            loop.train(cut)
    kept = store.newest(tmp_path / "cut" / "checkpoints")
    assert kept is not None
    states = kept.load("optimizer")
    packed = {name for name, x in states.items() if x.dtype == torch.uint8}
    assert {name.rpartition(":")[2] for name in packed} == {"exp_avg", "exp_avg_sq"}
    assert packed == {
        name for name, x in states.items() if name.rpartition(":")[2] in ("exp_avg", "exp_avg_sq") and in_8_bits(tuple(x.shape))
    }
    loop.train(cut)
    assert end_of(cut) == end_of(full)
    loop.train(plain)
    assert losses(full) != losses(plain)
    assert list(losses(full).values()) == pytest.approx(list(losses(plain).values()), rel=0.02)


def test_memory_counts_what_the_optimizer_keeps(tmp_path: Path) -> None:
    run = adamw_run(tmp_path, "kind: adamw_8bit")
    assert run.model.config is not None
    plan = plan_of(run, 0, run.model.config)
    trained = [nn.Parameter(torch.zeros(x.shape)) for _, x, entry in plan.tensors() if entry.trains]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = in_8(trained)
    optimizer.step()
    held = sum(x.nbytes for name, x in state_tensors([optimizer]).items() if not name.endswith(":step"))
    assert memory_of(plan, AdamW8bit()).optimizer == held
    assert memory_of(plan, AdamW8bit(offload=True)).offloaded == held
    assert held < 0.5 * memory_of(plan, AdamW()).optimizer
    assert bytes_in_8_bits((4096, 4096)) == 4096 * 4096 * (1 + 1 / 64)


def test_cut_rows_and_ranks_that_offload_are_refused(tmp_path: Path) -> None:
    run = adamw_run(tmp_path, "kind: adamw_8bit, offload: true", "mesh.tp=2")
    assert not [*rank_problems(run, 1)]
    cut, offload = rank_problems(run, 2)
    assert "adamw_8bit are in blocks within the rows of weights, and mesh.tp=2 cuts rows" in cut
    assert offload.endswith("which share them out (mesh.dp_shard). Leave it out")


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("stages.whole.optimizer=adamw_8bit", "got 'adamw_8bit', wanted a mapping, such as {kind: adamw_8bit}"),
        ("stages.whole.optimizer=adamw_bnb_8bit", "wanted a mapping, such as {kind: adamw_8bit}"),
        ("stages.whole.optimizer=paged_adamw_8bit", "{kind: adamw_8bit, offload: true} keeps them on the host"),
        ("stages.whole.optimizer={kind: adamw8bit}", "'adamw8bit' is called 'adamw_8bit' here"),
        ("stages.whole.optimizer={kind: paged_adamw_8bit}", "{kind: adamw_8bit, offload: true} keeps them on the host"),
        ("stages.whole.optimizer={kind: adamw_8bit, state_dtype: bf16}", "state_dtype is a setting of kind: adamw"),
        ("optim=adamw_8bit", "optim is called stages.NAME.optimizer.kind here"),
        ("optim=adamw_bnb_8bit", "'adamw_bnb_8bit' is called 'adamw_8bit' here"),
        ("optim=paged_adamw_8bit", "{kind: adamw_8bit, offload: true} keeps them on the host"),
    ],
)
def test_other_spellings_name_the_setting(tmp_path: Path, typed: str, why: str) -> None:
    with pytest.raises(Refused) as refused:
        tiny_run(tmp_path, typed)
    assert why in str(refused.value)


@pytest.mark.ranks
def test_shares_of_ranks_have_the_codes_of_one_device() -> None:
    """Any number of ranks that share out rows have the same blocks, so that a run may be resumed on another."""

    def work(world: World) -> dict[str, Tensor]:
        mesh = mesh_of(MeshSizes(), world, "cpu")
        assert mesh is not None
        cut = [nn.Parameter(distribute_tensor(x, mesh.shard, [Shard(0)])) for x in tensors(0)]
        optimizer = in_8(cut)
        for step in range(3):
            for parameter, gradient in zip(cut, tensors(10 + step), strict=True):
                parameter.grad = distribute_tensor(gradient, mesh.shard, [Shard(0)])
            optimizer.step()
        return {name: whole(x).clone() for name, x in state_tensors([optimizer]).items() if not name.endswith(":step")}

    parameters = [nn.Parameter(x) for x in tensors(0)]
    optimizer = in_8(parameters)
    stepped(optimizer, parameters, steps=3)
    want = {name: x for name, x in state_tensors([optimizer]).items() if not name.endswith(":step")}
    for got in on_ranks(3, work):
        assert got.keys() == want.keys()
        for name, x in want.items():
            assert torch.equal(got[name], x) if x.dtype == torch.uint8 else torch.allclose(got[name], x, rtol=1e-6), name
