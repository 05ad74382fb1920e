"""Signals of one image, and of the text of one row: figures, never verdicts. What each means is in `data/signals/columns.py`."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image as Pillow

from eyeline.core.batch import Message, Sample, Text

BLUR_SIDE = 1024  # pixels of the longer side at most: the same photo at twice the size is not less sharp
REPEATED_WORDS = 5  # of an n-gram
LETTERS = 2_000  # of a text that are looked at for its script
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]|\w+")  # where words have no spaces: characters


class ImageSignals(NamedTuple):
    """Figures of one image."""

    width: float
    height: float
    aspect: float
    entropy: float
    sharpness: float


def image_signals(rgb: Pillow.Image, gray: Pillow.Image) -> ImageSignals:
    """The figures of an upright image; `gray` is the same in gray."""
    width, height = rgb.size
    return ImageSignals(width, height, max(width, height) / min(width, height), round(gray.entropy(), 6), sharpness_of(gray))


def sharpness_of(gray: Pillow.Image) -> float:
    """The variance of the Laplacian (Pech-Pacheco et al. 2000, "Diatom autofocusing in brightfield microscopy", LAPV): of
    up + down + left + right - 4 × itself, at every pixel that has these neighbours. 0 for an image without any."""
    if max(gray.size) > BLUR_SIDE:
        gray = gray.copy()
        gray.thumbnail((BLUR_SIDE, BLUR_SIDE), Pillow.Resampling.BOX)
    g = np.asarray(gray, np.float32)
    if min(g.shape) < 3:
        return 0.0
    laplacian = g[:-2, 1:-1] + g[2:, 1:-1] + g[1:-1, :-2] + g[1:-1, 2:] - 4 * g[1:-1, 1:-1]
    return round(float(laplacian.var(dtype=np.float64)), 4)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation; characters in scripts without spaces."""
    return WORD.findall(text.casefold())


def repetition_of(text: str) -> float:
    """The share of characters in repeated 5-grams of words, as Gopher's filter has it (Rae et al. 2021, table A1: more than 0.15 is
    dropped there): from the start, an n-gram that came before counts, and the search continues behind it."""
    words = words_of(text)
    seen: set[tuple[str, ...]] = set()
    repeated = at = 0
    while at + REPEATED_WORDS <= len(words):
        gram = tuple(words[at : at + REPEATED_WORDS])
        if gram in seen:
            repeated += sum(map(len, gram))
            at += REPEATED_WORDS
        else:
            seen.add(gram)
            at += 1
    return repeated / max(sum(map(len, words)), 1)


def script_of(text: str) -> str:
    """The script that most of the first letters belong to, by their Unicode names; of equals the first. Empty without letters."""
    counts = Counter(unicodedata.name(letter, "?").split()[0].lower() for letter in [c for c in text if c.isalpha()][:LETTERS])
    return counts.most_common(1)[0][0] if counts else ""


def text_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, Text))


def texts_of(sample: Sample) -> str:
    """All texts of a row."""
    return "\n".join(map(text_of, sample.messages))


def answers_of(sample: Sample) -> list[str]:
    """The answers that are in the loss."""
    return [text_of(message) for message in sample.messages if message.role == "assistant" and message.supervised]


def answer_in_question(sample: Sample) -> bool:
    """Return whether the words of an answer in the loss come, in their order, in the question before it."""
    return any(_contains(words_of(question), words_of(answer)) for question, answer in _exchanges(sample.messages))


def _exchanges(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    question = ""
    for message in messages:
        if message.role == "user":
            question = text_of(message)
        elif message.role == "assistant" and message.supervised:
            yield question, text_of(message)


def _contains(words: Sequence[str], some: Sequence[str]) -> bool:
    return bool(some) and any(list(words[n : n + len(some)]) == list(some) for n in range(len(words) - len(some) + 1))
