"""Pipeline parallelism: the slices of a model compute one after another on several ranks, and several micro-batches are under way.

torch's schedules say which pass of which micro-batch a rank computes when, and send what passes between slices. A micro-batch of theirs is
one of the step: a pack is never cut. Between slices passes x_TD, and where experts are balanced by an auxiliary loss, routing_2E: what
experts got, and the sums of their probabilities, over all layers so far (float32).

Dims: T tokens  D width  N MoE layers  E experts
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eyeline.core.batch import Batch
from eyeline.core.plan import Plan, tensor_of
from eyeline.parallel.slices import Asked, moe_layers, slice_of, tied_copies

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Passed = tuple[Tensor, ...]  # x_TD, and routing_2E where it is sent


class Pipeline:
    """The ranks that have the slices of one model, and this rank's own slices."""

    def __init__(self, group: "ProcessGroup"):
        self.group = group
        self.rank, self.ranks = group.rank(), group.size()
        self._plan: Plan[Any] | None = None  # of the model that was placed last
        self._schedule: tuple[Any, Any, list[SliceRun]] | None = None  # the last one, what it was made for, and its slices

    def join(self, plan: Plan[Any]) -> None:
        """Let a model run in slices: its forward pass is then that of one of them."""
        assert plan.slices is not None
        self._plan, self._schedule = plan, None
        plan.model.forward = slice_of(plan.model, plan.spec.language.layers)

    @property
    def plan(self) -> Plan[Any]:
        assert self._plan is not None, "a model is placed before it runs"
        return self._plan

    @property
    def last(self) -> bool:
        """Return whether this rank has the last slice."""
        return self.rank == self.ranks - 1

    @property
    def moe_layers(self) -> list[int]:
        """The blocks of the whole model that have experts."""
        return moe_layers(self.plan)

    @property
    def own_moe_layers(self) -> list[int]:
        """The numbers of those that are here, among all that have experts."""
        slices = self.plan.slices
        assert slices is not None
        return [n for n, block in enumerate(self.moe_layers) if any(block in blocks for blocks in slices.blocks)]

    def run(self, batches: Iterator[Batch], count: int, tokens: int, asked: Asked) -> None:
        """Forward and backward passes of `count` micro-batches of so many rows each."""
        key = count, tokens, asked.routing
        if self._schedule is None or self._schedule[0] != key:
            self._schedule = None  # frees what the one before received into
            self._schedule = key, *self._made(count, tokens, asked.routing)
        _, schedule, runs = self._schedule
        coming = Coming(batches)
        for run in runs:
            run.start(coming, asked)
        try:
            schedule.step(target=torch.zeros(count) if self.last else None, return_outputs=False)
        except RuntimeError as error:
            self._schedule = None
            if error.__cause__ is not None:  # of a forward pass, which torch wraps
                raise error.__cause__ from None
            raise

    def _made(self, count: int, tokens: int, routing: bool) -> tuple[Any, "list[SliceRun]"]:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # of an error it prints the whole schedule
        plan, slices = self.plan, self.plan.slices
        assert slices is not None
        device = next(plan.model.parameters()).device
        passed = self.like(tokens, routing)
        runs, stages = [], []
        for number, blocks in zip(slices.numbers, slices.blocks, strict=True):
            last = number == slices.count - 1
            runs.append(SliceRun(plan, number, blocks))
            loss = (torch.empty(1, device="meta", requires_grad=True),)
            args: dict[str, Any] = {"input_args": passed if number else (), "output_args": loss if last else passed}
            stages.append(PipelineStage(runs[-1], number, slices.count, device, group=self.group, **args))
        name = schedule_name(count, self.ranks, len(stages))
        what = stages if len(stages) > 1 else stages[0]
        schedule = get_schedule_class(name)(what, count, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)  # type: ignore[call-arg]
        return schedule, runs

    def like(self, tokens: int, routing: bool) -> Passed:
        """What passes between two slices, without memory."""
        language = self.plan.model.language
        how: dict[str, Any] = {"device": "meta", "requires_grad": True}
        x_TD = torch.empty(tokens, self.plan.spec.language.hidden_size, dtype=language.compute_dtype, **how)
        return (x_TD, torch.empty(2, self.plan.spec.language.experts or 0, **how)) if routing else (x_TD,)

    @torch.no_grad()
    def run_forward(self, batch: Batch) -> Any:
        """The last slice's output for one batch; None on other ranks."""
        plan, slices = self.plan, self.plan.slices
        assert slices is not None
        x_TD = None
        for number, blocks in zip(slices.numbers, slices.blocks, strict=True):
            if number:
                x_TD = torch.empty_like(self.like(len(batch.tokens_T), False)[0], device=batch.tokens_T.device, requires_grad=False)
                dist.recv(x_TD, group=self.group, group_src=(self.rank - 1) % self.ranks)
            out, _ = plan.model(batch, blocks, x_TD)
            if number == slices.count - 1:
                return out
            dist.send(out.contiguous(), group=self.group, group_dst=(self.rank + 1) % self.ranks)
        return None

    @torch.no_grad()
    def sum_tied(self) -> None:
        """Gradients of the two copies of a tied tensor, on the first and the last slice's rank, replaced by their sum."""
        if self.rank not in (0, self.ranks - 1):
            return
        other = self.ranks - 1 - self.rank
        for name in tied_copies(self.plan):
            p = tensor_of(self.plan.model, name)
            assert p.grad is not None, f"{name} has no gradient, and trains"
            own = local(p.grad)
            theirs = torch.empty_like(own)
            ops = [dist.P2POp(dist.isend, own.contiguous(), group=self.group, group_peer=other)]
            ops.append(dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=other))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            own += theirs

    def answers_for(self, p: nn.Parameter) -> bool:
        """Return whether a gradient is counted here, and not where its copy is."""
        return not any(tensor_of(self.plan.model, name) is p for name in self.plan.copies.values())

    def norm(self, own: Tensor) -> Tensor:
        """The norm of all slices' gradients, from that of each."""
        square = own.float() ** 2
        dist.all_reduce(square, group=self.group)
        return square.sqrt()


