"""Training, top to bottom. Read this file first."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from eyeline.bundle.computing import choose_kernels
from eyeline.checkpoint import store
from eyeline.core.batch import Batch
from eyeline.core.errors import NotFinite, OutOfMemory, Refused, Stopped, StorageFailed, fitting
from eyeline.core.files import make_folder, write_json
from eyeline.core.log import say
from eyeline.core.randomness import seed_for
from eyeline.core.step import Step
from eyeline.data.counts import count_steps, forget_step_count
from eyeline.data.index_progress import index_first
from eyeline.data.loader import check_rejects_at_end, training_steps
from eyeline.data.reader import reader_of
from eyeline.data.validation import validation_batches
from eyeline.models import flops
from eyeline.models.moe import biases_of
from eyeline.parallel.launch import Machine, deterministic_or_refused, machine
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train import metrics
from eyeline.train.display import Display, display
from eyeline.train.metrics import Clock, StepFigures
from eyeline.train.optim import load_state_tensors, make_optimizers, set_learning_rates, state_tensors, without_state
from eyeline.train.run import Run, Stage
from eyeline.train.schedule import factor
from eyeline.train.start import (
    COMPUTE,
    Home,
    announce,
    begin,
    build,
    refuse_changed_data,
    refuse_changed_past,
    refuse_strangers,
    smaller,
    tensors_of,
)
from eyeline.train.step import Report, update, validate
from eyeline.train.stop import StopSignal, sole_owner
from eyeline.train.summary import Tally, stage_lines, stage_record
from eyeline.train.trainable import adapters_of, prepare, rates, table, trained_in_full


@dataclass(frozen=True)
class State:
    """Where a run stands, beside its tensors. Plain values: this is `state.json` of a checkpoint."""

    stage: int = 0
    step: int = 0  # steps done in the stage
    global_step: int = 0  # steps done in all
    data: dict[str, Any] | None = None  # the reader's own state; None at the start of a stage
    not_finite: int = 0  # steps dropped so far
    best: float | None = None  # lowest validation loss of this stage


def train(run: Run, now: Callable[[], float] = time.monotonic) -> None:
    """Train `run` in its folder, from where the newest checkpoint there stands. `now` is the clock, in seconds.

    Raises Refused before anything is written if the folder holds another run; Stopped after a signal, with all saved.
    """
    clock = Clock(now)
    here = machine(run.device, run.threads, run.deterministic)
    folder = run_folder(run)
    refuse_strangers(folder)
    make_folder(folder)
    console = Console()
    with sole_owner(folder):
        with clock.spending("startup"):
            home = begin(run, folder)
            checkpoint = store.newest(home.checkpoints, home.id)
            refuse_changed_past(run, home, checkpoint)
            changed = announce(run, home, here, checkpoint)
        begun = f"resumed from step {checkpoint.step}" if checkpoint else "from the start"
        if checkpoint and checkpoint.state["stage"] == len(run.stages):
            begun = "nothing is left to train"
        say(f"{folder}: {begun}, {run.precision} on {here.device.type} ({here.name}, threads: {here.threads})")
        for line in changed:
            say(f"changed since: {line}")
        if home.encoder.template.notice:
            say(home.encoder.template.notice)
        say(f"checkpoints: {saves(run)}")
        show, tally = display(console, run.logging_steps), Tally()
        stop = StopSignal(show.stopping)
        stop.done = stop.saved = checkpoint.state["global_step"] if checkpoint else 0
        try:
            while checkpoint is None or checkpoint.state["stage"] < len(run.stages):
                if stop.asked:
                    done = f"{checkpoint.state['global_step']} steps are saved" if checkpoint else "no step was done"
                    raise Stopped(f"stopped by {stop.asked}; {done}, and the same command resumes from there")
                try:
                    train_stage(run, home, here, checkpoint, clock, show, tally, console, stop)
                except OutOfMemory as error:
                    raise OutOfMemory(f"{error}. {smaller(run, home, checkpoint.state['stage'] if checkpoint else 0)}") from error
                checkpoint = store.newest(home.checkpoints, home.id)
        finally:
            stop.close()
            show.close()
    say(tally.line(checkpoint.state["global_step"]))
    say(f"saved: {checkpoint.folder}")


def saves(run: Run) -> str:
    """When checkpoints are written, in words."""
    times = [f"every {run.save_minutes:g} minutes (save_minutes)"] if run.save_minutes else []
    times += [f"every {run.save_steps:,} steps (save_steps)"] if run.save_steps else []
    return ", ".join([*times, "at the end of each stage, and when a signal stops the run"])


def run_folder(run: Run) -> Path:
    """Where a run keeps its files."""
    return Path(run.out or f"runs/{run.name}")


def train_stage(
    run: Run,
    home: Home,
    here: Machine,
    checkpoint: store.Checkpoint | None,
    clock: Clock,
    show: Display,
    tally: Tally,
    console: Console,
    stop: StopSignal,
) -> None:
    """Build the model of the stage that the checkpoint stands in, and train to the stage's end, or until a stop is asked.

    A stage border is a checkpoint and a rebuild: going on to the next stage and resuming a run are this same code.
    """
    with clock.spending("startup"), fitting("the model with its optimizer's state"):
        state = State(**checkpoint.state["progress"]) if checkpoint else State()
        stage = run.stages[state.stage]
        model, facts, adapters = build(run, home, here, checkpoint)
        rows = prepare(model, facts, run, state.stage, adapters)
        choose_kernels(model, here, COMPUTE[run.precision], trains=True)
        arithmetic = flops.count(model, facts)
        optimizers = make_optimizers(model, facts, stage.optimizer)
        if checkpoint and state.step > 0:
            tensors = checkpoint.load("optimizer")
            # a checkpoint of an earlier version does not say which parameters have none: those that it has nothing of
            unsaid = {name for name in without_state(optimizers) if not any(key.startswith(f"{name}:") for key in tensors)}
            load_state_tensors(optimizers, tensors, checkpoint.state.get("without_state", unsaid), str(checkpoint.folder))
        seed = seed_for(run.seed, "stage", state.stage)
        reader = reader_of(
            stage.data, home.encoder, facts.image, seed, home.folder, facts.max_positions, arithmetic.cost(), notify=show.status
        )
        steps = stage.steps or count_steps(reader, stage.batch.budget, stage.batch.packs_per_step, stage.epochs or 0)
        if state.step >= steps:
            raise Refused(f"stage {stage.name} has {steps} steps and has already done {state.step}; raise steps, or leave it unchanged")
        if checkpoint:
            refuse_changed_data(run, home.folder, reader, checkpoint.state)
    console.print(table(stage, rows, console.width))
    show.status("first step: reading and indexing data")
    with clock.spending("data_wait"):
        index_first(reader, stage.batch.budget, state.data)
    record = stage_record(run, state.stage, steps, rows, reader, home.bundle)
    metrics.write(home.folder, record | {"global_step": state.global_step}, home.attempt)
    for line in stage_lines(record):
        show.note(line)
    show.status("first step: decoding images")

    model.train()
    saved_at, first = clock.now(), state.step + 1
    arriving = training_steps(reader, stage.batch.budget, stage.batch.packs_per_step, stage.epochs, state.data)
    for data in timed(arriving, clock):
        set_learning_rates(optimizers, rates(stage), at := factor(stage.schedule, state.step, steps))
        with clock.spending("compute"), deterministic_or_refused():
            report = update(
                model,
                optimizers,
                data,
                ONE_DEVICE,
                max_grad_norm=stage.max_grad_norm,
                balance=stage.experts,
                seed=run.seed,
                step=state.global_step,
            )
        if report.outcome == "not finite":
            keep_evidence(home, state, report, data.batches)
        state = replace(
            state,
            step=state.step + 1,
            global_step=state.global_step + 1,
            data=data.state,
            not_finite=state.not_finite + (report.outcome == "not finite"),
        )
        stop.done = state.global_step
        ended = state.step == steps
        if ended:
            check_rejects_at_end(reader, data.state)  # before it is saved: a stage that must not end like this has not ended
        better = False
        if run.validation_steps and reader.validates and (state.step % run.validation_steps == 0 or ended):
            show.status("validating")
            with clock.spending("validation"):
                loss, labels = validate(model, validation_batches(reader, stage.batch.budget), ONE_DEVICE)
            better = math.isfinite(loss) and (state.best is None or loss < state.best)
            state = replace(state, best=loss if better else state.best)
            write_validation(home, stage, state, loss, labels, show)
            tally.validated(stage.name, state.step, loss, state.best)
        over = state.not_finite > run.max_nonfinite_steps
        leaving = ended or over or stop.asked is not None  # read once: a signal after this line is for the next step
        due = run.save_minutes is not None and clock.now() - saved_at >= 60 * run.save_minutes
        if leaving or better or due or (run.save_steps and state.step % run.save_steps == 0):
            show.status("saving a checkpoint")
            with clock.spending("checkpoint"), fitting(f"the checkpoint of step {state.global_step}"):
                save(run, home, model, optimizers, stage, state, ended=ended, best=better)
            stop.saved, saved_at = state.global_step, clock.now()

        figures = StepFigures(
            stage=stage.name,
            stage_index=state.stage,
            step=state.step,
            steps=steps,
            global_step=state.global_step,
            report=report,
            lr={part: rate * at for part, rate in rates(stage).items()},
            seconds=clock.lap(),
            memory_bytes=here.memory_bytes(),
            rejected=reader.rejects.rejected,
            flops=sum((arithmetic.of(batch) for batch in data.batches), flops.NONE),
            peak=flops.peak_of(here.name) if run.precision == "bf16" else None,
            imbalance=data.imbalance,
            epoch=data.epoch,
        )
        metrics.write(home.folder, figures.line(), home.attempt)
        show.step(figures)
        if reader.rejects.rejected and (ended or state.step == first):
            show.note(f"{stage.name}: {reader.rejects.said()}")
        tally.step(figures)
        if over:
            raise NotFinite(
                f"{state.not_finite} steps had a loss or gradient that is not finite, more than "
                f"max_nonfinite_steps={run.max_nonfinite_steps}. "
                f"None was applied; their batches are described in {home.folder / 'not_finite'}. Look at those samples, or lower the "
                "learning rate."
            )
        if leaving:
            return
    forget_step_count(reader, stage.batch.budget, stage.batch.packs_per_step, stage.epochs or 0)
    raise StorageFailed(
        f"the data of stage {stage.name} ended after {state.step} steps, but {steps} were planned: files or images have changed since. "
        "Restore them, and run the same command again: it resumes from the last checkpoint"
    )


def timed(arriving: Iterable[Step], clock: Clock) -> Iterator[Step]:
    """The same items, with the time until each arrives counted as data wait."""
    iterator = iter(arriving)
    while True:
        with clock.spending("data_wait"), fitting("a batch (of batch.max_tokens and batch.max_patches)"):
            item = next(iterator, None)
        if item is None:
            return
        yield item


def save(run: Run, home: Home, model: nn.Module, optimizers: list, stage: Stage, state: State, *, ended: bool, best: bool) -> None:
    """Write a checkpoint: after the last step of a stage it already stands at the start of the next one."""
    biases = biases_of(model)
    learns = {name for name, p in model.named_parameters() if p.requires_grad} | biases.keys()
    tensors = tensors_of(model)
    progress = State(stage=state.stage + 1, global_step=state.global_step, not_finite=state.not_finite) if ended else state
    adapters = {part: lora.model_dump(mode="json") for part, lora in adapters_of(stage).items()}
    store.save(
        home.checkpoints,
        run=home.id,
        step=state.global_step,
        files={
            "model": {name: tensor for name, tensor in tensors.items() if name in learns},
            "frozen": {name: tensor for name, tensor in tensors.items() if name not in learns},
            "optimizer": {} if ended else state_tensors(optimizers),
        },
        state={
            "stage": progress.stage,
            "global_step": state.global_step,
            "lora": adapters,
            "trained": trained_in_full(run.stages[: state.stage + 1]),
            "expert_biases": bool(biases),
            "without_state": [] if ended else without_state(optimizers),
            "progress": vars(progress),
        },
        save_total_limit=run.save_total_limit,
        best=best,
        fixed={"frozen": f"stage {state.stage} of {home.id}"},
    )


def keep_evidence(home: Home, state: State, report: Report, micro_batches: tuple[Batch, ...]) -> None:
    """A file that says which samples made a step that is not finite, and where the data stood before it."""
    make_folder(home.folder / "not_finite")
    evidence = {
        "step": state.global_step + 1,
        "loss": str(report.loss),
        "grad_norm": str(report.grad_norm),
        "samples": [list(batch.ids) for batch in micro_batches],
        "data_before": state.data,
    }
    write_json(home.folder / "not_finite" / f"step-{state.global_step + 1:08d}.json", evidence)


def write_validation(home: Home, stage: Stage, state: State, loss: float, labels: int, show: Display) -> None:
    """One line of metrics, one line on the screen."""
    shown = loss if math.isfinite(loss) else None  # JSON has no NaN
    line = {
        "kind": "validation",
        "stage": stage.name,
        "stage_index": state.stage,
        "step": state.step,
        "global_step": state.global_step,
        "loss": shown,
        "supervised": labels,
    }
    metrics.write(home.folder, line, home.attempt)
    best = " (best)" if state.best == loss else ""
    show.note(f"{stage.name} {state.step}: validation loss {loss:.4f} over {labels:,} supervised tokens{best}")
