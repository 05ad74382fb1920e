"""Exports that the tests of bundles share."""

from collections.abc import Callable

import pytest

from eyeline.bundle.exporting import export
from tests.bundle.exported import Exported, bundle_of, random_model
from tests.models.parity import Case


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Exported]:
    """A case with every tensor random, and its export; made once."""
    made: dict[int, Exported] = {}

    def export_of(case: Case) -> Exported:
        if id(case) not in made:
            bundle = bundle_of(case)
            made[id(case)] = Exported(bundle, random_model(bundle), tmp_path_factory.mktemp("exported") / "out")
            export(bundle, made[id(case)].model, made[id(case)].folder, max_shard_bytes=20_000)
        return made[id(case)]

    return export_of
