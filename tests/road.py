"""The road of one batch, run by tests/test_road.py in a process of its own: prints the modules of ours that run, in the order of their
first calls, while one batch goes from a LLaVA JSON to its gradient."""

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

import eyeline
from eyeline.core.batch import Budget
from eyeline.core.plan import materialise
from eyeline.data.loader import training_steps
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder, train_bpe
from eyeline.models import llava, qwen2, siglip2
from eyeline.models.shape import shape
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train.optim import AdamW, make_optimizers
from eyeline.train.step import update

PACKAGE = str(Path(eyeline.__file__).parent)


def written(folder: Path) -> Path:
    """A LLaVA set of one image and one question."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    Pillow.fromarray(pixels).save(folder / "a.png")
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "a red circle"}]
    (folder / "rows.json").write_text(json.dumps([{"id": "0", "image": "a.png", "conversations": turns}]))
    return folder / "rows.json"


def modules_of_one_batch(folder: Path) -> list[str]:
    """The modules of the package that run, by their paths in it, in the order of their first calls."""
    tokenizer = train_bpe(["what is it? a red circle " * 9], 300, TEMPLATES["plain"])
    encoder = Encoder(tokenizer, TEMPLATES["plain"])
    config = llava.Config(
        vision=siglip2.Config(image_size=16, patch=4, hidden_size=16, layers=1, heads=2, intermediate_size=24),
        projector=llava.ProjectorConfig(shuffle=2),
        language=qwen2.Config(
            vocab_size=len(tokenizer), hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=24, tie_embeddings=False
        ),
    )
    data = Data(sources=(Source(path=str(written(folder))),))
    plan = shape(config)
    materialise(plan, "cpu")
    model, about = plan.model, plan.spec
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    optimizers = make_optimizers(plan, AdamW())
    met: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            met.setdefault(code.co_filename[len(PACKAGE) + 1 :])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        reader = reader_of(data, encoder, about.image, seed=0, longest=about.max_positions)
        step = next(training_steps(reader, Budget(64, 64), 1, 1))
        report = update(model, optimizers, step, ONE_DEVICE, max_grad_norm=None, balance=None, seed=0, step=0)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert report.outcome == "applied" and step.batches[0].counts.images == 1
    return list(met)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(modules_of_one_batch(Path(sys.argv[1]))))
