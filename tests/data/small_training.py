"""Trains a small model on sources, a step for everything that is in them, and tells what it was shown: from the batches themselves."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from eyeline.core.batch import IGNORE, Batch, Budget
from eyeline.core.plan import Spec
from eyeline.data.loader import training_steps
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder, train_bpe
from eyeline.models import qwen3, qwen3_vl, qwen_vision, spec
from eyeline.models.shape import build
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train.optim import AdamW, make_optimizers
from eyeline.train.step import update
from tests.data.conftest import WORDS
from tests.planned import plan_around

COLOURS = {"black": (0, 0, 0), "white": (255, 255, 255), "red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
PATCH, FRAMES, MERGE = 4, 2, 2
BUDGET = Budget(tokens=1024, patches=256)


def draw(path: Path) -> Path:
    """An image that is all of the colour in its name: `red.png`, `frames/blue-2.jpg`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), COLOURS[next(colour for colour in COLOURS if colour in path.name)]).save(path)
    return path


@cache
def encoder() -> Encoder:
    template = TEMPLATES["qwen3"]
    return Encoder(train_bpe([WORDS] * 3, 600, template), template)


@cache
def small() -> tuple[nn.Module, Spec, list[torch.optim.Optimizer]]:
    """A model of Qwen3-VL's kind, which takes videos: 4 visual tokens an image."""
    vision = qwen_vision.Config(
        patch=PATCH,
        temporal_patch=FRAMES,
        merge=MERGE,
        hidden_size=16,
        layers=1,
        heads=2,
        intermediate_size=16,
        position_grid=4,
        min_pixels=256,
        max_pixels=256,
        video_min_pixels=256,
    )
    language = qwen3.Config(
        vocab_size=encoder().vocabulary,
        hidden_size=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        intermediate_size=16,
        mrope_section=(2, 1, 1),
        tie_embeddings=True,
    )
    config = qwen3_vl.Config(vision=vision, language=language)
    model = build(config, "cpu")
    rng = torch.Generator().manual_seed(0)
    for part in model.children():
        part.initialise(rng)
    optimizers = make_optimizers(plan_around(model, config), AdamW())
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = 1e-3
    return model, spec(config), optimizers


def trained(*sources: Source) -> dict[str, list[str]]:
    """What was learned by each sample's id, turns as `role: text [colour]«what is trained»`; the weights must have moved.

    Not a sample may be rejected.
    """
    model, about, optimizers = small()
    reader = reader_of(Data(sources=sources, max_reject_rate=0.0), encoder(), about.image, seed=0, longest=about.max_positions)
    told: dict[str, list[str]] = {}
    for number, step in enumerate(training_steps(reader, BUDGET, micro_batches=1, epochs=1)):
        before = [p.detach().clone() for p in model.parameters()]
        report = update(model, optimizers, step, ONE_DEVICE, max_grad_norm=1.0, balance=None, seed=0, step=number)
        assert report.outcome == "applied"
        assert any(not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
        for batch in step.batches:
            told |= dict(shown(batch))
    return dict(sorted(told.items(), key=lambda item: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]))


def one(path: Path | str, **settings: object) -> list[list[str]]:
    """What was learned of each row of one source, in the order of its rows."""
    return [*trained(Source.model_validate({"path": str(path), **settings})).values()]


def causes(path: Path | str, **settings: object) -> list[tuple[str, str]]:
    """Cause and field of every row of a source, each of which must be rejected."""
    rows = open_source(Source.model_validate({"path": str(path), **settings}))
    return [(bad.cause, bad.field) for _, _, bad in rows.kept_rows()]  # type: ignore[union-attr]  # a Sample fails the test here


def shown(batch: Batch) -> Iterator[tuple[str, list[str]]]:
    """Each document of a batch as turns, images by the colour of their patches and what is trained in «»."""
    learned_T = np.zeros(len(batch.tokens_T), bool)
    assert batch.labels_L is not None
    labels_T = np.full(len(batch.tokens_T), IGNORE)
    labels_T[batch.rows_L] = batch.labels_L
    learned_T[1:] = labels_T[:-1] != IGNORE
    assert (labels_T[:-1] == batch.tokens_T.numpy()[1:])[learned_T[1:]].all()
    image_M = np.searchsorted(batch.cu_N1.numpy() // MERGE**2, batch.sources_M.numpy(), side="right") - 1
    image_of = dict(zip(batch.visual_M.tolist(), image_M.tolist(), strict=True))
    names = [*_names(batch)]
    for id, start, end in zip(batch.ids, batch.cu_S1[:-1].tolist(), batch.cu_S1[1:].tolist(), strict=False):
        text, learned, last, run = "", False, None, []
        for t in range(start, end):
            image = image_of.get(t)
            if (learned_T[t] != learned or image is not None) and run:
                text, run = text + encoder().decode(run, special=True), []
            if learned_T[t] != learned:
                text, learned = text + "»«"[int(learned_T[t])], bool(learned_T[t])
            if image is None:
                run.append(int(batch.tokens_T[t]))
            elif image != last:
                text += f"[{names[image]}]"
            last = image
        text += encoder().decode(run, special=True) + "»" * learned
        yield id, [*_turns(text)]


def _names(batch: Batch) -> Iterator[str]:
    """The colour of each image; a slice of a video has one for each frame that differs."""
    for start, end in zip(batch.cu_N1[:-1].tolist(), batch.cu_N1[1:].tolist(), strict=True):
        frames_F3 = batch.patches_PC[start:end].numpy().reshape(-1, 3, FRAMES, PATCH**2).mean((0, 3)).T
        found = [min(COLOURS, key=lambda c: float(np.abs(np.array(COLOURS[c]) - frame).sum())) for frame in frames_F3]
        yield "/".join(dict.fromkeys(found))


def _turns(text: str) -> Iterator[str]:
    """The turns of a rendered conversation, without the words of the template."""
    for control in ("<|vision_start|>", "<|vision_end|>"):
        text = text.replace(control, "")
    found = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>(»?)\n", text, re.DOTALL)
    assert "".join(f"<|im_start|>{role}\n{said}<|im_end|>{mark}\n" for role, said, mark in found) == text
    yield from (f"{role}: {said}{mark}" for role, said, mark in found)
