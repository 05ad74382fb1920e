"""The peer: transformers' own LLaVA under its own Trainer. The one file that imports either.

Everything that a careful user would switch on is on: SDPA, the fused optimizer, no logging, no saving, tensors that are ready.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from bench.measure import Timed
from bench.work import Sized
from eyeline.core.batch import IGNORE, Document, Image
from eyeline.core.image_rule import ImageRule, Square

Example = dict[str, Tensor]


def quiet() -> None:
    """Keep transformers' bars and notes off the screen."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load(folder: Path) -> LlavaForConditionalGeneration:
    return LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def example(document: Document, sized: Sized) -> Example:
    """The document as the peer wants it: labels at their own token's place, pixels normalised, images whole."""
    tokens_T = torch.from_numpy(document.tokens_T).long()
    labels_T = torch.full_like(tokens_T, IGNORE)
    labels_T[1:] = torch.from_numpy(document.labels_T[:-1]).long()  # the peer shifts by one itself
    side, p = sized.image // sized.patch, sized.patch
    cells = torch.from_numpy(document.images[0].patches_PC).view(side, side, 3, p, p).permute(2, 0, 3, 1, 4)
    return {"input_ids": tokens_T, "labels": labels_T, "pixel_values": (cells.reshape(3, sized.image, sized.image) / 255 - 0.5) / 0.5}


def collate(examples: Sequence[Example]) -> Example:
    """Pad to the longest, on the right."""
    longest = max(len(e["input_ids"]) for e in examples)
    out = {"pixel_values": torch.stack([e["pixel_values"] for e in examples])}
    for name, filler in (("input_ids", 0), ("labels", IGNORE)):
        out[name] = torch.stack([torch.nn.functional.pad(e[name], (0, longest - len(e[name])), value=filler) for e in examples])
    lengths = torch.tensor([len(e["input_ids"]) for e in examples])
    out["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return out


@dataclass
class Watch(TrainerCallback):
    """Reads the clocks after step `first` and after the last step, and keeps losses where they are logged."""

    first: int
    marks: dict[int, tuple[float, float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self.marks[0] = (time.process_time(), time.perf_counter())

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.marks[state.global_step] = (time.process_time(), time.perf_counter())

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def timed(self) -> Timed:
        (cpu, wall), (cpu_end, wall_end) = self.marks[self.first], self.marks[max(self.marks)]
        return Timed(cpu_s=cpu_end - cpu, wall_s=wall_end - wall)


def train(
    model: LlavaForConditionalGeneration,
    examples: Sequence[Example],
    rows: int,
    *,
    first: int,
    lr: float,
    strategy: Literal["sequential", "group_by_length"] = "sequential",
    log: bool = False,
) -> Watch:
    """One epoch of the Trainer over `examples`, `rows` at a time, with the optimizer's settings that ours has."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=rows, num_train_epochs=1, learning_rate=lr, lr_scheduler_type="constant",
            adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused",
            train_sampling_strategy=strategy, remove_unused_columns=False, use_cpu=True, dataloader_pin_memory=False, report_to="none",
            save_strategy="no", logging_strategy="steps" if log else "no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        watch = Watch(first)
        with contextlib.redirect_stdout(None):  # its printer of logs
            trainer = Trainer(model=model, args=arguments, train_dataset=Listed(examples), data_collator=collate, callbacks=[watch])
            trainer.train()
    return watch


class Listed(torch.utils.data.Dataset[Example]):
    def __init__(self, examples: Sequence[Example]):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> Example:
        return self.examples[i]


@torch.no_grad()
def loss_of(model: LlavaForConditionalGeneration, examples: Sequence[Example]) -> float:
    """Nats per supervised token over all examples, one at a time: a sum, divided once."""
    total, labels = 0.0, 0
    for one in examples:
        count = int((one["labels"] != IGNORE).sum())
        total += float(model(**collate([one])).loss) * count
        labels += count
    return total / labels


# ---- any family, for forward and backward alone


def hf_model(folder: Path) -> PreTrainedModel:
    """The model in a folder, by the class that its config.json names."""
    seeing = "vision_config" in (folder / "config.json").read_text()
    kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def row(document: Document) -> Example:
    """Ids, labels at their own token's place, and which tokens are visual."""
    tokens_T = torch.from_numpy(document.tokens_T).long()
    labels_T = torch.full_like(tokens_T, IGNORE)
    labels_T[1:] = torch.from_numpy(document.labels_T[:-1]).long()  # the peer shifts by one itself
    kinds_T = torch.zeros_like(tokens_T)
    kinds_T[torch.from_numpy(document.visual_M).long()] = 1
    return {"input_ids": tokens_T, "labels": labels_T, "mm_token_type_ids": kinds_T}


def pixels(images: Sequence[Image], rule: ImageRule) -> Example:
    """Normalised: squares whole, for towers with a convolution; patches and grids for those of native size."""
    patches_P3x = torch.from_numpy(np.concatenate([image.patches_PC for image in images])).float().unflatten(1, (3, -1)) / 255
    mean_31, std_31 = (torch.tensor(x)[:, None] for x in (rule.mean, rule.std))
    patches_PC = ((patches_P3x - mean_31) / std_31).flatten(1)
    if isinstance(rule.resize, Square):
        p, (rows, columns) = rule.patch, images[0].grid
        cells = patches_PC.view(len(images), rows, columns, 3, p, p).permute(0, 3, 1, 4, 2, 5)
        return {"pixel_values": cells.reshape(len(images), 3, rows * p, columns * p)}
    return {"pixel_values": patches_PC, "image_grid_thw": torch.tensor([(1, *image.grid) for image in images])}


def padded(documents: Sequence[Document], rule: ImageRule | None) -> Example:
    """Documents as rows, padded on the right to the longest of them."""
    rows = [row(d) for d in documents]
    longest = max(len(r["input_ids"]) for r in rows)
    fillers = {"input_ids": 0, "labels": IGNORE, "mm_token_type_ids": 0}
    out = {
        name: torch.stack([torch.nn.functional.pad(r[name], (0, longest - len(r[name])), value=filler) for r in rows])
        for name, filler in fillers.items()
    }
    if len(rows) > 1:  # one alone has no padding to hide
        lengths = torch.tensor([len(r["input_ids"]) for r in rows])
        out["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    if rule is None or rule.positions != "grid":
        del out["mm_token_type_ids"]
    return out if rule is None else out | pixels([image for d in documents for image in d.images], rule)


def one_by_one(model: PreTrainedModel, documents: Sequence[Document], rule: ImageRule | None) -> Callable[[], list[float]]:
    """Forward and backward of each document; its loss in nats per supervised token."""
    examples = [padded([d], rule) for d in documents]

    def once() -> list[float]:
        model.zero_grad(set_to_none=True)
        losses = []
        for one in examples:
            loss = model(**one, use_cache=False).loss
            loss.backward()
            losses.append(float(loss.detach()))
        return losses

    return once


def in_rows(model: PreTrainedModel, documents: Sequence[Document], rule: ImageRule | None, rows: int) -> Callable[[], list[float]]:
    """The same in batches of `rows` rows, as they come; one loss, summed over all and divided once."""
    batches = [padded(documents[i : i + rows], rule) for i in range(0, len(documents), rows)]
    counts = [int((batch["labels"] != IGNORE).sum()) for batch in batches]

    def once() -> list[float]:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for batch, labels in zip(batches, counts, strict=True):
            loss = model(**batch, use_cache=False).loss * (labels / sum(counts))
            loss.backward()
            total += float(loss.detach())
        return [total]

    return once
