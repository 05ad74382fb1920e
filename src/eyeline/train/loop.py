"""Training, top to bottom. Read this file first."""

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console

from eyeline.checkpoint import store
from eyeline.core.errors import NotFinite, OutOfMemory, Refused, Stopped, StorageFailed, fitting
from eyeline.core.files import make_folder
from eyeline.core.log import say
from eyeline.core.step import Step
from eyeline.core.words import counted
from eyeline.data.counts import forget_step_count
from eyeline.data.fetch_thread import FetchThread
from eyeline.data.loader import check_rejects_at_end
from eyeline.data.validation import validation_batches
from eyeline.models import flops
from eyeline.parallel.copies import copies_ahead
from eyeline.parallel.idle import device_idle
from eyeline.parallel.join import joined, lost_ranks, sharing, started
from eyeline.parallel.launch import Machine, deterministic_or_refused, machine
from eyeline.parallel.mesh import mesh_of
from eyeline.parallel.ranks import ONE_DEVICE, Ranks, ranks_of
from eyeline.parallel.watch import watched, where_ranks_are
from eyeline.train.auto_batch import with_batches
from eyeline.train.compile import refuse_without_compiler
from eyeline.train.display import display
from eyeline.train.evidence import EVIDENCE, LossSpikes, keep_evidence
from eyeline.train.float8 import refuse_without_float8
from eyeline.train.graph_start import refuse_without_graphs
from eyeline.train.in_backward import refuse_spoiled_weights
from eyeline.train.loss_scale import LossScale, scaling_line
from eyeline.train.metrics import Clock, StepFigures, rank_line, with_starved
from eyeline.train.optim import set_learning_rates
from eyeline.train.run import Run, Stage, to_yaml
from eyeline.train.samples import MAX_NEW_TOKENS, answered_samples, sample_problems, write_samples
from eyeline.train.saving import finish_save, save
from eyeline.train.schedule import factor
from eyeline.train.stage import AtStep, Process, StageRun, State, begin_stage, nothing
from eyeline.train.start import Home, announce, peak_here, refuse_changed_past, refuse_strangers, smaller, start_run
from eyeline.train.step import Outcome, Report, update, validate
from eyeline.train.stop import StopSignal, sole_owner
from eyeline.train.stragglers import OwnTime, OwnTimes
from eyeline.train.summary import Tally
from eyeline.train.top_k import seeing
from eyeline.train.trackers.tracker import About
from eyeline.train.trackers.trackers import Trackers, missing
from eyeline.train.trainable import rank_problems, rates
from eyeline.train.unchanged import NOT_SAMPLED, Same, sampled_weights, unchanged_since


def train(run: Run, now: Callable[[], float] = time.monotonic, process_started: float | None = None, at_step: AtStep = nothing) -> None:
    """Train `run` in its folder, from where the newest checkpoint there stands. `now` is the clock, in seconds; `process_started`: what it
    showed when the process started, if what came before this call belongs to the run's startup. `at_step`: what to call before the data
    of each step arrive, with the steps done and the model: for the profiler.

    Raises Refused before anything is written if the folder holds another run; Stopped after a signal, with all saved.
    """
    clock = Clock(now, process_started)
    place = started()
    here = machine(run.device, run.threads, run.deterministic, place)
    with joined(place, here.device.type, 60 * run.mesh.timeout_minutes) as world, ExitStack() as stack:
        mesh = world.by_each(lambda: mesh_of(run.mesh, world, here.device.type, run.packs_per_step))
        if problems := [*rank_problems(run, world.size)]:
            raise Refused("\n  ".join(problems))
        world.by_each(lambda: refuse_without_compiler(run, here))
        world.by_each(lambda: refuse_without_float8(run, here))
        refuse_without_graphs(run, here)
        folder = run_folder(run)
        world.by_first(lambda: refuse_unanswerable(run, world.size))
        world.by_first(lambda: stack.enter_context(owned(folder)))
        with clock.spending("startup"):
            run = with_batches(run, folder, here, world)
            home = start_run(run, folder, world)
            checkpoint = store.newest(home.checkpoints, home.id, world=world)
            world.by_first(lambda: refuse_changed_past(run, home, checkpoint))
            peak = world.by_first(lambda: peak_here(run, home, here))
            changed = world.by_first(lambda: announce(run, home, here, checkpoint, world, peak, clock.elapsed))
        console = Console(quiet=not world.first)
        for line in first_lines(run, home, here, world.size, checkpoint, changed) if world.first else ():
            say(line)
        show, tally = display(console, run.logging_steps), Tally()
        packs = sharing(world, run.mesh.per_pack, 60 * run.mesh.timeout_minutes, run.mesh.pp)
        stop = StopSignal(show.stopping, once_s=5.0 if world.size > 1 else 0.0)
        ranks = ONE_DEVICE if mesh is None else timed(ranks_of(mesh), clock)
        reachable: float | None = None if peak is None else peak["flops_per_s"] * world.size
        idle = device_idle(here.device, clock.named)
        trackers = Trackers(run.report_to, about(run, home, checkpoint) if run.report_to and world.first else None, run.logging_steps)
        fetching = FetchThread(copies_ahead(here.device, 0 if run.cuda_graph else 1))  # graphs take padded batches
        process = Process(
            run, home, here, clock, console, show, tally, stop, idle, world, mesh, ranks, trackers, at_step, reachable, packs, fetching
        )
        stop.done = stop.saved = checkpoint.state["global_step"] if checkpoint else 0
        at = folder / "ranks"
        stack.enter_context(lost_ranks(world, lambda: where_ranks_are(at, world)))
        stack.enter_context(watched(at, world, lambda: {"step": stop.done, "phase": clock.phase}, 60 * run.mesh.timeout_minutes))
        try:
            checkpoint = train_stages(process, checkpoint)
            record_end(process, "done")
        except Stopped:
            record_end(process, "stopped")
            raise
        finally:
            process.saving.abandon(world.first)
            stop.close()
            show.close()
            trackers.close()
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
            with process.fetching:
                train_stage(process, checkpoint)
        except OutOfMemory as error:
            raise OutOfMemory(f"{error}. {smaller(run, process.home, checkpoint.state['stage'] if checkpoint else 0)}") from error
        checkpoint = store.newest(process.home.checkpoints, process.home.id, world=world)
    return checkpoint


