"""Generating with a cache gives the logits of running the whole text again."""

import numpy as np
import torch

from eyeline.core.batch import Document
from eyeline.data.fetch.batches import batch_of
from eyeline.models.shape import build
from tests.models import parity
from tests.models.cases.llava import SHUFFLING, shown


def test_steps_with_a_cache_equal_the_whole_text_again():
    model = build(SHUFFLING, "cpu")
    parity.randomise(model)
    cat, dog, _ = shown(SHUFFLING)
    prompts = [parity.document("a", 3, cat, 2), parity.document("b", 2), parity.document("c", cat, dog, 1)]
    forced = np.array([[3, 4, 5], [6, 7, 8], [9, 10, 11]], np.int32)  # row, step

    def longer(row: int, steps: int) -> Document:
        p = prompts[row]
        tokens_T = np.concatenate([p.tokens_T, forced[row, :steps]])
        return Document(p.id, tokens_T, np.full_like(tokens_T, -100), p.visual_M, p.images)

    with torch.no_grad():
        cache = model.new_cache(3, 32)
        rows = [0, 1, 2]
        got = model(batch_of(prompts, None, next_tokens=True), cache).out
        for steps in range(4):
            want = model(batch_of([longer(row, steps) for row in rows], None, next_tokens=True)).out
            parity.close(got, want, f"logits after {steps} tokens")
            if steps == 3:
                break
            if steps == 1:  # the first row has finished
                rows = [2, 1]
                for layer in cache:
                    layer.keep([2, 1])
            token = [Document("", forced[row, steps : steps + 1], np.array([-100], np.int32), np.empty(0, np.int32), ()) for row in rows]
            batch = batch_of(token, None, next_tokens=True)
            batch.positions_T3.copy_(torch.tensor(cache[0].lengths)[:, None].expand(-1, 3))
            got = model(batch, cache).out
