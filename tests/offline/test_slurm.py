"""The script for Slurm, under a Slurm of three lines: two arrays and a last job complete a folder, whatever order their tasks run in."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("task", ["3", None])
def test_a_task_asks_for_its_share(tmp_path: Path, task: str | None) -> None:
    for name, text in {"srun": 'exec "$@"', "eyeline": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_CPUS_PER_TASK": "8"} | ({"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": "16"} if task else {})
    script = ROOT / "docs/slurm/prepare.sh"
    there = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm}
    out = subprocess.run([script, "my recipe.yaml", "/shared/out"], env=there, capture_output=True, text=True, check=True).stdout
    asked = ["prepare", "my recipe.yaml", "--out", "/shared/out", "--workers", "8", *(["--shard", "3/16"] if task else [])]
    assert out.splitlines() == asked


def test_the_guide_submits_that_script(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text('#!/bin/bash\necho "$@" >> "$LOG"\nwc -l < "$LOG"\n')
    (tmp_path / "sbatch").chmod(0o755)
    there = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    [block] = re.findall(r"```\n(indexes=\$.*?)```", (ROOT / "docs/offline.md").read_text(), re.DOTALL)
    subprocess.run(["bash", "-e", "-c", block], env=there, cwd=ROOT, check=True, capture_output=True)
    script = "docs/slurm/prepare.sh my-recipe.yaml /shared/prepared"
    assert (tmp_path / "log").read_text().splitlines() == [
        f"--parsable --array=0-15 {script}",
        f"--parsable --array=0-15 --dependency=afterany:1 {script}",
        f"--dependency=afterany:2 {script}",
    ]
