"""Padded batches compute what the batches do that they were made of; and what is captured as CUDA graphs asks for the same operators on
the same memory whatever the batch, and reads nothing on the host. On a CPU the captured work simply runs again."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyeline.core.batch import Batch, Budget
from eyeline.core.plan import Part, Plan, materialise
from eyeline.core.randomness import rng_for
from eyeline.core.step import Step, step_alone
from eyeline.data.fetch.batches import batch_of
from eyeline.models import CONFIG
from eyeline.models.layers import EVERY_BLOCK
from eyeline.models.lora import LoRA
from eyeline.models.shape import Trains, shape
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.study.roofline.record import Recorder
from eyeline.train.compile import made_up_batches
from eyeline.train.cuda_graph import GraphedUpdate, Work
from eyeline.train.fixed_batch import Capacities, capacities_of, fixed
from eyeline.train.optim import AdamW, make_optimizers, set_learning_rates, state_tensors
from eyeline.train.step import update
from tests.models import parity
from tests.models.cases import ALL
from tests.models.parity import Case, all_close, close

BY_NAME = {(case.config.family, case.id): case for case in ALL}
CASES = {
    "text": BY_NAME["text", "qwen3 tied"],
    "llava": BY_NAME["llava", "shuffled untied"],
    "naflex": BY_NAME["llava", "NaFlex"],
    "qwen3_vl": BY_NAME["qwen3_vl", "tied"],
}
BUDGET = Budget(128, 300)
ADAPTER = LoRA(rank=2, alpha=3, dropout=0.25, targets="all-linear")
PLAIN: Mapping[Part, float] = {"vision": 1e-2, "projector": 1e-2, "language": 1e-2}


def planned(case: Case, trains: Mapping[Part, Trains] | None = None) -> Plan[Any]:
    """The model, every tensor random; what is adapted has dropout, what is trained in full is recomputed."""
    adapters: dict[Part, LoRA] = {part: ADAPTER for part, how in (trains or {}).items() if how == "adapters"}
    plan = shape(case.config, trains=trains, adapters=adapters)
    if trains is None:
        plan.model.recompute({"language": EVERY_BLOCK})
    materialise(plan, "cpu")
    parity.randomise(plan.model)
    plan.model.train()
    return plan


def varied(case: Case, count: int) -> list[Batch]:
    """Batches of other documents and images each; some of text alone."""
    rng, made = rng_for(0, "varied batches"), list[Batch]()
    for n in range(count):
        chosen = [case.documents[i] for i in rng.permutation(len(case.documents))[: 1 + n % len(case.documents)]]
        chosen = case.texts if n % 5 == 1 and case.texts else chosen
        if not any((document.labels_T >= 0).any() for document in chosen):
            chosen = list(case.documents)
        made.append(batch_of(chosen, BUDGET))
    return made


def capacities(case: Case) -> Capacities:
    return capacities_of(case.spec.image, BUDGET)


@pytest.mark.parametrize("name", CASES)
def test_padded_batch_has_the_same_loss_and_gradients(name: str) -> None:
    case = CASES[name]
    model, to = planned(case).model, capacities(case)
    shown = 0
    for batch in varied(case, 8):
        want, padded = parity.run_batch(model, batch), fixed(batch, to)
        patches = torch.randint(256, (to.patches - len(batch.patches_PC), to.columns), dtype=torch.uint8)  # left by the batch before
        if batch.has_images:
            padded, shown = replace(padded, patches_PC=torch.cat([batch.patches_PC, patches])), shown + 1
        got = parity.run_batch(model, padded)
        close(got[0], want[0], "loss", 1e-6)
        all_close(got[1], want[1], 5e-6)
    assert shown or name == "text"


@pytest.mark.parametrize("name", CASES)
def test_every_array_has_its_capacity(name: str) -> None:
    case, shapes = CASES[name], dict[bool, set[Any]]()
    for batch in varied(case, 50):
        padded = fixed(batch.with_draws(0, 0), capacities(case))
        sizes = {field: tuple(x.shape) for field, x in vars(padded).items() if isinstance(x, Tensor)}
        del sizes["patches_PC"], sizes["draws_P2"]  # of which the real ones are copied
        numbers = (padded.longest, padded.longest_image if padded.has_images else 0)
        shapes.setdefault(padded.has_images, set()).add((tuple(sizes.items()), numbers))
        bounds_N1 = padded.cu_N1.diff()
        assert int(padded.cu_S1[-1]) == capacities(case).tokens and int(padded.cu_S1.diff().min()) >= 0
        assert not padded.has_images or (int(bounds_N1.sum()), int(bounds_N1.max())) <= (capacities(case).patches, padded.longest_image)
    assert [len(found) for found in shapes.values()] == [1] * (1 if name == "text" else 2)


class Same(TorchDispatchMode):
    """While it is entered: operators with shapes, and the memory of what was there before. `item` and its like are refused."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self._new: set[int] = set()  # storages that were made meanwhile
        self._kept: list[Tensor] = []  # else another may get their memory

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name.split("::")[1]
        assert name not in self.READS, f"{name} reads what is on the device"
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        assert name != "index" or all(x.dtype != torch.bool for x in given[1:]), "as many rows as are true"
        if name == "lift_fresh":  # a number that an operator was given
            self._add(given[0])
        before = {x.untyped_storage().data_ptr() for x in given}
        where = [None if x.untyped_storage().data_ptr() in self._new else x.data_ptr() for x in given]
        self.asked.append((name, [(tuple(x.shape), x.stride(), x.dtype) for x in given], where))
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in before:
                self._add(x)
        return out

    def _add(self, x: Tensor) -> None:
        self._new.add(x.untyped_storage().data_ptr())
        self._kept.append(x)