def refuse_unanswerable(run: Run, ranks: int) -> None:
    """Raise Refused where trackers are not installed, or validation samples cannot be answered: before anything is written."""
    if found := [*missing(run.report_to), *sample_problems(run, ranks)]:
        raise Refused("\n".join(found))


def about(run: Run, home: Home, checkpoint: store.Checkpoint | None) -> About:
    """What trackers show of the run itself."""
    resumed_from = checkpoint.state["global_step"] if checkpoint else None
    return About(home.folder, home.id, run.name, run.model_dump(mode="json"), to_yaml(run), resumed_from, run.report_online)


def record_end(process: Process, outcome: Literal["done", "stopped"]) -> None:
    """The last line of an attempt that was not killed, with the seconds since its last step."""
    seconds = {f"{name}_s": value for name, value in process.clock.lap().items() if name != "step"}
    process.record({"kind": "end", "outcome": outcome, "global_step": process.stop.done, **seconds})


def timed(ranks: Ranks, clock: Clock) -> Ranks:
    """The same, with the time that the host spends in each counted as communication."""

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def spent(*arguments: Any) -> Any:
            with clock.spending("communication"):
                return call(*arguments)

        return spent

    calls = {one.name: getattr(ranks, one.name) for one in fields(ranks) if one.name != "pipeline"}
    return replace(ranks, **{name: counted(call) for name, call in calls.items()})


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
    if line := scaling_line(run.precision, checkpoint.state["progress"].get("loss_scale") if checkpoint else None):
        yield line
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
    state = State(**checkpoint.state["progress"]) if checkpoint else first_state(run)
    running = begin_stage(process, checkpoint, state)
    stage, saved_at, first = running.stage, clock.now(), state.step + 1
    process.at_step(state.global_step, running.plan.model)
    for step in timed_steps(running.steps_from(state, process.fetching), clock, running.own_time):
        set_learning_rates(running.optimizers, rates(stage), at := factor(stage.schedule, state.step, running.steps))
        report, seen = run_update(process, running, step, state)
        refuse_spoiled_weights(stage, report.outcome != "not finite", state.global_step + 1, home.folder / EVIDENCE)
        state = next_state(state, step, report, running.spikes)
        stop.done = state.global_step
        ended = state.step == running.steps
        if ended:
            process.fetching.settle()
            check_rejects_at_end(running.reader, step.state)  # before it is saved: a stage that must not end like this has not ended
        better = False
        if run.validation_steps and running.reader.validates and (state.step % run.validation_steps == 0 or ended):
            state, better = run_validation(process, running, state)
        over = state.not_finite > run.max_nonfinite_steps or state.spiked > run.max_spike_steps > 0
        due = run.save_minutes is not None and clock.now() - saved_at >= 60 * run.save_minutes
        border = at_border(process, running, step, due, seen.same)
        leaving = ended or over or border.stop is not None
        if border.written:
            finish_save(process)
        if leaving or better or border.due or (run.save_steps and state.step % run.save_steps == 0):
            save(process, running, state, ended=ended, best=better, waits=leaving or not run.async_save)
            saved_at = clock.now()
        show_step(process, running, state, step, report, border, at, seen, tells_rejects=ended or state.step == first)
        if over:
            raise NotFinite(too_many_dropped(run, state, home.folder / EVIDENCE))
        if leaving:
            return
        process.at_step(state.global_step, running.plan.model)
    forget_step_count(running.reader, stage.batch.budget, stage.batch.packs_per_step, stage.epochs or 0)
    raise StorageFailed(
        f"the data of stage {stage.name} ended after {counted(state.step, 'step')}, but {running.steps:,} were planned: "
        "files or images have changed since. Restore them, and run the same command again: it resumes from the last checkpoint"
    )


