"""`eyeline replay`: run a step again, on one device, that a run has kept since it was not finite or its loss was a spike, and say where
the first number that is not finite comes from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyeline.bundle.bundle import read_description, refuse_other_version
from eyeline.bundle.computing import choose_kernels
from eyeline.checkpoint import store
from eyeline.core.batch import Batch
from eyeline.core.errors import Refused
from eyeline.core.files import read_object
from eyeline.core.log import say
from eyeline.core.step import step_of
from eyeline.core.words import counted
from eyeline.parallel.launch import machine
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train.evidence import STEP, WEIGHTS, batches_in
from eyeline.train.loss_scale import unscale
from eyeline.train.run import COMPUTE, Run, from_yaml
from eyeline.train.stage import model_of
from eyeline.train.start import Home
from eyeline.train.step import add_gradients

LISTED = 5  # lines of a kind


def replay(folder: Path) -> bool:
    """Print what the step of this folder does here; whether something in it is not finite."""
    if not (folder / STEP).is_file():
        raise Refused(f"{folder} is not a step that a run has kept: it has no {STEP}. Give a folder such as RUN/evidence/step-00000012")
    record, batches, of_run = read_object(folder / STEP), batches_in(folder), folder.absolute().parents[1]
    run, home = _run_in(of_run)
    here = machine(run.device, run.threads, run.deterministic)
    checkpoint = _weights(folder, home)
    if checkpoint is not None and checkpoint.state["stage"] != record["stage_index"]:
        raise Refused(f"the weights of step {record['step']:,} were not kept, and those of its stage are gone. Raise keep_bad_steps")
    plan = model_of(run, home, here, checkpoint, record["stage_index"])
    choose_kernels(plan.model, here, COMPUTE[run.precision], trains=True, quiet=True)
    stage, before = run.stages[record["stage_index"]], record["step"] - 1
    exact = checkpoint.step if checkpoint else 0
    say(f"step {record['step']:,} of {of_run}, {record['kind']}: loss {record['loss']}, gradient norm {record['grad_norm']}")
    say(f"replayed in one process on {here.device.type} ({here.name}), {run.precision}, with the weights of step {exact:,}")
    if exact != before:
        say(f"warning: the step had the weights of step {before:,}, which were not kept: numbers differ")
    wrong = list(_wrong_tensors(plan.model.named_parameters())) + list(_wrong_tensors(plan.model.named_buffers()))
    for line in wrong[:LISTED]:
        say(f"weights: {line}")
    plan.model.train()
    trace = Trace(plan.model, batches)
    step = step_of(batches, [batch.pack for batch in batches], [[batch.counts for batch in batches]], [[(0, 0)]] * len(batches), {}, None)
    scale = record.get("loss_scale")
    sums = add_gradients(plan.model, step, ONE_DEVICE, stage.experts, run.seed, before, scale)
    parameters = [p for p in plan.model.parameters() if p.grad is not None]
    unscale(parameters, scale or 1.0)
    norm = float(ONE_DEVICE.norm(parameters))
    for line in (*trace.lines(), *_gradients(plan.model)):
        say(line)
    trace.close()
    loss = float(sums.loss - sums.added)
    say(f"loss {loss:.6g}, gradient norm {norm:.6g}")
    found = bool(wrong) or trace.first is not None or not _finite(torch.tensor([loss, norm]))
    if not found:
        say("everything is finite here" + (": look at the device that it was computed on" if record["kind"] == "not finite" else ""))
        for line in _document_losses(plan.model, batches, run.seed, before):
            say(line)
    return found


def _run_in(folder: Path) -> tuple[Run, Home]:
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        raise Refused(f"{folder} is not a run folder: it has no recipe.yaml. A step is replayed inside the folder of its run")
    refuse_other_version(folder / "model")
    try:
        run = from_yaml(recipe.read_text(encoding="utf-8"), folder)
    except ValueError as error:
        raise Refused(f"{recipe} cannot be read by this version of Eyeline: {error}. Restore it as `eyeline train` wrote it") from error
    bundle = read_description(folder / "model")
    return run, Home(folder, read_object(folder / "env.json")["run"], 0, bundle, bundle.encoder(), writes=False)


def _weights(folder: Path, home: Home) -> store.Checkpoint | None:
    """The weights that were kept with the step, or the newest of the run; None for those that it started from."""
    if (folder / WEIGHTS).is_dir():
        return store.newest(folder / WEIGHTS, home.id)
    return store.newest(home.checkpoints, home.id, hold=True)


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _wrong_tensors(named: Iterator[tuple[str, Tensor]]) -> Iterator[str]:
    for name, x in named:
        if x.is_floating_point() and not _finite(x):
            wrong = ~x.isfinite()
            first = ", ".join(map(str, wrong.nonzero()[0].tolist()))
            yield f"{name}: {counted(int(wrong.sum()), 'number')} not finite, the first at [{first}]"


def _gradients(model: nn.Module) -> Iterator[str]:
    wrong = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]
    if wrong:
        more = f", and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        yield f"gradients that are not finite: {counted(len(wrong), 'parameter')}, {', '.join(wrong[:LISTED])}{more}"


@dataclass(frozen=True)
class Found:
    """A tensor that has numbers which are not finite."""

    what: str  # "the output of language.blocks.0", ...
    wrong: int
    numbers: int
    batch: int  # the micro-batch
    rows: tuple[int, ...]  # of its first dim


class Trace:
    """Watches the inputs and outputs of every module, and the gradients of the outputs, for the first that is not finite."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self.first: Found | None = None
        self._backward: Found | None = None
        self._batches, self._batch = batches, -1
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._next)]
        for name, module in model.named_modules():
            if name:
                self._hooks.append(module.register_forward_pre_hook(lambda _, given, name=name: self._look(given, f"the input of {name}")))
                self._hooks.append(module.register_forward_hook(lambda _, __, out, name=name: self._after(out, name)))

    def _next(self, *_: Any) -> None:
        self._batch += 1

    def _after(self, out: Any, name: str) -> None:
        self._look(out, f"the output of {name}")
        for x in _tensors(out):
            if x.requires_grad and self.first is None:
                x.register_hook(lambda gradient, name=name, batch=self._batch: self._gradient(gradient, name, batch))

    def _look(self, values: Any, what: str) -> None:
        if self.first is None:
            self.first = next((found for x in _tensors(values) if (found := _not_finite(x, what, self._batch))), None)

    def _gradient(self, gradient: Tensor, name: str, batch: int) -> None:
        if self._backward is None and self.first is None:
            self._backward = _not_finite(gradient, f"the gradient of the output of {name}", batch)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def lines(self) -> Iterator[str]:
        self.first, way = (self.first, "forward") if self.first is not None else (self._backward, "backward")
        if (found := self.first) is None:
            return
        batch = self._batches[found.batch]
        where = f"{way} pass, micro-batch {found.batch} (pack {batch.pack})"
        yield f"first not finite: {found.what}, {found.wrong:,} of {counted(found.numbers, 'number')}, in the {where}"
        if samples := _samples(batch, found.rows):
            yield f"its rows belong to {samples}"


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _not_finite(x: Tensor, what: str, batch: int) -> Found | None:
    if not x.is_floating_point() or _finite(x):
        return None
    wrong = ~x.detach().isfinite()
    rows = wrong.reshape(len(wrong), -1).any(1).nonzero().flatten().tolist() if wrong.ndim else []
    return Found(what, int(wrong.sum()), x.numel(), batch, (len(wrong) if wrong.ndim else 0, *rows))


