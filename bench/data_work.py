"""What all sides of case `data` read: archives of real-sized JPEGs with conversations, the same on every machine."""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw

from eyeline.core.batch import Budget
from eyeline.core.image_rule import Area, ImageRule
from eyeline.core.randomness import rng_for
from eyeline.data.text.templates import template_named
from eyeline.data.text.tokenizer import Encoder, load_tokenizer, train_bpe

SHARDS, PER_SHARD = 64, 63  # archives; samples in one: 4,032 in all
BUDGET = Budget(4_096, 1 << 16)
RULE = ImageRule(16, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", Area(64**2, 512**2))
TEMPLATE = template_named("plain")
BUFFER = 256  # samples that a peer shuffles among, and that Megatron-Energon packs from
CANVAS = 1_024  # pixels per side
WORDS = re.findall(
    "[a-z]+",
    "the a red green blue small large circle square house river mountain street window under over beside behind between several many few "
    "people walk stand look carry open closed bright dark early late image shows text reads number left right corner middle quickly",
)


class Packed(NamedTuple):
    """A pack of any side, as far as sides are compared."""

    ids: tuple[str, ...]
    tokens_T: np.ndarray
    labelled: int
    cu_S1: np.ndarray  # bounds of documents, those of padding left out
    patches_PC: np.ndarray
    cu_N1: np.ndarray  # bounds of images: each document has one


@dataclass(frozen=True)
class Setup:
    """Where the work is: folders of archives (`tiny` has the first one), next to the folder `tokenizer`."""

    folder: Path
    name: Literal["full", "tiny"]

    @property
    def archives(self) -> Path:
        return self.folder / self.name

    @property
    def paths(self) -> list[str]:
        return [str(path) for path in sorted(self.archives.glob("*.tar"))]

    @property
    def samples(self) -> int:
        return len(self.paths) * PER_SHARD

    def encoder(self) -> Encoder:
        return Encoder(load_tokenizer(self.folder / "tokenizer"), TEMPLATE)


def make(folder: Path, shards: int = SHARDS) -> float:
    """Write the archives and the tokenizer. Returns the mean size of a JPEG, in bytes."""
    canvas = painted()
    sizes: list[int] = []
    for name in ("full", "tiny"):
        (folder / name).mkdir(parents=True)
    for shard in range(shards):
        path = folder / "full" / f"{shard:02d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(PER_SHARD):
                jpeg, row = sample(canvas, shard * PER_SHARD + number)
                sizes.append(len(jpeg))
                for part_name, content in (("jpg", jpeg), ("json", json.dumps(row).encode())):
                    info = tarfile.TarInfo(f"{shard:02d}-{number:02d}.{part_name}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        if shard == 0:
            (folder / "tiny" / path.name).hardlink_to(path)
    texts = [turn["value"] for n in range(200) for turn in conversation(n)]
    train_bpe(texts, 1_000, TEMPLATE).save_pretrained(str(folder / "tokenizer"))
    return sum(sizes) / len(sizes)


def painted() -> Pillow.Image:
    """Soft colours, many shapes, words and some noise: what makes a photograph's JPEG about as large as it is."""
    rng = rng_for(0, "bench canvas")
    soft = Pillow.fromarray(rng.integers(0, 256, (48, 48, 3)).astype(np.uint8)).resize((CANVAS, CANVAS), Pillow.Resampling.BICUBIC)
    draw = ImageDraw.Draw(soft)
    for _ in range(400):
        x, y, w, h = (int(v) for v in rng.integers(0, CANVAS, 4))
        box, colour = (x, y, x + w // 10, y + h // 10), tuple(int(v) for v in rng.integers(0, 256, 3))
        (draw.ellipse if rng.random() < 0.5 else draw.rectangle)(box, outline=colour, width=3)
        draw.text((y, x), " ".join(rng.choice(WORDS, 3)), fill=colour)
    noisy = np.asarray(soft).astype(np.float32) + 5 * rng.standard_normal((CANVAS, CANVAS, 3), np.float32)
    return Pillow.fromarray(noisy.clip(0, 255).astype(np.uint8))


def sample(canvas: Pillow.Image, number: int) -> tuple[bytes, dict[str, object]]:
    """A JPEG and its row: a piece of the canvas, 320 to 448 pixels per side, with a line of text on it."""
    rng = rng_for(0, "bench jpeg", number)
    width, height = (int(v) for v in rng.integers(320, 449, 2))
    x, y = (int(v) for v in rng.integers(0, CANVAS - 448, 2))
    image = canvas.crop((x, y, x + width, y + height))
    ImageDraw.Draw(image).text((20, height // 2), f"image {number}: " + " ".join(rng.choice(WORDS, 6)), fill=(255, 255, 255))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=84)
    return out.getvalue(), {"conversations": conversation(number)}


def conversation(number: int) -> list[dict[str, str]]:
    rng = rng_for(0, "bench words", number)
    long = int(np.clip(np.exp(4.3 + 0.9 * rng.standard_normal()), 5, 1_000))
    question, answer = (" ".join(rng.choice(WORDS, n)) for n in (10, long))
    return [{"from": "human", "value": f"<image>\n{question}?"}, {"from": "gpt", "value": f"{answer}."}]


@dataclass(frozen=True)
class Seen:
    """What a side gave in an epoch, without its pixels."""

    ids: list[str]
    hashes: dict[str, str]  # of the ids of tokens and the pixels of each sample
    labelled: int
    padding: float  # share of token slots

    @staticmethod
    def of(packs: Iterable[Packed]) -> "Seen":
        ids: list[str] = []
        hashes: dict[str, str] = {}
        labelled = used = count = 0
        for pack in packs:
            count, used, labelled = count + 1, used + int(pack.cu_S1[-1]), labelled + pack.labelled
            for n, id in enumerate(pack.ids):
                tokens = pack.tokens_T[pack.cu_S1[n] : pack.cu_S1[n + 1]].astype(np.int64)
                patches = np.ascontiguousarray(pack.patches_PC[pack.cu_N1[n] : pack.cu_N1[n + 1]])
                ids.append(id)
                hashes[id] = hashlib.sha256(tokens.tobytes() + patches.tobytes()).hexdigest()
        return Seen(ids, hashes, labelled, 1 - used / (count * BUDGET.tokens))
