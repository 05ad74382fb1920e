"""How others read the same archives: webdataset, datasets (streaming), Megatron-Energon, torch's DataLoader. Imported here only.

Each is used as its documentation shows, with what it offers for shuffling, sharding and resuming. Preparing a sample is the same
plain Pillow and tokenizers for all; who has no packing of its own gets the usual one, samples as they come until one does not fit.
"""

# pyright: reportMissingImports=false
# the extra bench-data is not in dev: transformers' Trainer imports `datasets` when it is there, which takes seconds

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image as Pillow
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset, Sampler

from bench.data_work import BUDGET, BUFFER, RULE, TEMPLATE, Packed, Setup
from eyeline.core.batch import IGNORE
from eyeline.core.randomness import rng_for

PACKAGES = {"webdataset": "webdataset", "datasets": "datasets", "energon": "megatron.energon", "DataLoader": "torch"}
Taken = Callable[[], Any]  # the state after a pack
Stream = Iterator[tuple[Packed, Taken]]


class Ready(NamedTuple):
    """A sample prepared."""

    id: str
    tokens_T: np.ndarray
    labels_T: np.ndarray
    patches_PC: np.ndarray


class Prepare:
    """Bytes of a JPEG and a row -> Ready."""

    def __init__(self, setup: Setup):
        self.tokenizer = Tokenizer.from_file(str(setup.folder / "tokenizer" / "tokenizer.json"))
        self.image, self.end = (self.tokenizer.token_to_id(token) for token in (TEMPLATE.image, TEMPLATE.terminator))

    def __call__(self, id: str, jpeg: bytes, row: dict[str, Any]) -> Ready:
        image = Pillow.open(io.BytesIO(jpeg)).convert("RGB")
        [unit] = RULE.units(image.height, image.width)
        pixels = np.asarray(image.resize((unit.width, unit.height), Pillow.Resampling.BICUBIC))
        p, r = RULE.patch, RULE.merge
        cells = pixels.reshape(unit.height // (r * p), r, p, unit.width // (r * p), r, p, 3)
        patches_PC = cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * p * p)
        question, answer = (turn["value"] for turn in row["conversations"])
        asked = self.tokenizer.encode(question.removeprefix("<image>\n") + "\n", add_special_tokens=False).ids
        said = [*self.tokenizer.encode(answer, add_special_tokens=False).ids, self.end]
        tokens_T = np.array([self.image] * unit.tokens + asked + said)
        labels_T = tokens_T.copy()
        labels_T[: unit.tokens + len(asked)] = IGNORE
        return Ready(id, tokens_T, labels_T, patches_PC)


def joined(samples: list[Ready]) -> Packed:
    """End to end, padded to the budget."""
    cu_S1 = np.cumsum([0, *(len(s.tokens_T) for s in samples)])
    tokens_T, labels_T = np.zeros(BUDGET.tokens, np.int64), np.full(BUDGET.tokens, IGNORE, np.int64)
    np.concatenate([s.tokens_T for s in samples], out=tokens_T[: cu_S1[-1]])
    np.concatenate([s.labels_T for s in samples], out=labels_T[: cu_S1[-1]])
    patches_PC = np.concatenate([s.patches_PC for s in samples])
    cu_N1 = np.cumsum([0, *(len(s.patches_PC) for s in samples)])
    return Packed(tuple(s.id for s in samples), tokens_T, int((labels_T != IGNORE).sum()), cu_S1, patches_PC, cu_N1)


def greedy(samples: Iterable[Ready], state: Callable[[int], Any]) -> Stream:
    """Samples as they come, until one does not fit. `state(n)` is what resumes after n samples of this stream."""
    open_pack: list[Ready] = []
    used = given = 0
    for sample in samples:
        if used + len(sample.tokens_T) > BUDGET.tokens:
            given += len(open_pack)
            yield joined(open_pack), lambda n=given: state(n)
            open_pack, used = [], 0
        open_pack.append(sample)
        used += len(sample.tokens_T)
    if open_pack:
        given += len(open_pack)
        yield joined(open_pack), lambda n=given: state(n)


def webdataset(setup: Setup, state: Any = None, rank: int = 0, ranks: int = 1) -> Stream:
    """Archives are shuffled, then samples in a buffer; ranks take archives in turn. There is no resuming: what was seen is read again
    and left out, before it is decoded."""
    import webdataset as wds

    prepare, seen = Prepare(setup), state or 0
    split = wds.split_by_node if ranks == 1 else lambda urls: list(urls)[rank::ranks]
    pipeline = wds.WebDataset(setup.paths, shardshuffle=1_000, seed=0, nodesplitter=split, empty_check=False).shuffle(BUFFER, seed=0)
    raw = (sample for n, sample in enumerate(pipeline) if n >= seen)
    ready = (prepare(s["__key__"], s["jpg"], json.loads(s["json"])) for s in raw)
    return greedy(ready, lambda n: seen + n)


