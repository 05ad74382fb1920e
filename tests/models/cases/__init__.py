"""The cases of every family: tiny models with a twin in transformers, that the tests of this folder go through by themselves.

To add a family, write `tests/models/cases/FAMILY.py` with `CASES: list[Case]`; a family of `FAMILIES` without one fails. A case
is a config of ours, a twin (`twin_of(to_hf(config))` builds it from the config.json that we write, so that this is tested
too), how the twin takes one document (`inputs`: keyword arguments of its forward and generate; it computes its own
positions), the key rules of the twin's folder, and the documents that both are shown:

- a family with a tower: `documents(cat, dog, cow)` of three images, of different grids where the family has them, and
  with slices of a video where it has those; `positions="grid"` for M-RoPE. Without a tower: `texts()`.
- the cases of a family together have tied and untied heads, and fewer key/value heads than query heads; a mixture of
  experts has experts narrower than half the model (H ≠ 2·I, so that no transposed weight fits).

Use `VOCABULARY` rows and `IMAGE_TOKEN`. Sizes are tiny (width 16 to 32, two to four layers): a case costs a second in all.
"""

import importlib
import pkgutil

import pytest

from tests.models.parity import Case

CASES: dict[str, list[Case]] = {m.name: importlib.import_module(f"{__name__}.{m.name}").CASES for m in pkgutil.iter_modules(__path__)}
ALL = [case for cases in CASES.values() for case in cases]
WITH_IMAGES = [case for case in ALL if case.with_images]


def _id(case: Case) -> str:
    return f"{case.config.family}: {case.id}"


each_case = pytest.mark.parametrize("case", ALL, ids=_id)
each_case_with_images = pytest.mark.parametrize("case", WITH_IMAGES, ids=_id)
