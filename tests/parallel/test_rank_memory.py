"""The memory of a rank: its shard and a constant, wherever weights come from. A model of 285 MB on two ranks, measured by the kernel."""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from eyeline.bundle.bundle import Weights
from eyeline.bundle.fill import Seed, Source, fill
from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import pieces_of
from eyeline.core.plan import Part, Plan
from eyeline.core.shards import held
from eyeline.core.world import World
from eyeline.models import text
from eyeline.models.llama import Config as Llama
from eyeline.models.shape import shape
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.parallel.place import place
from eyeline.train.saving import copied
from tests.ranks import on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CONFIG = text.Config(
    language=Llama(vocab_size=4096, hidden_size=1024, layers=4, heads=8, kv_heads=8, intermediate_size=4096, tie_embeddings=True)
)
MB = 1 << 20
CONSTANT = 90 * MB  # a matrix that is drawn is whole for a moment (16 MB), and what is freed is not all given back at once


def bytes_of(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What comes of it, and by how much the resident memory grew at its highest."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = bytes_of("VmRSS")
    made = work()
    return made, bytes_of("VmHWM") - before


def filled(mesh: Any, sources: Mapping[Part, Source]) -> Plan[Any]:
    plan = shape(CONFIG)
    place(plan, "cpu", mesh)
    fill(plan, CONFIG, sources)
    return plan


def test_a_rank_needs_memory_for_its_shard_and_a_constant(tmp_path: Path) -> None:
    """Drawn from a seed, saved, copied to be saved by a thread, and loaded again."""

    def work(world: World) -> dict[str, int]:
        mesh = mesh_of(MeshSizes(), world, "cpu")
        peak(lambda: filled(mesh, {"language": Seed(0)}))  # what is imported and kept from then on
        grown = {}
        plan, grown["drawn"] = peak(lambda: filled(mesh, {"language": Seed(0)}))
        tensors = {name: x for name, x, _ in plan.tensors()}
        pieces = pieces_of(tensors, world.first)
        held_bytes = sum(held(x).local.nbytes for x in tensors.values())

        def save() -> Path:
            return store.save(
                tmp_path / "checkpoints", run="run", step=1, files={"model": pieces}, state={}, save_total_limit=1, world=world
            )

        _, grown["saved"] = peak(save)
        _, grown["copied"] = peak(lambda: copied(pieces))
        plan, tensors, pieces = None, {}, []
        checkpoint, grown["verified"] = peak(lambda: store.newest(tmp_path / "checkpoints", world=world))
        _, grown["loaded"] = peak(lambda: filled(mesh, {"language": Weights(tmp_path, CONFIG, None, checkpoint)}))
        return grown | {"held": held_bytes}

    (tmp_path / "checkpoints").mkdir()
    for found in on_ranks(2, work, timeout=300):
        shard = found.pop("held")
        assert 135 * MB < shard < 145 * MB
        wanted = {
            "drawn": shard + CONSTANT,
            "saved": CONSTANT,
            "copied": shard + CONSTANT,
            "verified": CONSTANT,
            "loaded": shard + CONSTANT,
        }
        assert all(found[name] < wanted[name] for name in wanted), {name: f"{n / MB:.0f} MB" for name, n in found.items()}
