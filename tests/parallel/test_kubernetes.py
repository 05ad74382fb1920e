"""The job for Kubernetes: its parts fit one another, and what a pod starts is torchrun as the documents say."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

JOB = Path(__file__).parents[2] / "docs" / "kubernetes" / "train.yaml"


@pytest.fixture(scope="module")
def parts() -> tuple[dict[str, Any], dict[str, Any]]:
    """The service and the job."""
    service, job = yaml.safe_load_all(JOB.read_text())
    return service, job


def container(job: dict[str, Any]) -> dict[str, Any]:
    [found] = job["spec"]["template"]["spec"]["containers"]
    return found


def variables(job: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(job)["env"]}


def test_pods_are_as_many_as_torchrun_waits_for(parts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    spec, given = parts[1]["spec"], variables(parts[1])
    assert spec["completions"] == spec["parallelism"] == int(given["MACHINES"])
    assert container(parts[1])["resources"]["limits"]["nvidia.com/gpu"] == int(given["GPUS"])
    assert all(isinstance(value, str) for value in given.values()), "Kubernetes refuses variables that are numbers"


def test_the_first_pod_has_the_name_that_the_others_call(parts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    service, job = parts
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert variables(job)["FIRST"] == f"{name}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert f":{service['spec']['ports'][0]['port']}" in container(job)["args"][0]


def test_shared_memory_and_every_volume_are_mounted(parts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    mounts = {one["name"]: one["mountPath"] for one in container(parts[1])["volumeMounts"]}
    volumes = {one["name"] for one in parts[1]["spec"]["template"]["spec"]["volumes"]}
    assert mounts.keys() == volumes
    assert mounts["shm"] == "/dev/shm"
    assert variables(parts[1])["OUT"].startswith(mounts["shared"])


def test_a_pod_starts_torchrun(parts: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    """Its command line, run here, with a torchrun that writes down its arguments."""
    (tmp_path / "torchrun").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/asked\nexit 3\n')
    (tmp_path / "torchrun").chmod(0o755)
    one = container(parts[1])
    given = variables(parts[1]) | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECIPE": "/shared/my recipe.yaml"}
    assert subprocess.run([*one["command"], *one["args"]], env=given, check=False).returncode == 3, "a pod fails as torchrun does"
    asked = (tmp_path / "asked").read_text().splitlines()
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint eyeline-train-0.eyeline-train:29500 --rdzv-id eyeline-train"
    start = f"--nnodes 2 --nproc-per-node 8 --max-restarts 3 {rendezvous} -m eyeline train"
    assert asked == [*start.split(), "/shared/my recipe.yaml", "out=/shared/runs/my-run"]
