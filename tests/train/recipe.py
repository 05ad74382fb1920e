"""A recipe small enough to train in a second, on images and conversations that it makes itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from eyeline.recipes.read import override, run_of
from eyeline.train.run import Run

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220)}


def write_data(folder: Path, count: int = 24) -> Path:
    """LLaVA JSON: one image or two, two turns sometimes, every fifth sample text alone."""
    (folder / "pictures").mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for n in range(count):
        colour = list(COLOURS)[n % 3]
        pixels = np.clip(np.array(COLOURS[colour]) + rng.normal(0, 20, (18, 14, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{n}.png")
        ask, answer = f"<image>\nwhich colour, {'please ' * (n % 4)}?", f"it is {colour}"
        turns = [{"from": "human", "value": ask}, {"from": "gpt", "value": answer}]
        if n % 4 == 1:
            turns += [{"from": "human", "value": "are you sure?"}, {"from": "gpt", "value": f"yes, {colour}"}]
        row: dict[str, Any] = {"id": f"s{n}", "kind": colour, "image": f"pictures/{n}.png", "conversations": turns}
        if n % 5 == 4:
            row = {"id": f"s{n}", "conversations": [{"from": "human", "value": "say a word"}, {"from": "gpt", "value": colour}]}
        rows.append(row)
    (folder / "data.json").write_text(json.dumps(rows))
    return folder / "data.json"


def tiny_run(folder: Path, *overrides: str) -> Run:
    """`tiny_recipe` with overrides, of which later ones win."""
    return run_of(overridden(tiny_recipe(folder), *overrides), "tiny")


def overridden(recipe: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """A recipe with overrides, one after another: the command line refuses two of one setting."""
    for text in overrides:
        recipe = override(recipe, [text])
    return recipe


def tiny_recipe(folder: Path) -> dict[str, Any]:
    """Two stages: all parts in full, then LoRA with dropout, and the projector. Its data are written once in `folder`."""
    data = folder / "data" / "data.json"
    if not data.exists():
        write_data(folder / "data")
    source = {"sources": [{"path": str(data)}], "validation_fraction": 0.2, "augment": {"flip": True}}
    batch = {"max_tokens": 160, "max_patches": 80, "packs_per_step": 2}
    return {
        "name": "tiny",
        "out": str(folder / "run"),
        "model": {
            "template": "plain",
            "config": {
                "vision": {"image_size": 16, "patch": 4, "hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 24},
                "projector": {"shuffle": 2},
                "language": {
                    "vocab_size": 300,
                    "hidden_size": 16,
                    "layers": 2,
                    "heads": 2,
                    "kv_heads": 1,
                    "intermediate_size": 24,
                    "tie_embeddings": True,
                },
            },
        },
        "device": "cpu",
        "threads": 1,
        "stages": [
            {
                "name": "whole",
                "trains": {part: {"how": "full", "lr": 0.01} for part in ("vision", "projector", "language")},
                "data": source,
                "batch": batch,
                "steps": 4,
                "optimizer": {"kind": "muon", "weight_decay": 0.1},
            },
            {
                "name": "adapt",
                "trains": {
                    "projector": {"how": "full", "lr": 0.01},
                    "language": {
                        "how": "lora",
                        "lr": 0.02,
                        "rank": 2,
                        "alpha": 4,
                        "dropout": 0.3,
                        "targets": ["q_proj", "v_proj", "down_proj"],
                    },
                },
                "data": source,
                "batch": batch,
                "steps": 4,
                "optimizer": {"kind": "adamw"},
            },
        ],
        "evaluation": {"sources": [{"path": str(data), "limit": 6}], "max_new_tokens": 6},
    }