def _samples(batch: Batch, rows: tuple[int, ...]) -> str:
    """The samples that rows belong to, of a tensor with a row per token, per patch or per visual token; else an empty string."""
    length, *wrong = rows or (0,)
    if not wrong or len(wrong) == length:
        return ""
    named: list[str] = []
    if length == len(batch.tokens_T):
        documents = torch.bucketize(torch.tensor(wrong), batch.cu_S1[1:], right=True).unique().tolist()
        named = [batch.ids[n] for n in documents if n < len(batch.ids)]
    elif length == len(batch.patches_PC) or (len(batch.sources_M) and length == int(batch.sources_M.max()) + 1):
        per_row = len(batch.patches_PC) // length
        images = torch.bucketize(torch.tensor(wrong) * per_row, batch.cu_N1[1:], right=True).unique()
        shown = torch.bucketize(batch.sources_M * (len(batch.patches_PC) // (int(batch.sources_M.max()) + 1)), batch.cu_N1[1:], right=True)
        tokens = batch.visual_M[torch.isin(shown, images)]
        named = [batch.ids[n] for n in torch.bucketize(tokens, batch.cu_S1[1:], right=True).unique().tolist() if n < len(batch.ids)]
        named = [f"images of {', '.join(named[:LISTED])}"] if named else []
    more = f", and {len(named) - LISTED} more" if len(named) > LISTED else ""
    return ", ".join(named[:LISTED]) + more


@torch.no_grad()
def _document_losses(model: nn.Module, batches: Sequence[Batch], seed: int, step: int) -> Iterator[str]:
    """The documents with the highest loss per supervised token."""
    device = next(model.parameters()).device
    losses: list[tuple[float, str, int]] = []
    for batch in (batch.with_draws(seed, step) for batch in batches):
        for n, name in enumerate(batch.ids):
            start, end = batch.cu_S1[n : n + 2].tolist()
            own = (batch.rows_L >= start) & (batch.rows_L < end)
            if batch.labels_L is not None and (labels := int(own.sum())):
                alone = replace(batch, rows_L=batch.rows_L[own], labels_L=batch.labels_L[own])
                losses.append((float(model(alone.to(device)).out) / labels, name, labels))
    for loss, name, labels in sorted(losses, reverse=True)[:LISTED]:
        yield f"loss {loss:.4f} over {counted(labels, 'supervised token')}: {name}"
