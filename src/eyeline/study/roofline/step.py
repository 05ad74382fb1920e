"""A whole training step of a recipe on tensors without memory, recorded: the step's own code on a full batch of made-up documents."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from eyeline.core.batch import IGNORE, Batch, Budget, Document, Image
from eyeline.core.image_rule import ImageRule
from eyeline.core.plan import Plan
from eyeline.core.step import step_alone
from eyeline.data.fetch.batches import batch_of
from eyeline.models import Config, flops
from eyeline.models.flops import Flops
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.study.roofline.record import Operator, Recorder
from eyeline.train.optim import Muon, Optimizer
from eyeline.train.run import Run
from eyeline.train.step import update
from eyeline.train.trainable import plan_of

# A conversation about one image, as in LLaVA-Instruct: a photo of COCO's size, some 350 tokens of text, of which answers are 60 %
PHOTO = (480, 640)  # height and width, in pixels
TEXT, ANSWERS = 350, 210


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


def full_batch(rule: ImageRule | None, vocab_size: int, budget: Budget) -> Batch:
    """A batch that fills its budget with conversations about one image each, and then, while tokens are left, about none."""
    documents: list[Document] = []
    tokens, patches = budget.tokens, budget.patches
    while tokens > 0:
        images = [] if rule is None else _images(rule, len(documents))
        visual, shown = sum(image.tokens for image in images), sum(len(image.patches_PC) for image in images)
        if visual + TEXT > tokens or shown > patches:
            images, visual, shown = [], 0, 0
        text = min(TEXT, tokens)
        documents.append(_document(f"document {len(documents)}", visual, text, min(ANSWERS, text), images, vocab_size))
        tokens, patches = tokens - visual - text, patches - shown
    return batch_of(documents, budget)


def _images(rule: ImageRule, number: int) -> list[Image]:
    images = []
    for i, unit in enumerate(rule.units(*PHOTO)):
        patches_PC = np.zeros((unit.grid.patches, 3 * rule.frames * rule.patch**2), np.uint8)
        places_P2 = np.zeros((unit.grid.patches, 2), np.int32)
        images.append(Image(f"image {number}.{i}", patches_PC, places_P2, unit.grid, rule.merge))
    return images


def _document(name: str, visual: int, text: int, answers: int, images: Sequence[Image], vocab_size: int) -> Document:
    length = visual + text
    tokens_T = (np.arange(length) % vocab_size).astype(np.int32)
    labels_T = np.full(length, IGNORE, np.int32)
    labels_T[length - answers :] = 1 % vocab_size
    return Document(name, tokens_T, labels_T, np.arange(visual, dtype=np.int32), tuple(images))


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
    """torch's own Muon, which takes one matrix after another."""

    def __init__(self, parameters: list[Tensor], recorder: Recorder):
        self.inner, self.recorder = torch.optim.Muon(parameters, lr=1e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), recorder

    def step(self) -> None:
        with self.recorder.within("optimizer"):
            self.inner.step()


def _optimizers(plan: Plan[Any], settings: Optimizer, recorder: Recorder) -> list[_FusedAdamW | _Muon]:
    trained = [(x, entry) for _, x, entry in plan.tensors() if entry.trains]
    matrices = [x for x, entry in trained if entry.muon and isinstance(settings, Muon)]
    rest = [x for x, entry in trained if not (entry.muon and isinstance(settings, Muon))]
    return [*([_Muon(matrices, recorder)] if matrices else []), *([_FusedAdamW(rest, recorder)] if rest else [])]
