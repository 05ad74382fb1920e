"""Checkpoints by name from the Hugging Face Hub: the only file that reaches the network."""

import re
from collections.abc import Sequence
from pathlib import Path

from eyeline.core.errors import Refused
from eyeline.core.files import storage_failed
from eyeline.core.log import say

# All that a model is read from. Weights in other formats, code and images of model cards stay where they are.
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(model: str, revision: str | None = None) -> Path:
    """The folder of a model: `model` itself if there is such a folder, else downloaded (or found in the Hub's cache) by its name.

    Raises Refused when it is neither, or cannot be had; the message has the command that fills a folder elsewhere.
    """
    if model and Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    if model and (path := Path(model).expanduser()).is_file():
        what = (
            "a GGUF file, whose weights are mostly quantised; take the safetensors checkpoint that it was made from"
            if (path.suffix == ".gguf")
            else f"a file; give the folder that it is in, with its config.json and tokenizer: {path.parent}"
        )
        raise Refused(f"{model} is {what}.")
    if _NAME.fullmatch(model) is None or ".." in model:
        raise Refused(f"{model!r} is not a directory here, nor the name of a model on the Hub (owner/model).")
    return _fetched(model, revision, None)


def download_only(models: Sequence[str], out: Path) -> list[Path]:
    """Download models of the Hub into folders of their own under `out`, to be carried to a machine without network."""
    filled = []
    for model in models:
        if _NAME.fullmatch(model) is None or ".." in model:
            raise Refused(f"{model!r} is not the name of a model on the Hub (owner/model).")
        target = out / model.replace("/", "--")
        filled.append(_fetched(model, None, target))
        say(f"{model}: {target}")
    return filled


def _fetched(model: str, revision: str | None, into: Path | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - httpx or httpx2, by its version
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    elsewhere = (
        f"Where there is network: `eyeline import OUT --model {model} --download-only`, or "
        f"`hf download {model} --local-dir FOLDER`; then give the folder that it names here."
    )
    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=PATTERNS, local_dir=into))
    except RepositoryNotFoundError as error:  # also what a private one says to a stranger
        raise Refused(f"the Hub has no model {model!r} that you may read. Check the name; `hf auth login` for private ones.") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise Refused(f"{model} is not on this machine, and the Hub cannot be reached ({type(error).__name__}). {elsewhere}") from error
    except HfHubHTTPError as error:
        raise Refused(f"the Hub refused to send {model}: {error}. {elsewhere}") from error
    except HTTPError as error:  # of the HTTP client, whichever this version of the library has: the connection broke
        raise Refused(
            f"the Hub cannot be reached for {model} ({type(error).__name__}). Try again: files that were downloaded are kept. {elsewhere}"
        ) from error
    except OSError as error:
        raise storage_failed("download into", into or Path.home(), error) from error
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json", "model_index.json")):
        gguf = " GGUF files hold quantised weights: take the model that they were made from." if "gguf" in model.lower() else ""
        raise Refused(f"{model} has no config.json on the Hub, so it is not a checkpoint of transformers.{gguf}")
    return folder
