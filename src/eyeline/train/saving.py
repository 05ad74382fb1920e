"""Checkpoints of a stage: what is in them, and who writes them: the loop itself, or a thread while training continues.

A thread calls no collective. It writes this rank's part of a draft, from copies of the tensors; that it has done so is told at the next
step's border, and once all ranks have, the loop commits the checkpoint. A failure is raised there too, on every rank.
"""

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import Piece, pieces_of
from eyeline.core.errors import fitting
from eyeline.train.optim import state_tensors, without_state
from eyeline.train.trainable import adapters_of, new_rows_of, saved_modules, trained_in_full

if TYPE_CHECKING:  # a Process has a Saving
    from eyeline.train.stage import Process, StageRun, State
    from eyeline.train.start import Home


@dataclass(frozen=True)
class Pending:
    """A checkpoint whose files a thread writes."""

    draft: store.Draft
    share: "Future[store.Share]"
    state: dict[str, Any]
    best: bool


class Saving:
    """The checkpoint that is being written while training continues: one at most."""

    def __init__(self) -> None:
        self.pending: Pending | None = None

    @property
    def ready(self) -> bool:
        """Return whether there is one, and this rank has written its part."""
        return self.pending is not None and self.pending.share.done()

    def abandon(self, first: bool) -> None:
        """Leave nothing of one that was not finished. `first`: whether this rank clears away for all."""
        pending, self.pending = self.pending, None
        if pending is not None and first:
            shutil.rmtree(pending.draft.staging, ignore_errors=True)


def save(process: "Process", running: "StageRun", state: "State", *, ended: bool, best: bool, waits: bool = True) -> None:
    """Write a checkpoint: after the last step of a stage it already stands at the start of the next one. Where it does not wait, the
    tensors are copied, and a thread writes them."""
    finish_save(process)
    home, world, step = process.home, process.world, state.global_step
    fixed = fixed_sets(home, state)
    process.show.status("saving a checkpoint")
    with process.clock.spending("checkpoint"), fitting(f"the checkpoint of step {step}"):
        files = {name: pieces_of(x, process.answers) for name, x in tensors_of(running, ended).items()}
        saved, limit = state_of(process, running, state, ended), process.run.save_total_limit
        if waits:
            store.save(
                home.checkpoints,
                run=home.id,
                step=step,
                files=files,
                state=saved,
                save_total_limit=limit,
                best=best,
                fixed=fixed,
                world=world,
            )
            process.stop.saved = step
        else:
            draft = store.begin(home.checkpoints, run=home.id, step=step, files=files, fixed=fixed, world=world)
            copies = {name: pieces if name in fixed else copied(pieces) for name, pieces in files.items()}
            process.saving.pending = Pending(draft, in_thread(lambda: store.write(draft, copies, world.rank, world.size)), saved, best)


def finish_save(process: "Process") -> None:
    """Wait for the checkpoint that is being written, if there is one, and commit it. Raises on all ranks what failed on one."""
    pending, process.saving.pending = process.saving.pending, None
    if pending is not None:
        draft, limit = pending.draft, process.run.save_total_limit
        with process.clock.spending("checkpoint"):
            store.finish(draft, pending.share.result, pending.state, limit, pending.best, process.world)
        process.stop.saved = draft.step


def fixed_sets(home: "Home", state: "State") -> dict[str, str]:
    """The sets of a checkpoint that do not change within a stage, each with the word for it."""
    return {"frozen": f"stage {state.stage} of {home.id}"}


def tensors_of(running: "StageRun", ended: bool) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint holds, in sets: what changes, what this stage does not, and the optimizers' states while it lasts. Copies of what
    another rank has are not written."""
    kept: dict[str, dict[str, Tensor]] = {"model": {}, "frozen": {}}
    for name, x, entry in running.plan.tensors():
        if name not in running.plan.copies:
            kept["model" if entry.trains or entry.role == "buffer" else "frozen"][name] = x
    states = {} if ended else state_tensors(running.optimizers)
    return kept | {"optimizer": {name: x for name, x in states.items() if name.rpartition(":")[0] not in running.plan.copies}}


def state_of(process: "Process", running: "StageRun", state: "State", ended: bool) -> dict[str, Any]:
    """What a checkpoint says in addition to its tensors, as plain JSON: the stage it stands in, how far, and what the model is like."""
    apart = new_rows_of(process.run, state.stage, process.home.bundle)
    own = without_state(running.optimizers)
    # of slices of a model each rank knows its own
    without = own if running.plan.slices is None else list(dict.fromkeys(chain.from_iterable(process.world.gather_patiently(own))))
    progress = vars(state) if not ended else vars(state) | {"stage": state.stage + 1, "step": 0, "data": None, "best": None, "losses": None}
    return {
        "stage": progress["stage"],
        "global_step": state.global_step,
        "lora": {part: lora.model_dump(mode="json") for part, lora in adapters_of(running.stage).items()},
        "new_rows": None if apart is None else list(apart),
        "saved_modules": sorted({path for stage in process.run.stages[: state.stage + 1] for path in saved_modules(stage)}),
        "trained": trained_in_full(process.run.stages[: state.stage + 1]),
        "expert_biases": running.plan.biased,
        "without_state": [] if ended else without,
        "progress": progress,
    }


def copied(pieces: Sequence[Piece]) -> list[Piece]:
    """The same numbers, in memory of the host that nothing else writes to."""
    return [piece._replace(local=piece.local.detach().to("cpu", copy=True)) for piece in pieces]


def in_thread(work: Callable[[], store.Share]) -> "Future[store.Share]":
    """The result of work that a thread does. The thread does not keep the process alive: a second signal ends it at once."""
    future: Future[store.Share] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="checkpoint").start()
    return future