def again(work: Work) -> Work:
    """In place of a capture."""
    return work


def compared(work: Work) -> Work:
    """In place of a capture, with a run to warm up: every run must ask for what the first one did, on the same memory."""
    first: list[Any] = []
    work()

    def run() -> None:
        with Same() as same:
            work()
        if not first:
            first.append(same.asked)
        else:
            for got, want in zip(same.asked, first[0], strict=True):
                assert got == want

    return run


def graphed(
    plan: Plan[Any], case: Case, optimizers: list[torch.optim.Optimizer], capture: Any = again, clip: float | None = 0.5
) -> GraphedUpdate:
    made_up = [
        batch_of(case.texts[:1] or list(case.documents[:1]), BUDGET),
        *([batch_of(case.documents, BUDGET)] if case.with_images else []),
    ]
    return GraphedUpdate(plan.model, optimizers, capacities(case), made_up, clip, capture)


def steps_of(case: Case, count: int) -> Iterator[Step]:
    """Steps of one to three micro-batches: of text alone, with images, and both."""
    batches = iter(varied(case, 3 * count))
    for n in range(count):
        yield step_alone([next(batches) for _ in range(1 + n % 3)])


WAYS: dict[str, tuple[str, Mapping[Part, Trains] | None]] = {
    "text": ("text", None),
    "llava": ("llava", None),
    "llava-lora": ("llava", {"language": "adapters"}),
    "naflex-projector": ("naflex", {"projector": "full"}),
    "qwen3_vl": ("qwen3_vl", None),
    "qwen3_vl-lora": ("qwen3_vl", {"vision": "adapters", "projector": "full", "language": "adapters"}),
}


