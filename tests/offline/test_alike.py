"""Rows that are equal or alike: hashes against published ones, and links against a comparison of every row with every other."""

from itertools import combinations

import numpy as np
import pytest
from PIL import Image as Pillow

from eyeline.core.batch import Sample
from eyeline.offline.alike import NEIGHBOURS, first_rows, links_of
from eyeline.offline.hashes import (
    BAND_HASHES,
    BANDS,
    BLOCKS,
    DIFFERENT_BITS,
    equal_record,
    minhash,
    near_records,
    perceptual_hash,
    sorted_records,
)
from tests.data.short_samples import sample


def photo(seed: int, size: int = 96) -> Pillow.Image:
    """A smooth image, as photos are."""
    coarse = Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (7, 7), dtype=np.uint8))
    return coarse.resize((size, size), Pillow.Resampling.BICUBIC)


def test_perceptual_hash_survives_what_does_not_change_the_look() -> None:
    for seed in range(8):
        image = photo(seed)
        looks = [perceptual_hash(image.resize((60, 70), Pillow.Resampling.LANCZOS)), perceptual_hash(image.point(lambda v: v * 0.8 + 20))]
        assert all((look ^ perceptual_hash(image)).bit_count() <= DIFFERENT_BITS for look in looks)
        assert (perceptual_hash(photo(seed + 100)) ^ perceptual_hash(image)).bit_count() > 10


def test_perceptual_hash_is_imagehash_s() -> None:
    published = [0x968CC4765053ADAF, 0xF1B654DCF049C326, 0x99AB69AFC45AF280, 0xC9E8D364BEFE9800]  # imagehash 4.3.2: phash
    assert [perceptual_hash(photo(seed)) for seed in range(4)] == published


def test_minhash_estimates_the_share_of_common_runs() -> None:
    words = [f"w{n}" for n in range(204)]  # 200 runs
    other = [*words[:154], *(f"x{n}" for n in range(50))]  # 150 of them, and 50 others
    equal = np.mean(minhash(words) == minhash(other))
    assert abs(equal - 150 / 250) < 3 * (0.6 * 0.4 / (BANDS * BAND_HASHES)) ** 0.5
    assert (minhash(words) == minhash(list(words))).all()


def test_bands_find_pairs_as_often_as_the_formula_says() -> None:
    rng = np.random.default_rng(0)
    for share in (0.5, 0.75, 0.9):
        found = 0
        for _ in range(100):
            same = rng.random(len(minhash(["a"]))) < share
            found += bool(same.reshape(BANDS, BAND_HASHES).all(1).any())
        assert abs(found / 100 - (1 - (1 - share**BAND_HASHES) ** BANDS)) < 0.15


LONG = "the quick brown fox jumps over the lazy dog and runs far away from all of the other animals in this old forest"


def said(text: str, answer: str = LONG) -> Sample:
    return sample(text, answer)


def alike(one: tuple[Sample, list[int]], two: tuple[Sample, list[int]]) -> bool:
    records = sorted_records([near_records(*one, 1), near_records(*two, 2)])
    return len(links_of(records, DIFFERENT_BITS)) > 0


def test_rows_are_alike_in_text_and_images() -> None:
    text = said("what is it? " + LONG)
    assert alike((text, []), (said("What is it - " + LONG, LONG + " today."), []))
    assert not alike(
        (text, []), (said("something else entirely, with other words in it", "and another answer that is long as well, so"), [])
    )
    assert alike((text, [0b1010]), (text, [0b1011]))
    assert alike((text, [0]), (text, [0b111 << 40]))
    assert not alike((text, [0]), (text, [0b1111 | 0b11 << 20 | 0b1 << 40 | 0b1 << 60]))
    assert not alike((text, [5]), (text, []))
    assert not alike((text, [5, 6]), (text, [5, 7]))


def test_short_answers_have_to_be_equal() -> None:
    question = LONG + " what colour is the fox?"
    assert alike((sample(question, "It is red"), []), (sample(question, "it is red."), []))
    assert not alike((sample(question, "red"), []), (sample(question, "blue"), []))


@pytest.mark.parametrize("bits", range(DIFFERENT_BITS + 1))
def test_every_near_hash_shares_a_block(bits: int) -> None:
    rng = np.random.default_rng(bits)
    text = said("q")
    for _ in range(50):
        look = int(rng.integers(0, 2**63))
        other = look
        for bit in rng.choice(64, bits, replace=False).tolist():
            other ^= 1 << bit
        assert alike((text, [look]), (text, [other]))
    assert len(near_records(text, [1], 0)) == BANDS * BLOCKS


def test_links_are_those_of_comparing_all_with_all() -> None:
    rng = np.random.default_rng(0)
    keys, checks = rng.integers(0, 6, 30).astype(np.uint64), rng.integers(0, 16, 30).astype(np.uint64)
    records = sorted_records([np.stack([keys, np.arange(30, dtype=np.uint64), checks], 1)])
    for bits in (0, 1, 2):
        wanted = [
            (b, a) for a, b in combinations(range(30), 2) if keys[a] == keys[b] and (int(checks[a]) ^ int(checks[b])).bit_count() <= bits
        ]
        assert max(np.unique(keys, return_counts=True)[1]) <= NEIGHBOURS + 1
        assert links_of(records, bits).tolist() == sorted(map(list, wanted))
    assert len(links_of(records[:0], 3)) == 0


def test_of_one_key_with_many_rows_all_are_linked_with_the_first() -> None:
    records = sorted_records([equal_record(bytes(16), row) for row in range(100)])
    rows, first = first_rows([links_of(records, 0)])
    assert (rows.tolist(), set(first.tolist())) == (list(range(1, 100)), {0})


def test_equal_keys_with_other_content_are_not_equal() -> None:
    records = sorted_records([equal_record(bytes(16), 0), equal_record(bytes(15) + b"\1", 1)])
    assert len(links_of(records, 0)) == 0


def test_first_rows_follow_chains() -> None:
    links = [np.array([[9, 5], [5, 3], [8, 7], [7, 6], [8, 3], [20, 10]], np.uint64), np.array([[6, 4]], np.uint64)]
    rows, first = first_rows(links)
    assert dict(zip(rows.tolist(), first.tolist(), strict=True)) == {4: 3, 5: 3, 6: 3, 7: 3, 8: 3, 9: 3, 20: 10}
    assert len(first_rows([])[0]) == 0
