"""Names of the Hub: what is fetched, and what a machine without network is told."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from eyeline.bundle.hub import download_only, local_folder
from eyeline.core.errors import Refused


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "a/b/c", "../x", "owner/..", "https://huggingface.co/a/b", "", "a b/c"])
def test_bad_model_name_makes_no_request(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the network was asked"))
    with pytest.raises(Refused, match="is not a directory here"):
        local_folder(name)


def test_only_what_a_model_is_read_from_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict] = []

    def fetch(name: str, **settings: object) -> str:
        calls.append({"name": name, **settings})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    (tmp_path / "config.json").write_text("{}")
    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    assert local_folder("owner/model", "v1") == tmp_path
    assert calls == [{"name": "owner/model", "revision": "v1", "allow_patterns": patterns, "local_dir": None}]
    calls.clear()
    download_only(["owner/model", "other/model"], tmp_path / "out")
    assert [(c["name"], c["local_dir"]) for c in calls] == [
        ("owner/model", tmp_path / "out" / "owner--model"),
        ("other/model", tmp_path / "out" / "other--model"),
    ]


def test_repository_that_is_not_a_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(Refused, match=r"owner/model has no config\.json on the Hub, so it is not a checkpoint of transformers\.$"):
        local_folder("owner/model")
    with pytest.raises(Refused, match="GGUF files hold quantised weights: take the model that they were made from"):
        local_folder("owner/Model-GGUF")


def test_a_missing_model_is_refused_with_the_command_that_fetches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(Refused, match=r"cannot be reached .*--download-only.*hf download owner/model --local-dir FOLDER"):
        local_folder("owner/model")


def test_the_library_itself_offline_gives_that_message(tmp_path: Path) -> None:
    """In a process of its own, since the library reads its settings when it is imported."""
    code = (
        "from eyeline.bundle.hub import local_folder\n"
        "from eyeline.core.errors import Refused\n"
        "try: local_folder('owner/model')\n"
        "except Refused as refused: print(refused)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "owner/model is not on this machine, and the Hub cannot be reached" in done.stdout