def schedule_name(count: int, ranks: int, slices: int) -> str:
    """torch's schedule. 1F1B needs as many micro-batches as ranks, and the last step of an epoch may have fewer."""
    if slices == 1:
        return "1F1B" if count >= ranks else "GPipe"
    return "Interleaved1F1B" if count % max(1, count // ranks) == 0 else "LoopedBFS"


def local(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x


class Coming:
    """Batches by number, taken from an iterator when they are first asked for."""

    def __init__(self, batches: Iterator[Batch]):
        self._batches, self._taken = batches, list[Batch]()

    def __getitem__(self, number: int) -> Batch:
        while len(self._taken) <= number:
            self._taken.append(next(self._batches))
        return self._taken[number]


class SliceRun(nn.Module):
    """A slice as torch's schedules call it: once per micro-batch, in their order. The model is not a submodule: torch would sum its
    gradients over ranks in its own way."""

    def __init__(self, plan: Plan[Any], number: int, blocks: range):
        super().__init__()
        assert plan.slices is not None
        self._run, self._blocks, self._last = (plan.model,), blocks, number == plan.slices.count - 1
        self._experts = plan.spec.language.experts or 0
        self._layers = [n for n, block in enumerate(moe_layers(plan)) if block in blocks]  # MoE layers that are here, among all

    def start(self, coming: Coming, asked: Asked) -> None:
        """The next forward pass is of the first of these micro-batches."""
        self._coming, self._asked, self._next = coming, asked, 0

    def forward(self, *passed: Tensor) -> Passed | Tensor:
        batch, number, self._next = self._coming[self._next], self._next, self._next + 1
        x_TD, before_2E = (*passed, None, None)[:2]
        out, routed = self._run[0](batch, self._blocks, x_TD)
        self._asked.routed(batch, self._layers, routed)
        if self._last:
            given: Passed = (self._asked.loss(batch, out, before_2E)[None],)
        elif self._asked.routing:
            given = (out, self._routing(routed, before_2E, out.device))
        else:
            given = (out,)
        for x in given:
            if not x.requires_grad:  # frozen slices pass on what needs no gradient, and the next slice still sends one back
                x.requires_grad_()
        asked = self._asked
        given[0].register_hook(lambda _: asked.backward(number))
        return given[0] if self._last else given

    def _routing(self, routed: Sequence[Any], before_2E: Tensor | None, device: torch.device) -> Tensor:
        total_2E = torch.zeros(2, self._experts, device=device) if before_2E is None else before_2E
        if routed:
            load_E, mass_E = (torch.stack(xs).sum(0) for xs in zip(*routed, strict=True))
            total_2E = total_2E + torch.stack([load_E.float(), mass_E])
        return total_2E
