"""A set laid out as LLaVA-Pretrain, and settings with which a shipped recipe trains on it in a test."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

TINY = [  # the recipe's own stages, data layout and evaluation; sizes that fit a test
    "device=cpu",
    "threads=1",
    "validation_steps=3",
    "save_steps=2",
    "stages.align.steps=6",
    "stages.tune.steps=6",
    *(f"stages.{stage}.batch={{max_tokens: 256, max_patches: 160, packs_per_step: 2}}" for stage in ("align", "tune")),
    *(f"stages.{stage}.data.validation_fraction=0.2" for stage in ("align", "tune")),
    *(f"stages.{stage}.data.workers=0" for stage in ("align", "tune")),
    "evaluation.sources.0.limit=5",
    "evaluation.max_new_tokens=4",
]


def write_llava_pretrain(folder: Path) -> None:
    """The layout of LLaVA-Pretrain: a JSON next to numbered folders of JPEG files; one of them is cut short."""
    rng = np.random.default_rng(0)
    rows = []
    for n in range(40):
        name = f"{n % 3:05d}/{n:09d}.jpg"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (1, 1, 3)) * np.ones((20 + n % 7, 24, 1))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name, quality=90)
        turns = [{"from": "human", "value": "Describe it.\n<image>"}, {"from": "gpt", "value": f"A plain image, number {n}."}]
        rows.append({"id": f"{n:09d}", "image": name, "conversations": turns})
    (folder / "blip_laion_cc_sbu_558k.json").write_text(json.dumps(rows))
