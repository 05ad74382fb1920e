"""The road of one batch: the modules that run between a LLaVA JSON and a gradient are those that ARCHITECTURE.md lists, in that order,
and neither their number nor their length grows. The numbers are today's: they may fall."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "eyeline"
MODULES, OF_DATA = 41, 27  # wanted: 32 and 18
LINES, FUNCTION_LINES = 350, 60


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The modules, by their paths in the package, in the order of their first calls; without core/ and `__init__`."""
    folder = tmp_path_factory.mktemp("road")
    command = [sys.executable, "-m", "tests.road", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    every = json.loads(done.stdout.splitlines()[-1])
    return [module for module in every if not module.startswith("core/") and not module.endswith("__init__.py")]


def listed() -> list[list[str]]:
    """The rows of ARCHITECTURE.md's table: module, what goes in, what goes out."""
    _, _, section = (ROOT / "ARCHITECTURE.md").read_text().partition("## One batch, file by file\n")
    rows = re.findall(r"^\| `(.+?\.py)` \| (.*?) \| (.*?) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return [list(row) for row in rows]


def test_architecture_lists_the_modules_of_a_batch_in_order(road: list[str]) -> None:
    assert [module for module, *_ in listed()] == road


def test_architecture_says_what_goes_in_and_out_of_each() -> None:
    assert all(goes_in.strip() and comes_out.strip() for _, goes_in, comes_out in listed())


def test_the_road_has_no_more_modules_than_today(road: list[str]) -> None:
    assert (len(road), sum(module.startswith("data/") for module in road)) == (MODULES, OF_DATA)


def test_modules_of_the_road_have_at_most_350_lines(road: list[str]) -> None:
    assert not {module for module in road if len((PACKAGE / module).read_text().splitlines()) > LINES}


def test_functions_have_at_most_60_lines() -> None:
    def longer() -> Iterator[str]:
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES:
                    yield f"{path.relative_to(PACKAGE)}: {node.name}"

    assert not list(longer())
