"""Hashes by which rows are found that are equal, or alike: the side files of signals. No text and no image is in them.

Two rows are **alike** when their texts share about three of four runs of five words (MinHash), short answers are the same, and their
images look the same (perceptual hash). A row has a *record* for each way in which another row may be like it: rows whose records have the
same key are compared, and no others.

Dims: N records  W words' runs of a text  H hash functions  B bands
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from eyeline.core.batch import Sample
from eyeline.data.plan.order import Hashes, mix_hash
from eyeline.offline.measures import answers_of, texts_of, words_of

RUN_WORDS = 5  # of a run ("shingle")
# Rows whose texts share s of their runs have a band in common with probability 1 - (1 - s^8)^14: 77 % at s = 0.75, 5 % at 0.5 (FineWeb,
# Penedo et al. 2024, uses the same)
BANDS, BAND_HASHES = 14, 8
SHORT_ANSWER = 8  # words: answers of at most so many are to be equal, since one other word is another answer
HASHED_AT_ONCE = 4096  # runs
SIDE, LOW = 32, 8  # pixels of the image that is transformed, and lowest frequencies each way that count
BLOCKS, BLOCK_BITS = 4, 16
DIFFERENT_BITS = BLOCKS - 1  # of 64, at most: then one block at least is equal
ROW_BITS = 32  # of a record's row: its number in the partition; above it the partition's

SEEDS_H1: Hashes = mix_hash(np.arange(1, BANDS * BAND_HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))[:, None]
COSINES = np.cos(np.pi * np.outer(np.arange(LOW), 2 * np.arange(SIDE) + 1) / (2 * SIDE))


def perceptual_hash(gray: Pillow.Image) -> int:
    """64 bits that similar images share: which of the 64 lowest frequencies (DCT-II of the image at 32 × 32) are above their median
    (Zauner 2010; `imagehash.phash`). Frequencies that an image does not have are zero here, and not what rounding makes of them."""
    small = np.asarray(gray.resize((SIDE, SIDE), Pillow.Resampling.LANCZOS), np.float64)
    low = np.round(COSINES @ small @ COSINES.T, 6)
    return int.from_bytes(np.packbits(low > np.median(low)).tobytes(), "big")


def different_bits(a_N: Hashes, b_N: Hashes) -> NDArray[np.uint8]:
    return np.bitwise_count(a_N ^ b_N)


def minhash(words: Sequence[str]) -> Hashes:
    """The least of each hash function over all runs of words: of two texts, each is equal with the share of runs that they have in common
    (Broder 1997)."""
    runs = {" ".join(words[n : n + RUN_WORDS]) for n in range(max(len(words) - RUN_WORDS + 1, 1))}
    hashed_W = np.array([_hash64(run) for run in sorted(runs)], np.uint64)
    least_H = np.full(len(SEEDS_H1), np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(hashed_W), HASHED_AT_ONCE):
        np.minimum(least_H, mix_hash(hashed_W[None, start : start + HASHED_AT_ONCE] ^ SEEDS_H1).min(1), out=least_H)
    return least_H


def near_records(sample: Sample, images: Sequence[int], row: int) -> Hashes:
    """(key, row, perceptual hash of the first image) of each record; `images` are the perceptual hashes of all. The others have to be
    equal, as short answers have."""
    answers = [words_of(answer) for answer in answers_of(sample)]
    same = [" ".join(words) if len(words) <= SHORT_ANSWER else "…" for words in answers]
    exact = _hash64(repr((same, len(images), list(images[1:]))))
    key_B = np.full(BANDS, exact, np.uint64) ^ np.arange(BANDS, dtype=np.uint64)
    band_BH = minhash(words_of(texts_of(sample))).reshape(BANDS, BAND_HASHES)
    for n in range(BAND_HASHES):
        key_B = mix_hash(key_B ^ band_BH[:, n])
    if not images:
        return _records(key_B, row, 0)
    blocks = [(images[0] >> n * BLOCK_BITS & (1 << BLOCK_BITS) - 1) | n << BLOCK_BITS for n in range(BLOCKS)]
    return _records(mix_hash(key_B ^ mix_hash(np.array(blocks, np.uint64)[:, None])).ravel(), row, images[0])


def equal_record(key: bytes, row: int) -> Hashes:
    """The one record of a row by which equal ones are found, from a hash of 16 bytes of all of it."""
    return _records(np.frombuffer(key[:8], ">u8").astype(np.uint64), row, int.from_bytes(key[8:], "big"))


def _records(key_N: Hashes, row: int, check: int) -> Hashes:
    return np.stack([key_N, np.full_like(key_N, row), np.full_like(key_N, check)], 1)


def sorted_records(records: Sequence[Hashes]) -> Hashes:
    """All records by key, those of one key by row."""
    record_N3 = np.concatenate([np.empty((0, 3), np.uint64), *records])
    return record_N3[np.lexsort((record_N3[:, 1], record_N3[:, 0]))]


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