FAST = ("text", "llava", "qwen3_vl-lora")  # the others take seconds more


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in FAST else [pytest.mark.slow]) for way in WAYS])
def test_updates_have_the_weights_of_eager_ones(way: str) -> None:
    """Losses, norms, weights and the optimizer's state after four steps, some of text alone, with decay, clipping and dropout; what is
    captured is the same in each."""
    case, trains = CASES[WAYS[way][0]], WAYS[way][1]
    eager, plan = planned(case, trains), planned(case, trains)
    made = [make_optimizers(one, AdamW(weight_decay=0.1)) for one in (eager, plan)]
    graphs = graphed(plan, case, made[1], compared)
    for n, step in enumerate(steps_of(case, 4)):
        for optimizers in made:
            set_learning_rates(optimizers, PLAIN, 1 / (n + 1))
        want = update(eager.model, made[0], step, ONE_DEVICE, max_grad_norm=0.5, balance=None, seed=3, step=n)
        got = graphs.update(step, 3, n)
        assert (got.outcome, got.counts) == (want.outcome, want.counts)
        assert got.loss == pytest.approx(want.loss, rel=1e-5) and got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4, abs=1e-6)
    assert graphs.without_graph == 0
    for name, x in eager.model.named_parameters():
        torch.testing.assert_close(plan.model.get_parameter(name), x, rtol=1e-4, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_fifty_batches_ask_for_the_same_operators(way: str) -> None:
    case, trains = CASES[WAYS[way][0]], WAYS[way][1]
    plan = planned(case, trains)
    graphs = graphed(plan, case, make_optimizers(plan, AdamW()), compared)
    for n, batch in enumerate(varied(case, 50)):
        assert graphs.update(step_alone([batch]), 3, n).outcome == "applied"


def state_of(plan: Plan[Any], optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Copies of weights and moments, without states that are all zeros: those of parameters that never moved."""
    state = {name: x for name, x in state_tensors(optimizers).items() if x.any()}
    return deepcopy({name: x.detach() for name, x in plan.model.named_parameters()} | state)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], x) for name, x in want.items())


def test_capturing_and_a_bad_step_change_nothing() -> None:
    """The device decides, by `found_inf`: the graph of the optimizer runs in any case."""
    case = CASES["llava"]
    plan = planned(case)
    optimizers, before = make_optimizers(plan, AdamW(weight_decay=0.1)), state_of(plan, [])
    graphs = graphed(plan, case, optimizers, compared)
    assert same(state_of(plan, optimizers), before)
    set_learning_rates(optimizers, PLAIN, 1.0)
    first, bad, last = (step_alone([batch]) for batch in varied(case, 3))
    seen: list[Any] = []
    assert (
        graphs.update(first, 0, 0, lambda *figures: seen.append((figures[2], same(state_of(plan, optimizers), before)))).outcome
        == "applied"
    )
    assert seen == [("applied", True)], "what a bad step needs is kept before the weights change"
    moved = state_of(plan, optimizers)
    assert not same(moved, before)
    head = plan.model.language.head.weight
    weight = head.detach().clone()
    with torch.no_grad():
        head[0] = float("nan")
        assert graphs.update(bad, 0, 1).outcome == "not finite"
        head.copy_(weight)
    assert same(state_of(plan, optimizers), moved)
    assert graphs.update(last, 0, 2).outcome == "applied", "and nothing of it is left in the gradients"


def test_text_alone_leaves_the_tower_and_its_state_as_they_are() -> None:
    case = CASES["qwen3_vl"]
    plan = planned(case)
    optimizers = make_optimizers(plan, AdamW(weight_decay=0.1))
    graphs = graphed(plan, case, optimizers)
    set_learning_rates(optimizers, PLAIN, 1.0)
    assert graphs.update(step_alone([batch_of(case.documents, BUDGET)]), 0, 0).outcome == "applied"
    before = state_of(plan, optimizers)
    assert graphs.update(step_alone([batch_of(case.texts, BUDGET)]), 0, 1).outcome == "applied"
    after = state_of(plan, optimizers)
    changed = {name.partition(".")[0] for name, x in before.items() if not torch.equal(after[name], x)}
    assert changed == {"language"}


def test_batch_without_room_runs_without_a_graph_and_is_counted() -> None:
    case, notes = CASES["llava"], list[str]()
    eager, plan = planned(case), planned(case)
    batch = batch_of(case.documents, BUDGET)
    small = replace(capacities(case), documents=len(batch.ids))
    assert not small.fit(batch)
    graphs = GraphedUpdate(
        plan.model, [], small, [batch_of(case.documents[:1], BUDGET), batch_of(case.texts[:1], BUDGET)], None, again, notes.append
    )
    for n in range(3):
        want = update(eager.model, [], step_alone([batch]), ONE_DEVICE, max_grad_norm=None, balance=None, seed=0, step=n)
        got = graphs.update(step_alone([batch]), 0, n)
        assert (got.loss, got.grad_norm) == (pytest.approx(want.loss, rel=1e-6), pytest.approx(want.grad_norm, rel=1e-5))
    assert graphs.without_graph == 3
    assert [note[:35] for note in notes] == ["cuda_graph: 1 micro-batch ran witho", "cuda_graph: 2 micro-batches ran wit"]


TOWER = {"hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 128}
SIZES = {"vocab_size": 512, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 96}
QWEN3 = {"family": "qwen3", "tie_embeddings": True, **SIZES}
SQUARE = {"image_size": 64, "patch": 8, **TOWER}
ON_GPU = {  # with heads that a GPU's kernels take
    "text": {"family": "text", "language": QWEN3},
    "llava": {"vision": SQUARE | {"tiles": 5}, "projector": {"shuffle": 2}, "language": QWEN3},
    "naflex": {"vision": SQUARE | {"patches": 64}, "language": QWEN3},
    "qwen3_vl": {"family": "qwen3_vl", "vision": TOWER | {"deepstack_layers": (0,)}, "language": QWEN3 | {"mrope_section": (3, 3, 2)}},
}


class Unbounded(Recorder):
    def bounds(self, x: Tensor) -> Tensor:
        return torch.tensor([0, 1024])


SHORT = ("text-full", "llava-full", "qwen3_vl-lora")
CAPTURED = [
    pytest.param(name, how == "lora", id=f"{name}-{how}", marks=[] if f"{name}-{how}" in SHORT else [pytest.mark.slow])
    for name in ON_GPU
    for how in ("full", "lora")
]


@pytest.mark.parametrize(("name", "lora"), CAPTURED)
def test_what_a_gpu_captures_reads_nothing_and_copies_nothing(name: str, lora: bool) -> None:
    """The branches that a GPU takes, in bfloat16, on tensors without memory."""
    works, budget = list[str](), Budget(1024, 2048)

    def recorded(work: Any) -> Work:
        with Unbounded() as recorder:
            work()
        assert recorder.host_reads == []
        assert [one.name for one in recorder.operators if one.kind == "copies"] == []
        works.append(work.func.__name__)
        return work

    ways: Any = {"trains": {"language": "adapters"}, "adapters": {"language": ADAPTER}} if lora else {}
    plan = shape(CONFIG.validate_python(ON_GPU[name]), compute_dtype=torch.bfloat16, **ways)
    plan.model.recompute({"language": EVERY_BLOCK})
    plan.model.train()
    made_up = list(made_up_batches(plan, budget))
    GraphedUpdate(plan.model, [], capacities_of(plan.spec.image, budget), made_up, 1.0, recorded)
    passes = 1 if name == "text" else 2
    assert works == ["_pass"] * passes + ["_judge", "_apply"] * passes
