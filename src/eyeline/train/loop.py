"""Training, top to bottom. Read this file first."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from eyeline.checkpoint import store
from eyeline.core.errors import NotFinite, OutOfMemory, Stopped, StorageFailed, fitting
from eyeline.core.files import make_folder
from eyeline.core.log import say
from eyeline.core.step import Step
from eyeline.core.words import counted
from eyeline.data.counts import forget_step_count
from eyeline.data.loader import check_rejects_at_end
from eyeline.data.validation import validation_batches
from eyeline.models import flops
from eyeline.parallel.join import joined, lost_ranks, started
from eyeline.parallel.launch import Machine, deterministic_or_refused, machine
from eyeline.parallel.mesh import mesh_of
from eyeline.parallel.ranks import ONE_DEVICE, ranks_of
from eyeline.parallel.watch import watched, where_ranks_are
from eyeline.train.display import Display, display
from eyeline.train.evidence import EVIDENCE, keep_evidence
from eyeline.train.metrics import Clock, StepFigures, rank_line
from eyeline.train.optim import set_learning_rates
from eyeline.train.run import Run, Stage
from eyeline.train.saving import finish_save, save
from eyeline.train.schedule import factor
from eyeline.train.stage import Process, StageRun, State, begin_stage
from eyeline.train.start import Home, announce, refuse_changed_past, refuse_strangers, smaller, start_run
from eyeline.train.step import Report, update, validate
from eyeline.train.stop import StopSignal, sole_owner
from eyeline.train.stragglers import OwnTime, OwnTimes
from eyeline.train.summary import Tally
from eyeline.train.trainable import rates


def train(run: Run, now: Callable[[], float] = time.monotonic) -> None:
    """Train `run` in its folder, from where the newest checkpoint there stands. `now` is the clock, in seconds.

    Raises Refused before anything is written if the folder holds another run; Stopped after a signal, with all saved.
    """
    clock = Clock(now)
    place = started()
    here = machine(run.device, run.threads, run.deterministic, place)
    with joined(place, here.device.type, 60 * run.mesh.timeout_minutes) as world, ExitStack() as stack:
        mesh = world.by_each(lambda: mesh_of(run.mesh, world, here.device.type, run.packs_per_step))
        folder = run_folder(run)
        world.by_first(lambda: stack.enter_context(owned(folder)))
        with clock.spending("startup"):
            home = start_run(run, folder, world)
            checkpoint = store.newest(home.checkpoints, home.id, world=world)
            world.by_first(lambda: refuse_changed_past(run, home, checkpoint))
            changed = world.by_first(lambda: announce(run, home, here, checkpoint, world))
        console = Console(quiet=not world.first)
        for line in first_lines(run, home, here, world.size, checkpoint, changed) if world.first else ():
            say(line)
        show, tally = display(console, run.logging_steps), Tally()
        stop = StopSignal(show.stopping, once_s=5.0 if world.size > 1 else 0.0)
        ranks = ONE_DEVICE if mesh is None else ranks_of(mesh)
        process = Process(run, home, here, clock, console, show, tally, stop, world, mesh, ranks)
        stop.done = stop.saved = checkpoint.state["global_step"] if checkpoint else 0
        at = folder / "ranks"
        stack.enter_context(lost_ranks(world, lambda: where_ranks_are(at, world)))
        stack.enter_context(watched(at, world, lambda: {"step": stop.done, "phase": clock.phase}))
        try:
            checkpoint = train_stages(process, checkpoint)
        finally:
            process.saving.abandon(world.first)
            stop.close()
            show.close()
        if world.first:
            say(tally.line(checkpoint.state["global_step"]))
            say(f"saved: {checkpoint.folder}")


def train_stages(process: Process, checkpoint: store.Checkpoint | None) -> store.Checkpoint:
    """Train the stages that are left, each from the checkpoint before it; the last checkpoint."""
    run, stop, world = process.run, process.stop, process.world
    while checkpoint is None or checkpoint.state["stage"] < len(run.stages):
        stop.hear(world.gather_patiently(stop.asked))
        if stop.asked:
            done = f"{counted(checkpoint.state['global_step'], 'step')} saved" if checkpoint else "no step was done"
            raise Stopped(f"stopped by {stop.asked}; {done}, and the same command resumes from there")
        try:
            train_stage(process, checkpoint)
        except OutOfMemory as error:
            raise OutOfMemory(f"{error}. {smaller(run, process.home, checkpoint.state['stage'] if checkpoint else 0)}") from error
        checkpoint = store.newest(process.home.checkpoints, process.home.id, world=world)
    return checkpoint


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """The run folder, made where there is none, for this process alone. Refused if it is not one."""
    refuse_strangers(folder)
    make_folder(folder)
    with sole_owner(folder):
        yield


def first_lines(run: Run, home: Home, here: Machine, ranks: int, checkpoint: store.Checkpoint | None, changed: list[str]) -> Iterator[str]:
    """What is said before the first stage. `changed`: settings that are not those of the attempt before."""
    begun = f"resumed from step {checkpoint.step}" if checkpoint else "from the start"
    if checkpoint and checkpoint.state["stage"] == len(run.stages):
        begun = "nothing is left to train"
    many = f"{ranks} ranks, each on " if ranks > 1 else ""
    yield f"{home.folder}: {begun}, {run.precision} on {many}{here.device.type} ({here.name}, threads: {here.threads})"
    yield from (f"changed since: {line}" for line in changed)
    if home.encoder.template.notice:
        yield home.encoder.template.notice
    yield f"checkpoints: {saves(run)}"


def saves(run: Run) -> str:
    """When checkpoints are written, in words."""
    times = [f"every {run.save_minutes:g} minutes (save_minutes)"] if run.save_minutes else []
    times += [f"every {counted(run.save_steps, 'step')} (save_steps)"] if run.save_steps else []
    return ", ".join([*times, "at the end of each stage, and when a signal stops the run"])


def run_folder(run: Run) -> Path:
    """Where a run keeps its files."""
    return Path(run.out or f"runs/{run.name}")


def train_stage(process: Process, checkpoint: store.Checkpoint | None) -> None:
    """Train the stage that the checkpoint stands in to its end, or until a stop is asked."""
    run, home, clock, stop = process.run, process.home, process.clock, process.stop
    state = State(**checkpoint.state["progress"]) if checkpoint else State()
    running = begin_stage(process, checkpoint, state)
    stage, model = running.stage, running.plan.model
    saved_at, first = clock.now(), state.step + 1
    for step in timed_steps(running.steps_from(state), clock, running.own_time):
        set_learning_rates(running.optimizers, rates(stage), at := factor(stage.schedule, state.step, running.steps))
        with clock.spending("compute"), deterministic_or_refused():
            report = update(
                model,
                running.optimizers,
                step,
                process.ranks,
                max_grad_norm=stage.max_grad_norm,
                balance=stage.experts,
                seed=run.seed,
                step=state.global_step,
                before_update=partial(examine, process, running, state, step),
            )
        state = next_state(state, step, report)
        stop.done = state.global_step
        ended = state.step == running.steps
        if ended:
            check_rejects_at_end(running.reader, step.state)  # before it is saved: a stage that must not end like this has not ended
        better = False
        if run.validation_steps and running.reader.validates and (state.step % run.validation_steps == 0 or ended):
            state, better = run_validation(process, running, state)
        over = state.not_finite > run.max_nonfinite_steps
        due = run.save_minutes is not None and clock.now() - saved_at >= 60 * run.save_minutes
        border = at_border(process, running, step, due)
        leaving = ended or over or border.stop is not None
        if border.written:
            finish_save(process)
        if leaving or better or border.due or (run.save_steps and state.step % run.save_steps == 0):
            save(process, running, state, ended=ended, best=better, waits=leaving or not run.async_save)
            saved_at = clock.now()
        show_step(process, running, state, step, report, border, at, tells_rejects=ended or state.step == first)
        if over:
            raise NotFinite(
                f"{counted(state.not_finite, 'step')} had a loss or gradient that is not finite, more than "
                f"max_nonfinite_steps={run.max_nonfinite_steps}. None was applied; {home.folder / EVIDENCE} says which samples they had. "
                "`eyeline replay` of a folder there says where it comes from; or lower the learning rate."
            )
        if leaving:
            return
    forget_step_count(running.reader, stage.batch.budget, stage.batch.packs_per_step, stage.epochs or 0)
    raise StorageFailed(
        f"the data of stage {stage.name} ended after {counted(state.step, 'step')}, but {running.steps:,} were planned: "
        "files or images have changed since. Restore them, and run the same command again: it resumes from the last checkpoint"
    )


class Border(NamedTuple):
    """What ranks agree on between two steps."""

    stop: str | None  # the signal that asks for an end, on whatever rank. Asked once: a signal after that is for the next step
    due: bool  # a checkpoint, by the clock of rank 0
    flops: flops.Flops  # of all ranks' batches
    memory_bytes: int  # of the rank that has the most in use
    written: bool  # the checkpoint that is being saved meanwhile, on all ranks
    own: OwnTimes  # what this rank did by itself
    slow_ranks: tuple[int, ...] = ()  # known to rank 0


def at_border(process: Process, running: StageRun, step: Step, due: bool) -> Border:
    """Tell the other ranks, and hear what all agree on."""
    counted = sum((running.arithmetic.of(batch) for batch in step.batches), flops.NONE)
    written, own = process.saving.ready, running.own_time.lap(counted.by_part.get("language", 0.0))
    borders = process.world.gather(Border(process.stop.asked, due, counted, process.here.memory_bytes(), written, own))
    process.stop.hear(one.stop for one in borders)
    return Border(
        stop=process.stop.asked if any(one.stop for one in borders) else None,
        due=borders[0].due,
        flops=sum((one.flops for one in borders), flops.NONE),
        memory_bytes=max(one.memory_bytes for one in borders),
        written=all(one.written for one in borders),
        own=own,
        slow_ranks=running.stragglers.add([one.own for one in borders]) if process.world.first else (),
    )


def examine(process: Process, running: StageRun, state: State, step: Step, loss: float, norm: float, finite: bool) -> None:
    """Keep what a step needs to be run again, before it changes the weights, if it is not finite or its loss is a spike."""
    spike = running.spikes.add(loss) and finite
    if spike or not finite:
        keep_evidence(process, running, state, step.batches, "spike" if spike else "not finite", loss, norm)


def next_state(state: State, step: Step, report: Report) -> State:
    """The state once a step is done."""
    dropped = state.not_finite + (report.outcome == "not finite")
    return replace(state, step=state.step + 1, global_step=state.global_step + 1, data=step.state, not_finite=dropped)


def run_validation(process: Process, running: StageRun, state: State) -> tuple[State, bool]:
    """Validate; the state with the best loss so far, and whether this one is it."""
    process.show.status("validating")
    with process.clock.spending("validation"):
        loss, labels = validate(running.plan.model, validation_batches(running.reader, running.stage.batch.budget), process.ranks)
    better = math.isfinite(loss) and (state.best is None or loss < state.best)
    state = replace(state, best=loss if better else state.best)
    write_validation(process.home, running.stage, state, loss, labels, process.show)
    process.tally.validated(running.stage.name, state.step, loss, state.best)
    return state, better


def show_step(
    process: Process, running: StageRun, state: State, step: Step, report: Report, border: Border, at: float, *, tells_rejects: bool
) -> None:
    """The step's figures on the screen and in metrics.jsonl. `at`: the schedule's factor of the learning rates."""
    stage, rejects = running.stage, running.reader.rejects
    figures = StepFigures(
        stage=stage.name,
        stage_index=state.stage,
        step=state.step,
        steps=running.steps,
        global_step=state.global_step,
        report=report,
        lr={part: rate * at for part, rate in rates(stage).items()},
        seconds=process.clock.lap(),
        memory_bytes=border.memory_bytes,
        rejected=rejects.rejected,
        flops=border.flops,
        peak=running.peak and running.peak * process.world.size,
        imbalance=step.imbalance,
        epoch=step.epoch,
        spike=running.spikes.last,
        slow_ranks=border.slow_ranks,
    )
    if process.run.metrics_for_all_ranks:
        process.home.record_rank(process.world.rank, rank_line(figures, step, border.own))
    for line in running.stragglers.news():
        process.show.note(line)
    process.home.record(figures.line())
    process.show.step(figures)
    if rejects.rejected and tells_rejects:
        process.show.note(f"{stage.name}: {rejects.summary()}")
    process.tally.step(figures)


def timed_steps(arriving: Iterable[Step], clock: Clock, own: OwnTime) -> Iterator[Step]:
    """The same items, with the time until each arrives counted as data wait."""
    iterator = iter(arriving)
    while True:
        with clock.spending("data_wait"), own.waiting(), fitting("a batch (of batch.max_tokens and batch.max_patches)"):
            item = next(iterator, None)
        if item is None:
            return
        yield item


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
    home.record(line)
    best = " (best)" if state.best == loss else ""
    show.note(f"{stage.name} {state.step}: validation loss {loss:.4f} over {labels:,} supervised tokens{best}")
