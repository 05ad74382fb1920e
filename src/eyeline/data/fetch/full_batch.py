"""A batch that is as full as a recipe lets it be, of made-up documents: what a step costs is counted on it."""

from collections.abc import Sequence

import numpy as np

from eyeline.core.batch import IGNORE, Batch, Budget, Document, Image
from eyeline.core.image_rule import ImageRule
from eyeline.data.fetch.batches import batch_of

# A conversation about one image, as in LLaVA-Instruct: a photo of COCO's size, some 350 tokens of text, of which answers are 60 %
PHOTO = (480, 640)  # height and width, in pixels
TEXT, ANSWERS = 350, 210


def full_batch(rule: ImageRule | None, vocab_size: int, budget: Budget, photo: tuple[int, int] = PHOTO, text: int = TEXT) -> Batch:
    """A batch that fills its budget with conversations about one image each, and then, while tokens are left, about none.
    `photo`: height and width of the images, in pixels; `text`: tokens of text in a conversation."""
    documents: list[Document] = []
    tokens, patches = budget.tokens, budget.patches
    while tokens > 0:
        images = [] if rule is None else _images(rule, photo, len(documents))
        visual, shown = sum(image.tokens for image in images), sum(len(image.patches_PC) for image in images)
        if visual + text > tokens or shown > patches:
            images, visual, shown = [], 0, 0
        words = min(text, tokens)
        documents.append(_document(f"document {len(documents)}", visual, words, min(-(-text * ANSWERS // TEXT), words), images, vocab_size))
        tokens, patches = tokens - visual - words, patches - shown
    return batch_of(documents, budget)


def _images(rule: ImageRule, photo: tuple[int, int], number: int) -> list[Image]:
    images = []
    for i, unit in enumerate(rule.units(*photo)):
        patches_PC = np.zeros((unit.grid.patches, 3 * rule.frames * rule.patch**2), np.uint8)
        places_P2 = np.zeros((unit.grid.patches, 2), np.int32)
        images.append(Image(f"image {number}.{i}", patches_PC, places_P2, unit.grid, rule.merge))
    return images


def _document(name: str, visual: int, text: int, answers: int, images: Sequence[Image], vocab_size: int) -> Document:
    length = visual + text
    tokens_T = (np.arange(length) % vocab_size).astype(np.int32)
    labels_T = np.full(length, IGNORE, np.int32)
    labels_T[length - answers :] = 1 % vocab_size
    return Document(name, tokens_T, labels_T, np.arange(visual, dtype=np.int32), tuple(images))
