"""Signals of images and texts, against numbers done by hand."""

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageFilter

from eyeline.offline.measures import (
    BLUR_SIDE,
    answer_in_question,
    image_signals,
    repetition_of,
    script_of,
    sharpness_of,
    words_of,
)
from tests.data.short_samples import sample


def gray(rows: list[list[int]]) -> Pillow.Image:
    return Pillow.fromarray(np.array(rows, np.uint8))


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    image = gray([[0, 0, 0, 0], [0, 10, 20, 0], [0, 0, 0, 0]])
    assert sharpness_of(image) == ((20 - 40) - (10 - 80)) ** 2 / 4  # of -20 and -70
    assert sharpness_of(gray([[1, 2], [3, 4]])) == 0
    noise = Pillow.fromarray(np.random.default_rng(0).integers(0, 256, (80, 60), dtype=np.uint8))
    values = [sharpness_of(noise.filter(ImageFilter.GaussianBlur(radius))) for radius in (0, 1, 3)]
    assert values == sorted(values, reverse=True) and values[0] > 100 * values[2]


def test_sharpness_of_a_large_image_is_that_of_one_half_its_size() -> None:
    small = Pillow.fromarray(np.random.default_rng(0).integers(0, 256, (BLUR_SIDE, 64), dtype=np.uint8))
    large = small.resize((128, 2 * BLUR_SIDE), Pillow.Resampling.NEAREST)
    assert sharpness_of(large) == sharpness_of(small)


def test_figures_of_an_image() -> None:
    half = np.zeros((8, 16), np.uint8)
    half[:, :8] = 255
    image = Pillow.fromarray(half)
    found = image_signals(image.convert("RGB"), image)
    assert (found.width, found.height, found.aspect, found.entropy) == (16, 8, 2, 1)  # two grays, equally often: one bit
    assert image_signals(image.rotate(90, expand=True), image).aspect == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 0),
        ("one two three four five six", 0),
        ("a b c d e a b c d e", 5 / 10),  # the second time counts
        ("a b c d e. A b, c d e! f", 5 / 11),
        ("one two three four five one two three four five", 19 / 38),
        ("a b c d " * 3, 5 / 12),  # as Gopher counts: behind an n-gram that is repeated the search continues
    ],
)
def test_repetition_by_hand(text: str, wanted: float) -> None:
    assert repetition_of(text) == pytest.approx(wanted)


def test_words_of_scripts_without_spaces_are_characters() -> None:
    assert words_of("Don't, 你好 World-3") == ["don", "t", "你", "好", "world", "3"]


@pytest.mark.parametrize(("text", "wanted"), [("", ""), ("12 !", ""), ("héllo 你", "latin"), ("你好 a", "cjk"), ("привет", "cyrillic")])
def test_script_is_that_of_most_letters(text: str, wanted: str) -> None:
    assert script_of(text) == wanted


@pytest.mark.parametrize(
    ("question", "answer", "wanted"),
    [
        ("Is it red or blue?", "Blue.", True),
        ("Is it bluest?", "blue", False),
        ("Which one? A red circle, or not", "red circle", True),
        ("circle red", "red circle", False),
        ("what?", "...", False),
    ],
)
def test_answer_is_found_in_the_question_by_words(question: str, answer: str, wanted: bool) -> None:
    assert answer_in_question(sample(question, answer)) is wanted
