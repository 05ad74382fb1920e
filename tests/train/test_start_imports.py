"""What a process imports up to its first step: most of the time until then."""

import subprocess
import sys
from pathlib import Path

import torch
import yaml

from eyeline.kernels.gpu import capability_of
from tests.train.recipe import tiny_recipe

COMPILER = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy")
TRAIN = """
import atexit, pathlib, sys
from eyeline.cli import main
listed = pathlib.Path(sys.argv.pop())
atexit.register(lambda: listed.write_text(" ".join(sys.modules)))
sys.argv[1:1] = ["train"]
main()
"""


def test_training_does_not_import_the_compiler(tmp_path: Path) -> None:
    """Muon, AdamW, LoRA, dropout and validation: nothing of it is compiled on a CPU."""
    recipe = tiny_recipe(tmp_path) | {"stages": [{**stage, "steps": 2} for stage in tiny_recipe(tmp_path)["stages"]]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "recipe.yaml"), str(tmp_path / "modules")]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    modules = (tmp_path / "modules").read_text().split()
    assert "torch.optim" in modules
    assert not [name for name in COMPILER if name in modules]


def test_the_mark_of_a_constant_is_what_torch_sets() -> None:
    def function() -> None: ...

    torch.compiler.assume_constant_result(function)
    assert vars(function) == vars(capability_of)
