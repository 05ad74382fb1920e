"""A stage made ready: its model planned, placed and filled, its optimizers as they were, its data found again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

from eyeline.bundle.computing import choose_kernels
from eyeline.bundle.fill import fill, has_biases, lora_of
from eyeline.bundle.fill import new_rows_of as stored_rows
from eyeline.checkpoint import store
from eyeline.core.errors import Refused, fitting
from eyeline.core.log import say
from eyeline.core.plan import Plan, complete
from eyeline.core.randomness import seed_for
from eyeline.core.step import Step
from eyeline.core.world import ALONE, World
from eyeline.data.counts import count_steps
from eyeline.data.fetch_thread import FetchThread
from eyeline.data.index_progress import index_first
from eyeline.data.loader import training_steps
from eyeline.data.reader import Reader, reader_of
from eyeline.models import Model, flops
from eyeline.parallel.idle import DeviceIdle
from eyeline.parallel.join import SHARES_NOTHING, Sharing
from eyeline.parallel.launch import Machine
from eyeline.parallel.mesh import Mesh
from eyeline.parallel.place import place
from eyeline.parallel.ranks import ONE_DEVICE, Ranks
from eyeline.parallel.shares import WHOLE, Shares
from eyeline.train.compile import compile_first, refuse_attention
from eyeline.train.cuda_graph import GraphedUpdate
from eyeline.train.display import Display
from eyeline.train.evidence import LossSpikes
from eyeline.train.float8 import float8_lines
from eyeline.train.graph_start import graphed_update
from eyeline.train.metrics import Clock
from eyeline.train.optim import load_state_tensors, make_optimizers
from eyeline.train.run import COMPUTE, Distillation, Run, Stage
from eyeline.train.saving import Saving
from eyeline.train.slices import cut_along_depth
from eyeline.train.start import Home, refuse_changed_data, refuse_other_data, sources_of
from eyeline.train.stop import StopSignal
from eyeline.train.stragglers import OwnTime, Stragglers
from eyeline.train.summary import Tally, stage_lines, stage_record
from eyeline.train.trackers.trackers import Trackers
from eyeline.train.trainable import adapters_of, new_rows_of, plan_of, rows_of, table

AtStep = Callable[[int, Model], None]  # called before the data of a step arrive, with the steps done so far and the model


def nothing(_step: int, _model: Model) -> None:
    pass


@dataclass(frozen=True)
class Process:
    """What lasts as long as the training process: the run, its folder, the machine, the clock, and the display."""

    run: Run
    home: Home
    here: Machine
    clock: Clock
    console: Console
    show: Display
    tally: Tally
    stop: StopSignal
    idle: DeviceIdle
    world: World = ALONE
    mesh: Mesh | None = None  # None: a single process
    ranks: Ranks = ONE_DEVICE
    trackers: Trackers = field(default_factory=lambda: Trackers((), None, 1))
    at_step: AtStep = nothing
    peak: float | None = None  # FLOPs per second of all ranks' devices at this precision; None where it is not known
    packs: Sharing = SHARES_NOTHING
    fetching: FetchThread = field(default_factory=FetchThread)
    saving: Saving = field(default_factory=Saving)

    @property
    def answers(self) -> bool:
        """Return whether this rank writes what several ranks hold whole."""
        return self.world.first if self.mesh is None else self.mesh.answers

    def record(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, with the time since the process started; then tell the trackers."""
        self.home.record(line | {"elapsed_s": self.clock.elapsed()})
        self.trackers.line(line)


@dataclass(frozen=True)
class State:
    """The position of a run, without its tensors. Plain values: this is `state.json` of a checkpoint."""

    stage: int = 0
    step: int = 0  # steps done in the stage
    global_step: int = 0  # steps done in all
    data: dict[str, Any] | None = None  # the reader's own state; None at the start of a stage
    not_finite: int = 0  # steps dropped so far
    best: float | None = None  # lowest validation loss of this stage
    loss_scale: float | None = None  # in fp16: what the next step's loss is multiplied by, and the steps applied since that changed
    good_steps: int = 0
    spiked: int = 0  # steps skipped so far since their loss was a spike
    losses: list[float] | None = None  # with `max_spike_steps`: the last ones of this stage, by which a spike is known


@dataclass(frozen=True)
class StageRun:
    """A stage that is ready for its next step."""

    stage: Stage
    plan: Plan[Model]
    optimizers: list[torch.optim.Optimizer]
    reader: Reader
    steps: int  # of the whole stage
    arithmetic: flops.Arithmetic
    own_time: OwnTime
    stragglers: Stragglers
    balance_images: bool = False  # ranks share out the images of each micro-batch
    spikes: LossSpikes = field(default_factory=LossSpikes)
    graphs: GraphedUpdate | None = None  # with `cuda_graph`

    def steps_from(self, state: State, thread: FetchThread | None = None) -> Iterator[Step]:
        """The steps that are left, each with its micro-batches; with a `thread`, fetched by it while the step before computes."""
        batch = self.stage.batch
        if self.reader.group.size > 1:
            thread = None  # ranks that share packs send them to one another while they fetch, which is the loop's to do
        if thread is not None:
            thread.left = self.steps - state.step - 1
        return training_steps(self.reader, batch.budget, batch.packs_per_step, self.stage.epochs, state.data, self.balance_images, thread)


