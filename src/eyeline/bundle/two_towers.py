"""A folder with SigLIP's two towers, opened: images and texts become vectors, whose products say how well they go together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eyeline.bundle.folders import about, digest_of_files, read_config, read_preprocessor
from eyeline.checkpoint.tensors import stream
from eyeline.core.batch import Image
from eyeline.core.errors import Refused, fitting
from eyeline.core.image_rule import ImageRule
from eyeline.data.text.tokenizer import load_tokenizer
from eyeline.models import two_towers
from eyeline.models.hf import two_towers as hf
from eyeline.parallel.launch import Machine, machine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THREADS = 1  # on a CPU, unless the recipe says otherwise: sums in another order would give other digits, and workers share the cores


class _Loaded(NamedTuple):
    model: two_towers.Model
    tokenizer: "PreTrainedTokenizerBase"
    here: Machine


@dataclass(frozen=True, eq=False)
class TwoTowers:
    """The towers of a folder, in float32. Pickles small; they are loaded where they are first used, and stay loaded."""

    folder: Path
    config: two_towers.Config
    device: str
    threads: int | None
    identity: str  # a digest of the folder's files

    @property
    def rule(self) -> ImageRule:
        return self.config.vision.rule(1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "config", "device", "threads", "identity")}

    @cached_property
    def _loaded(self) -> _Loaded:
        here = machine(self.device, self.threads or THREADS)
        with fitting(f"the towers of {self.folder}"):
            model = two_towers.Model(self.config).requires_grad_(False).to(here.device)
        tensors = dict(model.named_parameters())
        for name, value in stream(tensors, self.folder, hf.keys(self.config), hf.DROPPED):
            tensors[name].copy_(value)
        return _Loaded(model, load_tokenizer(self.folder), here)

    @torch.no_grad()
    def image_vectors(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """A vector of length 1 for each image, all of them in one pass."""
        model, _, here = self._loaded
        patches_PC, places_P2 = (np.concatenate(some) for some in zip(*((one.patches_PC, one.places_P2) for one in images), strict=True))
        arrays = (patches_PC, places_P2.astype(np.int64), np.array([one.grid for one in images], np.int64))
        patches, places, grids = (torch.from_numpy(x).to(here.device) for x in arrays)
        with fitting("a batch of images"):
            return model.images(patches, places, grids, [one.grid.patches for one in images]).cpu().numpy()

    @torch.no_grad()
    def text_vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """A vector of length 1 for each text, all of them in one pass."""
        model, tokenizer, here = self._loaded
        said = [text.lower() if self.config.lower_case else text for text in texts]
        ids = tokenizer(said, padding="max_length", truncation=True, max_length=self.config.text.max_positions)["input_ids"]
        with fitting("a batch of texts"):
            return model.texts(torch.tensor(ids, device=here.device)).cpu().numpy()


def open_two_towers(folder: Path, device: str, threads: int | None) -> TwoTowers:
    """The towers in a folder. Refused, before they are loaded, for a folder that does not hold two that are known here."""
    if not folder.is_dir():
        raise Refused(f"--similarity {folder} is not a directory. Download a checkpoint with two towers, such as "
                      "google/siglip2-base-patch16-224, and give its folder")  # fmt: skip
    with about(folder):
        config = hf.from_hf(read_config(folder), read_preprocessor(folder))
    tokenizer, rows = load_tokenizer(folder), config.text.vocab_size
    if tokenizer.pad_token_id is None or len(tokenizer) > rows:
        what = "has no padding token" if tokenizer.pad_token_id is None else f"has {len(tokenizer):,} tokens, and the text tower {rows:,}"
        raise Refused(f"the tokenizer in {folder} {what}. Download the checkpoint again, with its own tokenizer")
    tensors = dict(_shape(config).named_parameters())
    for _ in stream(tensors, folder, hf.keys(config), hf.DROPPED, only=lambda _: False):
        pass  # names and shapes are checked before the first tensor
    return TwoTowers(folder, config, device, threads, digest_of_files(folder))


def _shape(config: two_towers.Config) -> two_towers.Model:
    with torch.device("meta"):
        return two_towers.Model(config)
