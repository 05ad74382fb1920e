"""The script for Slurm, under a Slurm of a few lines: what it starts, and that a job whose time is over goes back into the queue."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "slurm" / "train.sh"


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job; what is called is written down. `srun` runs until it is stopped where a file `long` exists."""
    commands = {
        "scontrol": 'echo "scontrol $*" >> log\n[ "$1" = show ] && printf "node7\\nnode8\\n"\nexit 0',
        "srun": 'printf "%s\\n" "$@" > asked\n[ -e long ] || exit 3\ntrap "exit 75" TERM\nwhile :; do sleep 0.01; done',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job}


def test_each_node_starts_its_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "my recipe.yaml", "seed=1"], env=slurm, check=False)
    assert done.returncode == 3, "the job ends as the run does"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint node7:29500 --rdzv-id 42"
    torchrun = f"torchrun --nnodes 2 --nproc-per-node 8 {rendezvous} --max-restarts 3 -m eyeline train"
    assert (tmp_path / "asked").read_text().splitlines() == ["--kill-on-bad-exit=1", *torchrun.split(), "my recipe.yaml", "seed=1"]
    assert "requeue" not in (tmp_path / "log").read_text()


def test_a_job_whose_time_is_over_is_put_back_into_the_queue(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "long").touch()
    job = subprocess.Popen([SCRIPT, "recipe.yaml"], env=slurm)
    while not (tmp_path / "asked").exists():
        assert job.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)  # until the script waits
    job.send_signal(signal.SIGTERM)
    job.wait(30)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "scontrol requeue 42"
