"""What a rule of `eyeline explain` finds, and the counterfactuals that it offers."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Finding:
    """A cause of lost time."""

    cause: str
    ceiling: float | None  # share of the wall time of `of` that could be won at most; None where it is not known
    of: str
    evidence: str
    computed: str  # how the ceiling was computed
    counterfactual: str  # what would show it


class Names(NamedTuple):
    """What counterfactuals are about."""

    run: str  # the run folder, as it is typed
    recipe: str  # its recipe
    stage: str
    world: int  # ranks


def names_of(run: Path, stage: str, world: int) -> Names:
    """The names of a run folder; placeholders where it has no recipe."""
    recipe = run / "recipe.yaml"
    return Names(shlex.quote(str(run)), shlex.quote(str(recipe)) if recipe.is_file() else "RECIPE", stage, world)


def vary(names: Names, key: str, now: object, other: object) -> str:
    """The command that compares two values of a setting. `eyeline compare` launches one process per run, so ranks are trained again."""
    return f"eyeline compare {names.recipe} --vary {key}={now},{other}" if names.world == 1 else again(names, f"{key}={other}")


def again(names: Names, settings: str) -> str:
    """The commands that train with other settings, and show both runs."""
    ranks = f" --nproc {names.world}" if names.world > 1 else ""
    return f"eyeline train {names.recipe}{ranks} {settings} out=OTHER, then eyeline report {names.run} OTHER"


def largest_first(found: Sequence[Finding | None]) -> list[Finding]:
    """The findings by their ceilings; one that is not known comes last."""
    return sorted((one for one in found if one), key=lambda one: -(one.ceiling or 0.0))
