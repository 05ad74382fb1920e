"""What a run keeps of a step that is not finite, or whose loss is a spike: enough to run it again on one device with `eyeline replay`.

    RUN/evidence/step-00000012/
        step.json                              the step, its loss, its samples, where the data stood
        batches-00001-of-00002.safetensors     the batches of each rank
        weights/step-00000011-1f0c93aa/        the weights before the step, as a checkpoint without optimizer state

It is kept before the optimizer touches the weights, and of `keep_bad_steps` steps of a run; of others that are not finite only step.json.
"""

import math
import shutil
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import pieces_of
from eyeline.checkpoint.pieces import reading as reading_files
from eyeline.checkpoint.tensors import write_file
from eyeline.core.batch import Batch, Counts
from eyeline.core.errors import Refused
from eyeline.core.files import make_folder, read_object, sha256_of, write_json
from eyeline.train.optim import updates_in_backward
from eyeline.train.saving import fixed_sets, state_of, tensors_of

if TYPE_CHECKING:
    from eyeline.train.stage import Process, StageRun, State

EVIDENCE, STEP, WEIGHTS = "evidence", "step.json", "weights"
WINDOW, FEWEST, DEVIATIONS, FLOOR = 128, 64, 6.0, 0.1  # steps; steps before a first spike; standard deviations; nats per supervised token
ROOM = 3  # times the weights must be free, or they are not kept: a checkpoint needs the room more

Kind = Literal["not finite", "spike"]


class LossSpikes:
    """Tells whether a loss is a spike: more than DEVIATIONS standard deviations, and more than FLOOR, above the mean of the last WINDOW
    steps of this stage. `before`: what `losses` was, to continue with. `skips`: steps with a spike are skipped, and their losses are not
    among those that the next ones are compared with."""

    def __init__(self, before: Sequence[float] = (), *, skips: bool = False) -> None:
        self._losses, self.skips = deque(before, maxlen=WINDOW), skips
        self.last = False  # whether the last step had one

    def add(self, loss: float) -> bool:
        """Return whether this one is a spike. It counts in those that follow, unless it is not finite or skipped."""
        before, self.last = self.losses, False
        if math.isfinite(loss):
            if len(before) >= FEWEST:
                self.last = loss - statistics.fmean(before) > max(DEVIATIONS * statistics.pstdev(before), FLOOR)
            if not (self.last and self.skips):
                self._losses.append(loss)
        return self.last

    @property
    def losses(self) -> list[float]:
        """The losses, in nats per supervised token, that the next one is compared with."""
        return list(self._losses)


def remove_leftovers(run: Path) -> None:
    """Delete what a kill left of a folder that was being written."""
    for path in (run / EVIDENCE).glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def keep_evidence(
    process: "Process", running: "StageRun", state: "State", batches: Sequence[Batch], kind: Kind, loss: float, grad_norm: float
) -> None:
    """Write the folder of the step after `state`. All ranks call this; the folder appears whole."""
    home, world, step = process.home, process.world, state.global_step + 1
    folder = home.folder / EVIDENCE / f"step-{step:08d}"
    whole = world.by_first(lambda: _number_kept(home.folder) < process.run.keep_bad_steps)
    if not whole and kind == "spike":
        return
    record = {
        "kind": kind,
        "stage": running.stage.name,
        "stage_index": state.stage,
        "step": step,
        "loss": str(loss),
        "grad_norm": str(grad_norm),
        "loss_scale": state.loss_scale,
        "ranks": world.size,
    }
    samples = world.gather([list(batch.ids) for batch in batches])
    record |= {"samples": [ids for of_rank in samples for ids in of_rank], "data_before": state.data}
    staging = folder.with_name(f".{folder.name}.tmp")
    world.by_first(lambda: _start(staging))
    if whole:
        name = f"batches-{world.rank + 1:05d}-of-{world.size:05d}.safetensors"
        written = world.by_each(lambda: asdict(write_file(staging / name, tensors_of_batches(batches))))
        of_ranks = world.gather([{"file": name, **written}, [plain(batch) for batch in batches]])
        record |= {"batches": of_ranks, "weights": _keep_weights(process, running, state, staging)}
    world.by_first(lambda: _commit(staging, folder, record))
    process.show.note(_note(kind, folder, step, whole, updates_in_backward(running.stage.optimizer)))


def _note(kind: Kind, folder: Path, step: int, whole: bool, updated: bool) -> str:
    """The line about a step. `updated`: its weights have changed by then."""
    skipped = "" if updated else ", the step is skipped"
    what = f"step {step:,}: loss or gradient is not finite{skipped}" if kind == "not finite" else f"step {step:,}: loss spike"
    return f"{what}; eyeline replay {folder} says where it comes from" if whole else f"{what}; its samples are in {folder / STEP}"


def _number_kept(run: Path) -> int:
    """The number of steps that are kept whole."""
    return len(list((run / EVIDENCE).glob("step-*/batches-00001-of-*.safetensors")))


def _start(staging: Path) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    make_folder(staging)


def _commit(staging: Path, folder: Path, record: dict[str, Any]) -> None:
    write_json(staging / STEP, record)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt at this step
    staging.rename(folder)


def _keep_weights(process: "Process", running: "StageRun", state: "State", staging: Path) -> str | None:
    """Write the weights; the name of their checkpoint's folder. None, and a note, where the disk has too little room for more than the
    run's own checkpoints."""
    home, world = process.home, process.world
    files = {name: pieces_of(x, process.answers) for name, x in tensors_of(running, ended=True).items()}
    needed = sum(world.gather(sum(piece.local.nbytes for pieces in files.values() for piece in pieces)))
    if world.by_first(lambda: shutil.disk_usage(staging).free) < ROOM * needed:
        process.show.note("the disk has too little room to keep the weights of this step: replay takes those of the newest checkpoint")
        return None
    path = store.save(
        staging / WEIGHTS,
        run=home.id,
        step=state.global_step,
        files=files,
        state=state_of(process, running, state, ended=False),
        save_total_limit=1,
        fixed=fixed_sets(home, state),
        world=world,
        linked_from=home.checkpoints,
    )
    return path.name


# Batches as files


def tensors_of_batches(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The tensors of batches by `NUMBER.FIELD`."""
    return {f"{n}.{f.name}": x for n, batch in enumerate(batches) for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor)}


def plain(batch: Batch) -> dict[str, Any]:
    """What a batch has in addition to its tensors, as plain JSON."""
    kept = {f.name: x for f in fields(batch) if not isinstance(x := getattr(batch, f.name), Tensor)}
    return kept | {"counts": asdict(batch.counts), "ids": list(batch.ids)}


def batches_in(folder: Path) -> list[Batch]:
    """The batches of all ranks that `keep_evidence` kept. Refused where they are not there, or damaged."""
    record = read_object(folder / STEP)
    if "batches" not in record:
        raise Refused(f"{folder} has no batches, only names of samples in {STEP}. Raise keep_bad_steps to keep more of them")
    batches = []
    for file, of_rank in record["batches"]:
        path = folder / file["file"]
        if not path.is_file() or sha256_of(path) != file["sha256"]:
            raise Refused(f"{path} is damaged or missing. Restore the folder")
        with reading_files([path]) as stored:
            for n, values in enumerate(of_rank):
                tensors = {name.partition(".")[2]: stored.read(name) for name in stored.meta if name.startswith(f"{n}.")}
                values = {f.name: None for f in fields(Batch)} | values | tensors
                batches.append(Batch(**values | {"counts": Counts(**values["counts"]), "ids": tuple(values["ids"])}))
    return batches
