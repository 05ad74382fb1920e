"""The cases of every family: tiny models with a peer in transformers, that the tests of this folder go through by themselves.

To add a family, write `tests/models/cases/FAMILY.py` with `CASES: list[Case]`; a family of `FAMILIES` without one fails. A case
is a config of ours, a peer (`peer_of(to_hf(config))` builds it from the config.json that we write, so that this is tested
too), how the peer takes one document (`inputs`: keyword arguments of its forward and generate; it computes its own
positions), the key rules of the peer's folder, and the documents that both are shown:

- a family with a tower: `documents(cat, dog, cow)` of three images, of different grids where the family has them, and
  with slices of a video where it has those; `positions="grid"` for M-RoPE. Without a tower: `texts()`.
- the cases of a family together have tied and untied heads, and fewer key/value heads than query heads; a mixture of
  experts has experts narrower than half the model (H ≠ 2·I, so that no transposed weight fits).

Use `VOCABULARY` rows and `IMAGE_TOKEN`. Sizes are tiny (width 16 to 32, two to four layers): a case costs a second in all.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest

from tests.models.parity import Case

CASES: dict[str, list[Case]] = {m.name: importlib.import_module(f"{__name__}.{m.name}").CASES for m in pkgutil.iter_modules(__path__)}
ALL = [case for cases in CASES.values() for case in cases]
WITH_IMAGES = [case for case in ALL if case.with_images]


Kind = frozenset[Any]


def kinds_of_blocks(case: Case) -> dict[str, Kind]:
    """The modules and parameters of each block, by the block's name: equal where blocks are of one kind."""
    names = chain.from_iterable(case.plan.blocks.values())
    blocks = ((name, case.plan.model.get_submodule(name)) for name in names)
    return {name: frozenset([*((n, type(m)) for n, m in block.named_modules()), *dict(block.named_parameters())]) for name, block in blocks}


def _kinds(case: Case) -> Iterator[Kind]:
    """The counts of its blocks, of tower and projector, and of its head, which may be tied."""
    model, blocks = case.plan.model, kinds_of_blocks(case)
    yield from blocks.values()
    yield frozenset((n, type(m)) for n, m in model.named_modules() if n.partition(".")[0] in ("vision", "projector") and n not in blocks)
    yield frozenset([type(model), model.language.head.weight is model.language.embed.weight])


def _typical() -> Iterator[Case]:
    seen: set[Kind] = set()
    for case in sorted(ALL, key=lambda case: case.spec.vision is not None):
        if not seen.issuperset(_kinds(case)):
            seen.update(_kinds(case))
            yield case


TYPICAL = list(_typical())  # together they have every kind of block, tower, projector and head; the slow tests go through the others


def _id(case: Case) -> str:
    return f"{case.config.family}: {case.id}"


def is_typical(case: Case) -> bool:
    return any(case is one for one in TYPICAL)


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    return [] if is_typical(case) else [pytest.mark.slow]


def each_typical_case_and(name: str, values: Sequence[Any], turns: int = 1, always: Sequence[Any] = ()) -> pytest.MarkDecorator:
    """Every typical case with every value; where there are several turns, with every so many-th value in turn and with those of `always`.
    The slow tests have the rest."""
    pairs = [
        pytest.param(
            case, value, id=f"{_id(case)}-{value}", marks=_marks(case) if value in always or (n + m) % turns == 0 else pytest.mark.slow
        )
        for n, case in enumerate(sorted(ALL, key=lambda case: not is_typical(case)))
        for m, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("case", name), pairs)


each_typical_case = pytest.mark.parametrize("case", [pytest.param(case, id=_id(case), marks=_marks(case)) for case in ALL])
each_case = pytest.mark.parametrize("case", ALL, ids=_id)
each_case_with_images = pytest.mark.parametrize("case", WITH_IMAGES, ids=_id)
