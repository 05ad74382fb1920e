"""A whole training step of a recipe on tensors without memory, recorded: the step's own code on a full batch of made-up documents."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from eyeline.core.batch import Batch, Budget
from eyeline.core.plan import Plan
from eyeline.core.step import step_alone
from eyeline.data.fetch.full_batch import full_batch
from eyeline.models import Config, flops
from eyeline.models.flops import Flops
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.study.roofline.record import Operator, Recorder
from eyeline.train.muon import StackedMuon
from eyeline.train.optim import Muon, Optimizer
from eyeline.train.run import Run
from eyeline.train.step import update
from eyeline.train.trainable import plan_of


@dataclass(frozen=True)
class Recording:
    """The step as it was recorded, and the arithmetic that its model needs."""

    operators: list[Operator]
    host_reads: list[str]
    needed: Flops
    batch: Batch  # of one micro-batch; all are alike
    packs: int


def record_step(run: Run, index: int, config: Config, budget: Budget, packs: int) -> Recording:
    """Run one step of stage `index` on `packs` full micro-batches, and record it."""
    stage = run.stages[index]
    plan = plan_of(run, index, config)
    plan.model.train()
    batch = full_batch(plan.spec.image, plan.spec.vocab_size, budget)
    arithmetic = flops.count(plan.model, plan.spec.image)
    recorder = Recorder()
    ranks = replace(ONE_DEVICE, norm=_norm(recorder), clip=_clip(recorder))
    optimizers: Any = _optimizers(plan, stage.optimizer, recorder)
    with recorder:
        update(
            plan.model,
            optimizers,
            step_alone([batch] * packs),
            ranks,
            max_grad_norm=stage.max_grad_norm,
            balance=stage.experts,
            seed=run.seed,
            step=0,
        )
    needed = arithmetic.of(batch)
    return Recording(recorder.operators, recorder.host_reads, sum([needed] * packs, flops.NONE), batch, packs)


# ---- what a GPU runs as one kernel for all tensors, and torch offers no such kernel for tensors without memory


def _norm(recorder: Recorder) -> Any:
    def norm(parameters: Sequence[Parameter]) -> Tensor:
        with recorder.within("optimizer"):
            return torch.linalg.vector_norm(
                torch.stack(torch.ops.aten._foreach_norm.Scalar([p.grad for p in parameters if p.grad is not None]))
            )

    return norm


def _clip(recorder: Recorder) -> Any:
    def clip(parameters: Sequence[Parameter], most: float, norm: Tensor) -> None:
        with recorder.within("optimizer"):
            torch.ops.aten._foreach_mul_.Tensor([p.grad for p in parameters if p.grad is not None], (most / (norm + 1e-6)).clamp(max=1.0))

    return clip


class _FusedAdamW:
    """One call for all parameters of a dtype, as torch's fused kernel on a GPU."""

    def __init__(self, parameters: Iterable[Tensor], recorder: Recorder):
        self.parameters, self.recorder = list(parameters), recorder
        self.moments = [[torch.empty_like(p) for p in self.parameters] for _ in range(2)]
        self.steps = [torch.empty((), device="meta") for _ in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        with self.recorder.within("optimizer"):
            for dtype in dict.fromkeys(p.dtype for p in self.parameters):
                rows = [row for row in zip(self.parameters, *self.moments, self.steps, strict=True) if row[0].dtype == dtype]
                rows = [row for row in rows if row[0].grad is not None]
                if rows:
                    weights, first, second, steps = (list(column) for column in zip(*rows, strict=True))
                    torch.ops.aten._fused_adamw_.default(
                        weights, [p.grad for p in weights], first, second, [], steps,
                        lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
                    )  # fmt: skip


class _Muon:
    """The optimizer of the run, in its part of the record."""

    def __init__(self, parameters: list[Tensor], recorder: Recorder):
        self.inner, self.recorder = StackedMuon(parameters, lr=1e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), recorder

    def step(self) -> None:
        with self.recorder.within("optimizer"):
            self.inner.step()


def _optimizers(plan: Plan[Any], settings: Optimizer, recorder: Recorder) -> list[_FusedAdamW | _Muon]:
    trained = [(x, entry) for _, x, entry in plan.tensors() if entry.trains]
    matrices = [x for x, entry in trained if entry.muon and isinstance(settings, Muon)]
    rest = [x for x, entry in trained if not (entry.muon and isinstance(settings, Muon))]
    return [*([_Muon(matrices, recorder)] if matrices else []), *([_FusedAdamW(rest, recorder)] if rest else [])]
