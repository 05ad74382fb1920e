"""The table of a model's tensors and the rest of its plan, for every family."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyeline.core.plan import EXPERTS, HEADS, INPUTS, OUTPUTS, PARTS, VOCABULARY, Part, materialise, tensor_of
from eyeline.models.layers import Linear
from eyeline.models.lora import LoRA, adapters
from eyeline.models.moe import Bias
from eyeline.models.shape import shape
from tests.models import parity
from tests.models.cases import ALL, each_case
from tests.models.parity import Case, close

LORA = LoRA(rank=4, alpha=8, targets="all-linear")


def adapted(case: Case) -> dict[Part, LoRA]:
    return dict.fromkeys(case.spec.parts, LORA)


@each_case
def test_every_tensor_has_one_entry_that_fits_it(case: Case):
    plan = shape(case.config, adapters=adapted(case), trains=dict.fromkeys(case.spec.parts, "adapters"), balance=Bias())
    named = dict(plan.model.named_parameters(remove_duplicate=False)) | dict(plan.model.named_buffers())
    assert plan.table.keys() == named.keys()
    for name, x in named.items():
        entry = plan.table[name]
        assert (entry.shape, entry.stored, entry.part) == (tuple(x.shape), x.dtype, name.split(".")[0]), name
        assert entry.trains == x.requires_grad == name.endswith(("lora_A", "lora_B")), name
        assert ((entry.role == "buffer") == isinstance(x, Tensor) and not isinstance(x, nn.Parameter)) or entry.role != "buffer"
    assert [name for name, _, _ in plan.tensors()] == [n for n in plan.table if plan.table[n].tied_to is None]


@each_case
def test_ties_hold_where_memory_is_given(case: Case):
    plan = shape(case.config)
    tied = {name: entry.tied_to for name, entry in plan.table.items() if entry.tied_to is not None}
    assert tied == ({"language.head.weight": "language.embed.weight"} if case.config.language.tie_embeddings else {})
    materialise(plan, "cpu")
    for name, first in tied.items():
        assert tensor_of(plan.model, name) is tensor_of(plan.model, first)
        assert plan.table[name].unit == plan.table[first].unit
    assert all(x.device.type == "cpu" for _, x, _ in plan.tensors())


@each_case
def test_units_are_blocks_and_what_is_left_of_a_part(case: Case):
    plan = shape(case.config)
    for part, names in plan.blocks.items():
        assert len(names) == len(plan.model.get_submodule(part).blocks)
        for name in names:
            inside = {n for n in plan.table if n.startswith(name + ".")}
            assert inside == {n for n, entry in plan.table.items() if entry.unit == name}
    rest = {entry.unit for entry in plan.table.values()} - {name for names in plan.blocks.values() for name in names}
    assert rest == {"language.enter", "language.leave", *(part for part in case.spec.parts if part != "language")}


@each_case
def test_what_is_exact_is_read_in_float32_and_nothing_else_is(case: Case):
    """Seen in a bfloat16 pass: a weight that is not exact may be stored in bfloat16 without changing a bit."""
    model = parity.built(case, torch.bfloat16)
    parity.randomise(model)
    want = model.eval()(parity.batch_of(case.documents, None)).out
    for name, entry in shape(case.config, compute_dtype=torch.bfloat16).table.items():
        if entry.tied_to is not None or (entry.part == "vision" and not case.spec.uses(name)):
            continue
        assert entry.compute == (torch.float32 if "norm" in name or name.endswith(EXACT) else torch.bfloat16), name
        if entry.compute == torch.bfloat16:
            with torch.no_grad():
                parameter = model.get_parameter(name)
                parameter.copy_(parameter.bfloat16())
    assert torch.equal(model(parity.batch_of(case.documents, None)).out, want)


EXACT = ("router.weight", "positions.weight", "conv_q.weight", "conv_k.weight", "conv_v.weight", "A_log", "dt_bias")


@each_case
def test_splits_say_what_tensor_parallelism_needs(case: Case):
    """Along the cut of a branch's weights: products before the middle of a branch are cut by outputs, those after it by inputs, and what
    is whole inside a branch has partial gradients. Outside, nothing is cut but the vocabulary and the experts."""
    plan = shape(case.config, adapters=adapted(case))
    branches = [name + "." for name in plan.branches]
    assert all(name.startswith("language.blocks.") for name in branches)
    for name, entry in plan.table.items():
        leaf = name.rpartition(".")[2]
        if name in ("language.embed.weight", "language.head.weight"):
            assert entry.split == VOCABULARY
        elif ".experts." in name:
            assert entry.split == EXPERTS
        elif not name.startswith(tuple(branches)):
            assert entry.split is None, name
        elif name.endswith((".o.weight", ".down.weight", ".o.lora_A", ".down.lora_A")):
            assert entry.split == INPUTS, name
        elif leaf == "lora_A" or name.endswith((".o.lora_B", ".down.lora_B")) or "norm" in name:
            assert entry.split is None
            assert entry.partial, name
        else:
            assert entry.split in (HEADS, OUTPUTS), name
        assert not (entry.partial and entry.split), name
        if entry.split is not None:
            assert entry.split.dim < len(entry.shape)


@pytest.mark.parametrize("case", [case for case in ALL if case.spec.language.kv_heads % 2 == 0], ids=lambda case: case.id)
def test_a_branch_is_the_sum_of_its_pieces(case: Case):
    """The test of the words: every branch, cut in two by the table and run on each half, adds up to the whole; and so do the gradients
    of its input, while a whole tensor's gradient is the sum of both halves' where it is partial."""
    plan = shape(case.config)
    materialise(plan, "cpu")
    parity.randomise(plan.model)
    for name in plan.branches:
        if name.rpartition(".")[2] not in ("mlp", "shared"):
            continue  # attention's and the scan's heads need the layout of a batch
        branch = plan.model.get_submodule(name)
        x_TD = torch.randn(7, case.spec.language.hidden_size, generator=torch.Generator().manual_seed(0))
        want = branch(x_TD)
        got = [halved(branch, plan.table, name, half)(x_TD) for half in (0, 1)]
        close(got[0] + got[1], want, name)


def halved(branch: nn.Module, table: Mapping[str, Any], name: str, half: int) -> nn.Module:
    """A branch with one half of every tensor that the table splits."""
    import copy

    piece = copy.deepcopy(branch)
    for leaf, parameter in list(piece.named_parameters()):
        split = table[f"{name}.{leaf}"].split
        if split is not None:
            place, _, last = leaf.rpartition(".")
            setattr(piece.get_submodule(place), last, nn.Parameter(parameter.detach().chunk(2, split.dim)[half]))
    return piece


@each_case
def test_replaceable_submodules_are_on_the_way_of_what_they_route(case: Case):
    """Each is called in a pass with images and labels, and a model works with another in its place."""
    plan = shape(case.config)
    materialise(plan, "cpu")
    parity.randomise(plan.model)
    wanted = {("language", "loss"), ("language", "agree")}
    wanted |= {("vision", "attend"), ("projector", "deliver")} if case.spec.vision else set()
    wanted |= {("language", "dispatch")} if case.spec.language.experts else set()
    kinds = set(plan.replaceable)
    assert wanted <= kinds <= wanted | {("language", "attend"), ("language", "scan")}
    assert kinds & {("language", "attend"), ("language", "scan")}
    want = plan.model(parity.batch_of(case.documents, None)).out
    seen: list[str] = []
    for names in plan.replaceable.values():
        for name in names:
            plan.model.set_submodule(name, Watched(plan.model.get_submodule(name), name, seen))
    assert torch.equal(plan.model(parity.batch_of(case.documents, None)).out, want)
    missed = {name for names in plan.replaceable.values() for name in names if name not in seen and case.spec.uses(name)}
    assert missed <= ({"language.agree"} if not case.spec.language.experts else set())


class Watched(nn.Module):
    def __init__(self, inner: nn.Module, name: str, seen: list[str]):
        super().__init__()
        self.inner, self.name, self.seen = inner, name, seen

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **more: Any) -> Any:
        self.seen.append(self.name)
        return self.inner(*args, **more)


@each_case
def test_a_decoder_in_slices_computes_what_the_whole_does(case: Case):
    """Entering in one slice, the blocks over both, leaving in the other: each with None in place of what the other one has."""
    whole = parity.randomised(case).language
    batch = parity.batch_of(case.texts, None)
    want = whole(whole.enter(batch.tokens_T), batch)
    first, last = (parity.randomised(case).language for _ in range(2))
    border = (len(whole.blocks) + 1) // 2
    for i in range(len(whole.blocks)):
        (last if i < border else first).blocks[i] = None
    first.norm = first.head = last.embed = None
    x_TD, before = first.through(first.enter(batch.tokens_T), batch)
    x_TD, after = last.through(x_TD, batch)
    got = last.leave(x_TD, batch, [*before, *after])
    assert torch.equal(got.out, want.out)
    assert (got.load is None) == (want.load is None)
    assert got.load is None or torch.equal(got.load.tokens_NE, want.load.tokens_NE)


@each_case
def test_narrow_parts_store_frozen_matrices_in_the_dtype_that_they_compute_in(case: Case):
    plan = shape(case.config, trains={"language": "full"}, compute_dtype=torch.bfloat16, narrow=PARTS)
    for name, entry in plan.table.items():
        frozen = entry.part != "language"
        narrow = frozen and len(entry.shape) > 1 and entry.compute == torch.bfloat16
        assert entry.stored == (torch.bfloat16 if narrow else torch.float32), name


@each_case
def test_muon_and_adapters_take_the_linear_layers_with_a_target(case: Case):
    plan = shape(case.config, adapters=adapted(case))
    layers = {n for n, m in plan.model.named_modules() if isinstance(m, Linear) and m.target is not None}
    assert {n.removesuffix(".weight") for n, entry in plan.table.items() if entry.muon} == layers
    assert adapters(plan.model).keys() == {n for n in layers if case.spec.uses(n)}
    spared = {n for n, entry in plan.table.items() if not entry.decays}
    assert spared == {n for n, e in plan.table.items() if len(e.shape) < 2 or n.endswith("positions.weight") or embedding(n, case)}


def embedding(name: str, case: Case) -> bool:
    return name == "language.embed.weight" or (name == "language.head.weight" and case.config.language.tie_embeddings)


def test_a_layer_that_states_nothing_is_named():
    from eyeline.models import shape as module

    model = nn.Module()
    model.language = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="language, a Linear, does not state what its tensors are"):
        list(module._stated(model))
