"""Names in a run folder that those who write it and those who read it share."""

from typing import Literal, get_args

SAMPLES = "samples"  # the folder of questions that are answered at each validation

Spending = Literal["startup", "compile", "data_wait", "compute", "communication", "validation", "checkpoint"]  # of a step's seconds
SPENDINGS: tuple[str, ...] = get_args(Spending)
