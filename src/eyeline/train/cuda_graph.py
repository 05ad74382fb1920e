"""The update of a stage as CUDA graphs (`cuda_graph: true`): the host asks for a whole pass at once, in place of thousands of kernels.

Captured are the forward and backward pass over a micro-batch, with images and of text alone, and the end of a step: the norm of the
gradients with the verdict, then clipping and the optimizer. All read and write the same memory in every step: the arrays of one batch
(`fixed_batch.py`), gradients, the number of labels, learning rates, and `found_inf`, by which the optimizer's kernel leaves weights and
state as they are. Between the two graphs at the end of a step the host reads loss and norm, once, since what a bad step needs to be run
again is kept before the weights change.

A batch with more documents or images than the arrays have room for is computed without a graph, with the same results, and counted.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from eyeline.core.batch import Batch
from eyeline.core.errors import fitting
from eyeline.core.step import Step
from eyeline.core.words import counted
from eyeline.models.lora import LoRALinear
from eyeline.parallel.copies import on_device
from eyeline.train.fixed_batch import Capacities, empty_batch, fixed
from eyeline.train.step import Outcome, Report, batch_description

Work = Callable[[], None]
Capture = Callable[[Work], Work]  # work on fixed memory -> what does it again
WARM_UPS = 3  # kernels are chosen, compiled and loaded in the first runs, which no capture may


def captures(device: torch.device) -> Capture:
    """CUDA graphs that share their memory: nothing in it is needed from one to the next."""
    pool = torch.cuda.graph_pool_handle()

    def captured(work: Work) -> Work:
        here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable=True.*")  # which the optimizer is, and these runs are not captured
            for _ in range(WARM_UPS):
                work()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return captured


class GraphedUpdate:
    """The update of a stage on one device, captured. Gradients stay at the parameters, zero between steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        capacities: Capacities,
        made_up: Iterable[Batch],
        max_grad_norm: float | None,
        capture: Capture,
        notify: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`made_up`: a batch of text and, if the stage can have images, one with images, that captures run on. They change no weight and
        no state of an optimizer. `notify` is told of batches that run without a graph."""
        device = next(model.parameters()).device
        self.model, self.optimizers, self.capacities, self.max_grad_norm = model, optimizers, capacities, max_grad_norm
        self.notify, self.without_graph = notify, 0  # batches that there was no room for
        self._draws = any(isinstance(module, LoRALinear) and module.dropout for module in model.modules())
        self._shown = empty_batch(capacities, device, self._draws)
        self._text = empty_batch(capacities.without_images, device, self._draws) if self._shown.has_images else self._shown
        self._labels, self._loss, self._norm, self._found_inf = (torch.zeros((), device=device) for _ in range(4))
        self._figures = torch.zeros(3, device=device)
        for optimizer in optimizers:
            optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]  # as torch's GradScaler tells it
            for group in optimizer.param_groups:
                group |= {"lr": torch.zeros((), device=device), "capturable": True}
        model.zero_grad(set_to_none=True)
        batches = {batch.has_images: fixed(batch.with_draws(0, 0), capacities) for batch in made_up}
        self._labels.fill_(1.0)
        moved = {images: self._moved_by(batch) for images, batch in batches.items()}
        self._parameters = {images: [p for p in model.parameters() if p in moved[False] or p in moved[images]] for images in moved}
        for p in {p for found in moved.values() for p in found}:
            p.grad = torch.zeros_like(p)
        self._passes, self._verdicts, self._applies = (dict[bool, Work]() for _ in range(3))
        for images, batch in batches.items():
            self._load(batch)
            self._passes[images] = capture(partial(self._pass, self._shown if images else self._text))
        for images, parameters in self._parameters.items():
            self._verdicts[images] = capture(partial(self._judge, parameters))
            self._found_inf.fill_(1.0)  # so that running it changes nothing
            self._applies[images] = capture(partial(self._apply, parameters))
        model.zero_grad(set_to_none=False)
        self._loss.zero_()

    def update(
        self, data: Step, seed: int, step: int, before_update: Callable[[float, float, Outcome], object] = lambda *_: None
    ) -> Report:
        """`step.update`, by graphs."""
        if data.counts.supervised == 0:
            return Report(None, None, "no targets", data.counts)
        running = [i for i, slot in enumerate(data.slots) if slot.counts.supervised]
        images = any(data.slots[i].image_gradients for i in running)
        self._labels.fill_(data.counts.supervised)
        arriving = on_device((self._ready(data.batches[i], seed, step) for i in running), self._loss.device)
        for i in running:
            with fitting(partial(batch_description, data.batches[i], f"micro-batch {i} of step {step + 1}")):
                _, batch = next(arriving)
                if len(batch.tokens_T) == self.capacities.tokens:
                    self._load(batch)
                    self._passes[batch.has_images]()
                else:
                    self._count_without(batch)
                    self._pass(batch)
        self._verdicts[images]()
        loss, norm, finite = self._figures.tolist()  # the one wait for the device in a step
        outcome: Outcome = "applied" if finite else "not finite"
        before_update(loss, norm, outcome)
        self._applies[images]()
        return Report(loss, norm, outcome, data.counts)

    def _ready(self, batch: Batch, seed: int, step: int) -> Batch:
        """A batch on the host as it is computed with: padded, if there is room."""
        batch = batch.with_draws(seed, step) if self._draws else batch
        return fixed(batch, self.capacities) if self.capacities.fit(batch) else batch

    def _count_without(self, batch: Batch) -> None:
        """Count a batch that there is no room for, and say so the first time, the second, the fourth, the eighth ..."""
        self.without_graph += 1
        if self.without_graph & (self.without_graph - 1) == 0:
            room, ran = self.capacities, counted(self.without_graph, "micro-batch", "micro-batches")
            self.notify(
                f"cuda_graph: {ran} ran without a graph, with the same results. The last has {counted(len(batch.ids), 'document')} and "
                f"{counted(len(batch.grids_N2), 'image')}; there is room for {room.documents - 1:,} and {room.images:,}"
            )

    def _load(self, batch: Batch) -> None:
        """Copy a batch to where its graph reads it. Rows of patches that it does not have keep what was there."""
        target = self._shown if batch.has_images else self._text
        for name, there in vars(target).items():
            given = getattr(batch, name)
            if isinstance(there, Tensor) and len(given):
                there[: len(given)].copy_(given, non_blocking=True)

    def _moved_by(self, batch: Batch) -> set[Parameter]:
        """The parameters that a batch like this gives gradients to."""
        self._load(batch)
        self._pass(self._shown if batch.has_images else self._text)
        found = {p for p in self.model.parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found

    # ---- what is captured

    def _pass(self, batch: Batch) -> None:
        loss = self.model(batch).out / self._labels
        if loss.requires_grad:  # text alone never reaches a projector or tower that learns alone
            loss.backward()
        self._loss += loss.detach()

    def _judge(self, parameters: Sequence[Parameter]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._norm.copy_(torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros_like(self._norm))
        finite = (self._loss.isfinite() & self._norm.isfinite()).float()
        self._found_inf.copy_(1 - finite)
        self._figures.copy_(torch.stack([self._loss, self._norm, finite]))

    def _apply(self, parameters: Sequence[Parameter]) -> None:
        with _only(self.model, parameters):
            if self.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, self._norm)
            for optimizer in self.optimizers:
                optimizer.step()
            if parameters:
                torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])  # pyright: ignore[reportPrivateImportUsage]
            self._loss.zero_()


@contextmanager
def _only(model: nn.Module, parameters: Collection[Parameter]) -> Iterator[None]:
    """While it is entered, no other parameter has a gradient: the optimizer leaves it alone."""
    used = {id(p) for p in parameters}
    others: list[tuple[Any, Tensor]] = [(p, p.grad) for p in model.parameters() if p.grad is not None and id(p) not in used]
    for p, _ in others:
        p.grad = None
    yield
    for p, gradient in others:
        p.grad = gradient
