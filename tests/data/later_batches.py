"""The batches of a run after its first epoch."""

from itertools import islice

from eyeline.core.batch import Batch, Budget
from eyeline.data.loader import training_steps
from eyeline.data.plan.blend import VERSION, Cursor, Position
from eyeline.data.reader import Reader, identity_of_plan, training_pools


def batches_of(reader: Reader, budget: Budget, packs: int) -> list[Batch]:
    """What training is given from the second epoch on."""
    start = Position(tuple(Cursor(epoch=1) for _ in training_pools(reader))).state()
    state = {"version": VERSION, "identity": identity_of_plan(reader, budget), "rejects": {"seen": 0, "counts": {}}} | start
    return [batch for step in islice(training_steps(reader, budget, 1, None, state), packs) for batch in step.batches]