def first_state(run: Run) -> State:
    """The state of a run that has done no step."""
    return State(loss_scale=LossScale().factor) if run.precision == "fp16" else State()


class Seen(NamedTuple):
    """What is seen of an update, in addition to its report."""

    same: Same  # weights that it left unchanged in bfloat16: on steps that are logged, in bf16
    top_k: dict[str, float] | None  # probabilities of the most likely tokens: on steps that are logged, where they are asked for
    idle_s: float  # seconds for which the device had waited for the host before


def run_update(process: Process, running: StageRun, step: Step, state: State) -> tuple[Report, Seen]:
    """Update the weights; what was done, and what was seen of it."""
    run, stage, model = process.run, running.stage, running.plan.model
    logged = (state.step + 1) % run.logging_steps == 0
    with process.clock.spending("compute"), deterministic_or_refused():
        before = sampled_weights(model) if logged and run.precision == "bf16" else None
        process.idle.update_starts()
        with seeing(model, run.top_k_probabilities if logged else 0) as top_k:
            before_update = partial(examine, process, running, state, step)
            if running.graphs is not None:
                report = running.graphs.update(step, run.seed, state.global_step, before_update)
            else:
                report = update(
                    model,
                    running.optimizers,
                    step,
                    process.ranks,
                    max_grad_norm=stage.max_grad_norm,
                    balance=stage.experts,
                    seed=run.seed,
                    step=state.global_step,
                    before_update=before_update,
                    loss_scale=state.loss_scale,
                )
        idle_s = process.idle.seconds()
        same = unchanged_since(before, model) if before is not None and report.outcome == "applied" else NOT_SAMPLED
        process.idle.update_ended()
    return report, Seen(same, top_k.means(), idle_s)


class Border(NamedTuple):
    """What ranks agree on between two steps."""

    stop: str | None  # the signal that asks for an end, on whatever rank. Asked once: a signal after that is for the next step
    due: bool  # a checkpoint, by the clock of rank 0
    flops: flops.Flops  # of all ranks' batches
    memory: tuple[int, int | None, int | None]  # bytes of the rank that has the most in use, and in reserve; retries of all allocators
    same: Same
    sample_ids: int  # of all ranks' samples
    written: bool  # the checkpoint that is being saved meanwhile, on all ranks
    own: OwnTimes  # what this rank did by itself
    slow_ranks: tuple[int, ...] = ()  # known to rank 0


def at_border(process: Process, running: StageRun, step: Step, due: bool, same: Same) -> Border:
    """Tell the other ranks, and hear what all agree on."""
    counted = sum((running.arithmetic.of(batch) for batch in step.batches), flops.NONE)
    share = len(running.plan.blocks["language"]) / running.plan.spec.language.layers  # of the model's blocks, where ranks have slices
    written, here, own = process.saving.ready, process.here, running.own_time.lap(counted.by_part.get("language", 0.0) * share)
    memory = here.memory_bytes(), here.reserved_bytes(), here.allocator_retries()
    if not process.packs.group.first:  # another rank has told of the same batches
        counted = flops.NONE
    ids = sum(zlib.crc32(name.encode()) for batch in step.batches for name in batch.ids) if process.packs.group.first else 0
    with process.clock.spending("communication"):
        borders = process.world.gather(Border(process.stop.asked, due, counted, memory, same, ids, written, own))
    process.stop.hear(one.stop for one in borders)
    used, reserved, retries = zip(*(one.memory for one in borders), strict=True)
    return Border(
        stop=process.stop.asked if any(one.stop for one in borders) else None,
        due=borders[0].due,
        flops=sum((one.flops for one in borders), flops.NONE),
        memory=(max(used), None if None in reserved else max(reserved), None if None in retries else sum(retries)),
        same=Same(*map(sum, zip(*(one.same for one in borders), strict=True))),
        sample_ids=sum(one.sample_ids for one in borders) % 2**32,
        written=all(one.written for one in borders),
        own=own,
        slow_ranks=running.stragglers.add([one.own for one in borders]) if process.world.first else (),
    )