def datasets(setup: Setup, state: Any = None, rank: int = 0, ranks: int = 1) -> Stream:
    """Streaming, its own shuffling buffer, `split_dataset_by_node`, `state_dict`. Its documentation says that the buffer is lost on
    resuming: samples in it are skipped."""
    import datasets as hf
    from datasets.distributed import split_dataset_by_node

    hf.disable_progress_bars()
    prepare = Prepare(setup)
    stream = hf.load_dataset("webdataset", data_files={"train": setup.paths}, split="train", streaming=True)
    stream = stream.cast_column("jpg", hf.Image(decode=False)).shuffle(seed=0, buffer_size=BUFFER)
    if ranks > 1:
        stream = split_dataset_by_node(stream, rank, ranks)
    if state is not None:
        stream.load_state_dict(state)
    ready = (prepare(s["__key__"], s["jpg"]["bytes"], s["json"]) for s in stream)
    return greedy(ready, lambda _: stream.state_dict())


def energon(setup: Setup, state: Any = None, rank: int = 0, ranks: int = 1) -> Stream:
    """Its savable loader without worker processes. Packing is its own mechanism; the choice inside its buffer, which users write, is
    first-fit-decreasing. The folder is prepared beforehand, as `energon prepare` does."""
    from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, stateless

    prepare = Prepare(setup)

    @stateless
    def cook(sample: Any) -> Any:
        return sample

    class Encoder(DefaultTaskEncoder):
        cookers = [Cooker(cook)]  # noqa: RUF012
        decoder = None  # bytes: all sides decode alike

        @stateless
        def encode_sample(self, sample: Any) -> dict[str, Any]:
            row = sample["json"]
            key = sample["__key__"].rpartition("/")[2]
            ready = prepare(key, sample["jpg"], json.loads(row) if isinstance(row, bytes | str) else row)
            return {name: value for name, value in sample.items() if name.startswith("__")} | {"ready": ready}

        def select_samples_to_pack(self, samples: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
            packs: list[list[dict[str, Any]]] = []
            free: list[int] = []
            for sample in sorted(samples, key=lambda s: -len(s["ready"].tokens_T)):
                length = len(sample["ready"].tokens_T)
                at = next((n for n, left in enumerate(free) if left >= length), len(packs))
                if at == len(packs):
                    packs.append([])
                    free.append(BUDGET.tokens)
                packs[at].append(sample)
                free[at] -= length
            return packs

        @stateless
        def pack_selected_samples(self, samples: list[dict[str, Any]]) -> Packed:
            return joined([sample["ready"] for sample in samples])

    dataset = get_train_dataset(
        str(setup.archives), worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=0), batch_size=None,
        packing_buffer_size=BUFFER, shuffle_buffer_size=BUFFER, max_samples_per_sequence=None, task_encoder=Encoder(), repeat=False,
    )  # fmt: skip
    loader = get_savable_loader(dataset)
    if state is not None:
        loader.restore_state_rank(state)
    packs = iter(loader)
    while True:
        with redirect_stderr(io.StringIO()):  # where it draws a bar for every buffer
            pack = next(packs, None)
        if pack is None:
            return
        arrays = {name: value.numpy() for name, value in pack._asdict().items() if isinstance(value, torch.Tensor)}
        yield pack._replace(**arrays), loader.save_state_rank


def prepare_energon(setup: Setup) -> None:
    """What `energon prepare` writes into a folder of archives."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    names = [Path(path).name for path in setup.paths]
    with redirect_stdout(io.StringIO()):
        BaseWebdatasetFactory.prepare_dataset(
            EPath(setup.archives), names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
        )
    about = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (setup.archives / ".nv-meta" / "dataset.yaml").write_text(about)


class Members(Dataset[Ready]):
    """A map-style data set over archives: the position of each member is read from the headers when it is opened."""

    def __init__(self, setup: Setup):
        self.prepare = Prepare(setup)
        self.samples: list[tuple[str, str, dict[str, tuple[int, int]]]] = []
        for path in setup.paths:
            found: dict[str, dict[str, tuple[int, int]]] = {}
            with tarfile.open(path) as archive:
                for info in archive:
                    key, _, part = info.name.partition(".")
                    found.setdefault(key, {})[part] = (info.offset_data, info.size)
            self.samples += [(path, key, parts) for key, parts in found.items()]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Ready:
        path, key, parts = self.samples[number]
        with open(path, "rb") as file:
            file.seek(parts["jpg"][0])
            jpeg = file.read(parts["jpg"][1])
            file.seek(parts["json"][0])
            row = file.read(parts["json"][1])
        return self.prepare(key, jpeg, json.loads(row))


class Order(Sampler[int]):
    """Every `ranks`-th of a permutation, from a position on."""

    def __init__(self, size: int, seen: int, rank: int, ranks: int):
        self.chosen = rng_for(0, "bench order").permutation(size)[rank::ranks][seen:].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.chosen)


def as_it_is(sample: Any) -> Any:
    """Instead of torch's conversion to tensors, which would be undone for packing."""
    return sample


def dataloader(setup: Setup, state: Any = None, rank: int = 0, ranks: int = 1) -> Stream:
    """Map-style, with a sampler that starts where it stopped: what users write by hand around torch's DataLoader."""
    members, seen = Members(setup), state or 0
    loader = DataLoader(members, batch_size=None, sampler=Order(len(members), seen, rank, ranks), collate_fn=as_it_is)
    return greedy(loader, lambda n: seen + n)


PEERS: dict[str, Callable[..., Stream]] = {"webdataset": webdataset, "datasets": datasets, "energon": energon, "DataLoader": dataloader}
