"""A teacher that several files of tests ask."""

from pathlib import Path

import pytest

from eyeline.recipes.read import override, run_of
from eyeline.train.loop import train
from tests.train.recipe import tiny_recipe

BARE = '{% set marker = "" %}{{ question }}'


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a run that has learned a little."""
    folder = tmp_path_factory.mktemp("home")
    recipe = tiny_recipe(folder)
    recipe["stages"] = recipe["stages"][:1]
    train(run_of(override(recipe, ["stages.0.steps=25", "stages.0.data.augment={}"]), "recipe"))
    (folder / "bare.jinja").write_text(BARE)
    return folder
