"""AdamW with moments in bfloat16, and on the host: against torch's, over a stop, and over ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import eyeline.train.loop as loop
from eyeline.checkpoint import store
from eyeline.core.errors import Refused, Stopped
from eyeline.core.shards import Box, places_in_whole
from eyeline.core.world import World
from eyeline.kernels.rounding import stochastic_bf16
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.recipes.problems import refuse_problems
from eyeline.train import small_adamw
from eyeline.train.small_adamw import SmallAdamW
from eyeline.train.trainable import rank_problems
from tests.ranks import on_ranks
from tests.train.ends import end_of, stopped_at
from tests.train.recipe import tiny_run

SHAPES = ((64, 16), (7, 9), (5,))


def tensors(seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for shape in SHAPES]


def small(parameters: list[nn.Parameter], dtype: torch.dtype, offload: bool = False, beta2: float = 0.95) -> SmallAdamW:
    group = {"params": parameters, "names": [f"p{n}" for n in range(len(parameters))], "lr": 0.01, "weight_decay": 0.1}
    return SmallAdamW([group], (0.9, beta2), 1e-8, dtype, offload, seed=3)


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 4) -> list[Tensor]:
    for step in range(steps):
        for parameter, gradient in zip(parameters, tensors(10 + step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("offload", [False, True])
def test_moments_in_fp32_give_the_bits_of_torchs_adamw(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_adamw, "CHUNK", 256)  # several of the first parameter
    ours, theirs = ([nn.Parameter(x) for x in tensors(0)] for _ in range(2))
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    got, want = stepped(small(ours, torch.float32, offload), ours), stepped(reference, theirs)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_bf16_moments_stay_near_those_of_fp32() -> None:
    ours, theirs = ([nn.Parameter(x) for x in tensors(0)] for _ in range(2))
    optimizer, reference = small(ours, torch.bfloat16), small(theirs, torch.float32)
    for got, want in zip(stepped(optimizer, ours), stepped(reference, theirs), strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=0)
    for parameter, other in zip(ours, theirs, strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[parameter][moment].dtype == torch.bfloat16
            assert not torch.equal(optimizer.state[parameter][moment].float(), reference.state[other][moment])
            torch.testing.assert_close(optimizer.state[parameter][moment].float(), reference.state[other][moment], atol=0.02, rtol=0.05)


def test_changes_below_the_last_bit_add_up() -> None:
    """A moment of 200 falls by 0.1 in a step, a tenth of its last bit: rounded to the nearest it would stay."""
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = small([parameter], torch.bfloat16, beta2=0.999)
    parameter.grad = torch.full((4096,), 10.0)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].fill_(200.0)
    want = 200.0
    for _ in range(50):
        optimizer.step()
        want = 0.999 * want + 0.001 * 100
    assert want < 196
    assert optimizer.state[parameter]["exp_avg_sq"].float().mean().item() == pytest.approx(want, rel=2e-3)


def test_rounding_takes_a_neighbour_without_bias_however_a_tensor_is_cut() -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 3
    down = (x.view(torch.int32) & -0x10000).view(torch.float32)
    up = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    place = torch.arange(len(x))
    got = stochastic_bf16(x, 12345, place)
    assert ((got.float() == down) | (got.float() == up)).all()
    share = ((x - down) / (up - down)).double()
    assert (got.float() == up).double().mean().item() == pytest.approx(share.mean().item(), abs=0.01)
    assert torch.equal(torch.cat([stochastic_bf16(x[:777], 12345, place[:777]), stochastic_bf16(x[777:], 12345, place[777:])]), got)
    assert not torch.equal(stochastic_bf16(x, 12346, place), got)
    exact = got.float()
    assert torch.equal(stochastic_bf16(exact, 5, place), got), "what bfloat16 has is kept"


@pytest.mark.parametrize(
    "box", [Box((2, 0, 0), (3, 4, 6)), Box((1, 2, 0), (4, 2, 6)), Box((0, 1, 3), (5, 3, 2)), Box((5, 0, 0), (0, 4, 6))]
)
def test_places_in_a_whole_tensor_are_those_of_its_rows(box: Box) -> None:
    numbers = torch.arange(5 * 4 * 6).view(5, 4, 6)
    of_box = numbers[box.within(Box((0, 0, 0), (5, 4, 6)))].flatten()
    halves = [
        places_in_whole(box, (5, 4, 6), start, end, torch.device("cpu")) for start, end in ((0, box.size // 2), (box.size // 2, box.size))
    ]
    assert torch.equal(torch.cat(halves), of_box)


@pytest.mark.parametrize("how", ["state_dtype: bf16", "offload: true", "state_dtype: bf16, offload: true"])
def test_stopped_run_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    settings = [f"stages.whole.optimizer={{kind: adamw, {how}}}", "stages.whole.steps=3"]
    whole, cut = (tiny_run(tmp_path, *settings, f"out={tmp_path / name}") for name in ("whole", "cut"))
    whole, cut = (run.model_copy(update={"stages": run.stages[:1]}) for run in (whole, cut))
    loop.train(whole)
    with monkeypatch.context() as patch:
        stopped_at(patch, {2})
        with pytest.raises(Stopped):
            loop.train(cut)
    kept = store.newest(tmp_path / "cut" / "checkpoints")
    assert kept is not None
    dtypes = {x.dtype for name, x in kept.load("optimizer").items() if not name.endswith(":step")}
    assert dtypes == {torch.bfloat16 if "bf16" in how else torch.float32}
    loop.train(cut)
    assert end_of(cut) == end_of(whole)


def test_offload_over_ranks_is_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "stages.whole.optimizer={kind: adamw, offload: true}")
    assert not [*rank_problems(run, 1)]
    (why,) = rank_problems(run, 2)
    assert "stages.whole.optimizer.offload keeps the moments of one device on the host, and there are 2 ranks" in why


def test_problems_of_ranks_come_with_all_others(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "stages.whole.optimizer={kind: adamw, offload: true}", "mesh.dp_shard=3", "model.template=chatml")
    with pytest.raises(Refused) as refused:
        refuse_problems(run, 2)
    assert all(word in str(refused.value) for word in ("3 problems", "optimizer.offload", "dp_shard", "template 'chatml'"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("stages.whole.gradient_checkpointing={offload: true}", "compile=blocks"), "keeps the inputs of blocks inside its graphs"),
        (("stages.whole.gradient_checkpointing={offload: true, policy: selective}",), "most of what is kept is what products gave"),
        (("stages.whole.gradient_checkpointing={every: 2, memory_gb: 1}",), "memory_gb chooses the blocks that are recomputed"),
        (("stages.whole.optimizer={kind: muon, state_dtype: bf16}",), "state_dtype"),
    ],
)
def test_settings_that_exclude_one_another_are_refused(tmp_path: Path, settings: tuple[str, ...], why: str) -> None:
    with pytest.raises(Refused, match=why):
        tiny_run(tmp_path, *settings)


@pytest.mark.ranks
def test_sharded_parameters_take_the_step_of_one_device() -> None:
    def work(world: World) -> list[Tensor]:
        mesh = mesh_of(MeshSizes(), world, "cpu")
        assert mesh is not None
        cut = [nn.Parameter(distribute_tensor(x, mesh.shard, [Shard(0)])) for x in tensors(0)]
        optimizer = small(cut, torch.bfloat16)
        for step in range(3):
            for parameter, gradient in zip(cut, tensors(10 + step), strict=True):
                parameter.grad = distribute_tensor(gradient, mesh.shard, [Shard(0)])
            optimizer.step()
        return [p.data.full_tensor() for p in cut if isinstance(p.data, DTensor)]

    whole = [nn.Parameter(x) for x in tensors(0)]
    want = stepped(small(whole, torch.bfloat16), whole, steps=3)
    for got in on_ranks(2, work):
        assert len(got) == len(want)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