def model_of(
    run: Run,
    home: Home,
    here: Machine,
    checkpoint: store.Checkpoint | None,
    index: int,
    mesh: Mesh | None = None,
    world: World = ALONE,
) -> Plan[Model]:
    """The model of stage `index`: planned, placed on the ranks, and filled. Adapters that the stage does not continue are merged on the
    way."""
    sources = sources_of(run, home, checkpoint, world)

    def filled() -> Plan[Model]:
        apart = new_rows_of(run, index, home.bundle)
        shares = WHOLE if mesh is None else Shares(mesh.sizes, world.size)
        plan = plan_of(run, index, home.bundle.config, has_biases(sources["language"]), apart, shares)
        plan = cut_along_depth(plan, run.stages[index].batch.budget, mesh)
        place(plan, here.device, mesh)
        before = None if checkpoint is None else (lora_of(checkpoint.state), stored_rows(checkpoint.state))
        continued = before == (adapters_of(run.stages[index]), apart)
        fill(plan, home.bundle.config, sources, keep_adapters=continued, seed=run.seed)
        return plan

    return world.by_each(filled)


def begin_stage(process: Process, checkpoint: store.Checkpoint | None, state: State) -> StageRun:
    """Make the stage ready that `state` stands in, and say what it trains and from what.

    A stage starts from a checkpoint as a resumed run does: both use this code.
    """
    run, home, here, world = process.run, process.home, process.here, process.world
    stage, saved = run.stages[state.stage], {} if checkpoint is None else checkpoint.state
    with process.clock.spending("startup"), fitting("the model with its optimizer's state"):
        plan = model_of(run, home, here, checkpoint, state.stage, process.mesh, world)
        kernels = choose_kernels(plan.model, here, COMPUTE[run.precision], trains=True)
        for line in (in_float8 := float8_lines(run, plan, here.capability)):
            say(line)
        refuse_attention(plan, run, here)
        with complete(plan):
            arithmetic = flops.count(plan.model, plan.spec.image)
        optimizers = make_optimizers(plan, stage.optimizer, run.seed, process.mesh)
        if checkpoint and state.step > 0:
            with checkpoint.reading("optimizer") as stored:
                elsewhere = plan.whole.keys() - plan.table.keys()
                where = str(checkpoint.folder)
                world.by_each(lambda: load_state_tensors(optimizers, stored, saved["without_state"], where, elsewhere))
        reader = world.by_each(
            lambda: reader_of(
                stage.data,
                home.encoder,
                plan.spec.image,
                seed_for(run.seed, "stage", state.stage),
                home.folder,
                plan.spec.max_positions,
                arithmetic.cost(),
                process.packs.across,
                group=process.packs.group,
                notify=process.show.status,
                likely=stage.distill is not None,
            )
        )
        refuse_other_data(world, reader, stage.batch.budget)
        epochs = stage.epochs or 0
        steps = stage.steps or world.by_first(lambda: count_steps(reader, stage.batch.budget, stage.batch.packs_per_step, epochs))
        if state.step >= steps:
            raise Refused(f"stage {stage.name} has steps={steps} and has already done {state.step}; raise steps, or leave it unchanged")
        if checkpoint:
            world.by_each(lambda: refuse_changed_data(run, home.folder, reader, checkpoint.state))
    set_distillation(plan.model, stage.distill)
    own_time = OwnTime((plan.model.get_submodule(name) for name in plan.blocks["language"]), here.device, world)
    balanced = world.size > 1 and run.mesh.balance_images
    spikes = LossSpikes(state.losses or (), skips=run.max_spike_steps > 0)
    running = StageRun(stage, plan, optimizers, reader, steps, arithmetic, own_time, Stragglers(world.hosts), balanced, spikes)
    _announce(process, running, state, (*kernels, *in_float8))
    plan.model.train()
    if run.compile == "blocks":
        process.show.status("compiling the blocks")
        with process.clock.spending("compile"), fitting("a made-up batch of the stage's size, which blocks are compiled with"):
            compile_first(plan, run, stage, process.ranks, process.clock)
    if run.cuda_graph:
        process.show.status("capturing graphs")
        with process.clock.spending("compile"), fitting("a made-up batch of the stage's size, which graphs are captured with"):
            return replace(running, graphs=graphed_update(plan, run, stage, optimizers, here, process.clock, process.show.note))
    return running


def set_distillation(model: Model, distillation: Distillation | None) -> None:
    """Tell the model's language part how much it learns from teachers."""
    model.language.distillation = (0.0, 1.0) if distillation is None else (distillation.kl, distillation.temperature)


def _announce(process: Process, running: StageRun, state: State, kernels: Sequence[str]) -> None:
    """Print what the stage trains and from what, write it to metrics.jsonl, and index what its first steps read."""
    show = process.show
    rows = rows_of(running.plan, running.stage)
    process.console.print(table(running.stage, rows, process.console.width))
    show.status("first step: reading and indexing data")
    with process.clock.spending("data_wait"):
        process.world.by_first(lambda: index_first(running.reader, running.stage.batch.budget, state.data))
    record = stage_record(process.run, state.stage, running.steps, rows, running.reader, process.home.bundle)
    process.record(record | {"kernels": list(kernels), "global_step": state.global_step})
    for line in stage_lines(record):
        show.note(line)
    show.status("first step: decoding images")