def examine(process: Process, running: StageRun, state: State, step: Step, loss: float, norm: float, outcome: Outcome) -> Outcome:
    """Keep what a step needs to be run again, before it changes the weights, if it is not finite or its loss is a spike; and what becomes
    of the step: with `max_spike_steps`, one whose loss is a spike is skipped. Losses are of all ranks, which therefore decide alike."""
    spike = running.spikes.add(loss) and outcome == "applied"
    if spike or outcome == "not finite":
        batches = step.batches if process.packs.group.first else ()
        keep_evidence(process, running, state, batches, "spike" if spike else "not finite", loss, norm)
    return "spike" if spike and running.spikes.skips else outcome


def too_many_dropped(run: Run, state: State, evidence: Path) -> str:
    """What a run says that ends because it dropped more steps than it may."""
    if state.not_finite > run.max_nonfinite_steps:
        what = f"{counted(state.not_finite, 'step')} had a loss or gradient that is not finite"
        limit, remedy = f"max_nonfinite_steps={run.max_nonfinite_steps}", f"lower the learning rate{beyond_fp16(run)}"
    else:
        what, limit = f"{counted(state.spiked, 'step')} had a loss spike", f"max_spike_steps={run.max_spike_steps}"
        remedy = "lower the learning rate, clip more (max_grad_norm), or raise max_spike_steps"
    return (
        f"{what}, more than {limit}. None was applied; {evidence} says which samples they had. "
        f"`eyeline replay` of a folder there says where it comes from; or {remedy}."
    )


def beyond_fp16(run: Run) -> str:
    """What else may help against steps that are not finite in fp16."""
    return "; or set precision: bf16 or fp32, since fp16 has no number above 65,504" if run.precision == "fp16" else ""


def next_state(state: State, step: Step, report: Report, spikes: LossSpikes) -> State:
    """The state once a step is done."""
    dropped, spiked = state.not_finite + (report.outcome == "not finite"), state.spiked + (report.outcome == "spike")
    state = replace(state, step=state.step + 1, global_step=state.global_step + 1, data=step.state, not_finite=dropped, spiked=spiked)
    state = replace(state, losses=spikes.losses if spikes.skips else None)
    if state.loss_scale is None or report.outcome == "no targets":
        return state
    scale = LossScale(state.loss_scale, state.good_steps).after(report.outcome in ("applied", "spike"))
    return replace(state, loss_scale=scale.factor, good_steps=scale.good_steps)


def run_validation(process: Process, running: StageRun, state: State) -> tuple[State, bool]:
    """Validate; the state with the best loss so far, and whether this one is it."""
    process.show.status("validating")
    process.fetching.settle()
    with process.clock.spending("validation"):
        loss, labels = validate(running.plan.model, validation_batches(running.reader, running.stage.batch.budget), process.ranks)
        if process.run.validation_samples:
            answer_samples(process, running, state)
    better = math.isfinite(loss) and (state.best is None or loss < state.best)
    state = replace(state, best=loss if better else state.best)
    write_validation(process, running.stage, state, loss, labels)
    process.tally.validated(running.stage.name, state.step, loss, state.best)
    return state, better


def answer_samples(process: Process, running: StageRun, state: State) -> None:
    """Answer some validation questions, and keep the answers in the run folder and the trackers."""
    run = process.run
    longest = run.evaluation.max_new_tokens if run.evaluation else MAX_NEW_TOKENS
    budget, encoder = running.stage.batch.budget, process.home.encoder
    answered = answered_samples(running.plan, encoder, running.reader, budget, run.validation_samples, longest)
    write_samples(process.home.folder, running.stage.name, state.global_step, answered)
    process.trackers.samples(state.global_step, answered)


def show_step(
    process: Process,
    running: StageRun,
    state: State,
    step: Step,
    report: Report,
    border: Border,
    at: float,
    seen: Seen,
    *,
    tells_rejects: bool,
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
        seconds=with_starved(process.clock.lap(), seen.idle_s),
        memory_bytes=border.memory[0],
        reserved_bytes=border.memory[1],
        allocator_retries=border.memory[2],
        unchanged=border.same.share,
        top_k=seen.top_k,
        sample_ids=border.sample_ids,
        rejected=rejects.rejected,
        flops=border.flops,
        peak=process.peak,
        imbalance=step.imbalance,
        epoch=step.epoch,
        spike=running.spikes.last,
        slow_ranks=border.slow_ranks,
    )
    if process.run.metrics_for_all_ranks:
        process.home.record_rank(process.world.rank, rank_line(figures, step, border.own))
    for line in running.stragglers.news():
        process.show.note(line)
    process.record(figures.line())
    process.show.step(figures)
    if (rejects.rejected or rejects.left_out) and tells_rejects:
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


def write_validation(process: Process, stage: Stage, state: State, loss: float, labels: int) -> None:
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
    process.record(line)
    best = " (best)" if state.best == loss else ""
    process.show.note(f"{stage.name} {state.step}: validation loss {loss:.4f} over {labels:,} supervised tokens{best}")
