"""The import rule: a module imports from its own folder or from a lower row, and some packages from one file only."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "eyeline"
ROWS = [  # lowest first; names in one row are peers and never import each other
    ["core"],
    ["kernels"],
    ["models", "data", "parallel", "checkpoint"],
    ["offline"],
    ["bundle"],
    ["generate"],
    ["evals"],
    ["distill"],
    ["train"],
    ["study"],
    ["recipes"],
    ["cli"],
    ["__main__"],
]
HEIGHT = {name: height for height, row in enumerate(ROWS) for name in row}


DATA_ROWS = [  # of data/, as in ROWS
    ["rejects", "workers", "files", "fetch_thread"],
    ["containers"],
    ["layouts", "images", "signals"],
    ["sources", "text"],
    ["plan"],
    ["fetch", "prepared"],
    ["sets"],
    ["reader"],
    ["loader"],
    ["index_progress"],
    ["counts", "validation"],
    ["report"],
]
DATA_HEIGHT = {name: height for height, row in enumerate(DATA_ROWS) for name in row}


def imports(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it points"
            if node.module == "eyeline":
                yield from ((f"eyeline.{alias.name}", node.lineno) for alias in node.names)
            elif node.module:
                yield node.module, node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)


def violations(path: Path, text: str) -> Iterator[str]:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module, line in imports(text):
        pieces = module.split(".")
        if pieces[0] != "eyeline" or len(pieces) < 2 or pieces[1] == here:
            continue
        if pieces[1] not in HEIGHT:
            continue  # __version__
        if HEIGHT[pieces[1]] >= HEIGHT[here]:
            yield f"{path.relative_to(PACKAGE)}:{line}: {here} may not import {pieces[1]}"


def test_imports_point_down() -> None:
    bad = [
        v
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "__init__.py" or path.parent != PACKAGE
        for v in violations(path, path.read_text())
    ]
    assert not bad, "\n".join(bad)


def test_every_folder_has_a_place() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= HEIGHT.keys()


def test_rooms_of_data_import_only_earlier_stations() -> None:
    folder = PACKAGE / "data"
    for path in sorted(folder.rglob("*.py")):
        here = path.relative_to(folder).parts[0].removesuffix(".py")
        for module, line in imports(path.read_text()):
            pieces = module.split(".")
            if pieces[:2] == ["eyeline", "data"] and len(pieces) > 2 and pieces[2] != here:
                assert DATA_HEIGHT[pieces[2]] < DATA_HEIGHT[here], f"{path}:{line}: {here} may not import {pieces[2]}"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("models/x.py", "from eyeline.train.loop import train"),
        ("models/x.py", "import eyeline.data.loader"),
        ("data/x.py", "from eyeline import models"),
        ("core/x.py", "def f():\n    from eyeline.kernels.rope import rotate"),
    ],
)
def test_a_wrong_import_is_seen(file: str, line: str) -> None:
    assert list(violations(PACKAGE / file, line))


def test_models_know_no_rank_and_no_environment() -> None:
    for path in [*PACKAGE.joinpath("models").glob("*.py"), *PACKAGE.joinpath("kernels").glob("*.py")]:
        text = path.read_text()
        assert not re.search(r"torch\.distributed|os\.environ|getenv", text), path


def test_only_parallel_reads_the_environment() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "parallel":
            assert not re.search(r"os\.environ|getenv", path.read_text()), path


def test_every_dependency_has_its_reason() -> None:
    text = (PACKAGE.parent.parent / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    for requirement in [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]:
        if requirement.startswith("eyeline"):
            continue
        line = next(line for line in text.splitlines() if f'"{requirement}"' in line)
        before = text[: text.index(line)].rstrip().splitlines()[-1]
        assert "#" in line.split(f'"{requirement}"')[1] or "#" in before, f"{requirement} has no reason next to it"
