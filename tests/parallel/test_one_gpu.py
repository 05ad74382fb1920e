"""What several ranks need of a GPU, as far as one GPU can show it: NCCL with one rank, and the passes of a rank that holds nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from eyeline.kernels.attention import packed_attention
from eyeline.kernels.moe import grouped_swiglu

DEVICE = "cuda"
BACKENDS = "cpu:gloo,cuda:nccl"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(BACKENDS, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_attention_over_no_rows_gives_every_gradient() -> None:
    """The tower of a rank without images."""
    q_THK, k_TGK, v_TGK = (torch.zeros(0, heads, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    out_THK = packed_attention(q_THK, k_TGK, v_TGK, torch.zeros(1, device=DEVICE, dtype=torch.int32), 0, causal=False)
    out_THK.float().sum().backward()
    assert out_THK.shape == (0, 4, 64)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q_THK, k_TGK, v_TGK))


def test_experts_over_no_rows_give_zero_gradients() -> None:
    """The experts of a rank that no token was sent to."""
    x_TD = torch.zeros(0, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.ones(4, *shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in ((32, 64), (32, 64), (64, 32))]
    out_TD = grouped_swiglu(x_TD, *weights, torch.zeros(4, device=DEVICE, dtype=torch.int32))
    out_TD.float().sum().backward()
    assert out_TD.shape == (0, 64)
    assert all(w.grad is not None and not w.grad.any() for w in weights)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_of_one_rank_return_what_they_were_given(dtype: torch.dtype) -> None:
    x = torch.arange(6, device=DEVICE, dtype=dtype)
    summed, sent, gathered, scattered = x.clone(), torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    dist.all_reduce(summed)
    dist.all_to_all_single(sent, x, [6], [6])
    dist.all_gather_into_tensor(gathered, x)
    dist.reduce_scatter_tensor(scattered, x)
    for got in (summed, sent, gathered, scattered):
        torch.testing.assert_close(got, x, rtol=0, atol=0)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_module_of_one_rank_equals_the_module() -> None:
    """FSDP2's streams on this GPU: loss and gradients after a forward and a backward pass."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32, device=DEVICE) for _ in range(2)]
    plain, sharded = torch.nn.Sequential(*layers), torch.nn.Sequential(*(torch.nn.Linear(32, 32, device=DEVICE) for _ in range(2)))
    sharded.load_state_dict(plain.state_dict())
    mesh = init_device_mesh(DEVICE, (1,))
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh)
    assert isinstance(sharded, FSDPModule)
    x = torch.randn(8, 32, device=DEVICE)
    losses = [model(x).square().mean() for model in (plain, sharded)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert isinstance(q.grad, DTensor)
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-6, atol=1e-7)
