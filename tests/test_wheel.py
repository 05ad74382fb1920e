"""`pip install` from a wheel: it holds the package and its recipes, and the command that it installs runs without a checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eyeline.recipes.read import shipped_recipes

ROOT = Path(__file__).parent.parent


def ran(*command: str | Path, folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network, by the hatchling of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, ROOT)
    ran(*command, folder=folder)
    [found] = folder.glob("*.whl")
    return found


def test_wheel_holds_the_package_and_its_recipes(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert held == ours
    assert {"eyeline/study/watch.html", *(f"eyeline/recipes/{name}.yaml" for name in shipped_recipes())} <= held


@pytest.mark.slow  # seconds of pip; what the wheel holds is compared above
def test_wheel_installs_and_reads_a_shipped_recipe(wheel: Path, tmp_path: Path) -> None:
    """In an environment that sees this one's packages, but not its eyeline."""
    ran(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path and not (Path(path) / "eyeline").exists() and Path(path).resolve() != ROOT]
    (site / "shared.pth").write_text("\n".join(others))
    python, eyeline = (tmp_path / "venv" / "bin" / name for name in ("python", "eyeline"))
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=tmp_path)
    assert "Example: eyeline train" in " ".join(ran(eyeline, "train", "--help", folder=tmp_path).split())
    assert ran(eyeline, "recipe", "my-data", folder=tmp_path) == shipped_recipes()["my-data"].read_text()
    read = "import eyeline; from eyeline.recipes.read import read_recipe; print(eyeline.__file__, read_recipe('my-data').name)"
    where, name = ran(python, "-c", read, folder=tmp_path).split()
    assert Path(where).is_relative_to(tmp_path / "venv")
    assert name == "my-data"
