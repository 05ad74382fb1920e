"""Answers to many prompts at once: one packed prefill, then a token per row and step, each row until it ends.

Dims: S documents (the prompts)  B rows that still continue  L rows of logits  V vocabulary
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from eyeline.core.batch import Batch, Counts, Document, Likely
from eyeline.core.errors import Refused
from eyeline.core.plan import Spec
from eyeline.data.fetch.batches import batch_of
from eyeline.data.text.tokenizer import Encoder
from eyeline.generate.sampling import Sampling, next_tokens
from eyeline.models import Model

Finish = Literal["stop", "length"]  # "length": cut at max_new_tokens, or at the end of the model's positions


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt."""

    tokens: tuple[int, ...]  # without the stop token
    finish: Finish
    likely: Likely | None = None  # the likeliest tokens at each of its tokens, where they were asked for


Anywhere = Callable[[bool], bool]  # whether something is true on some rank; all ranks ask the same at once


def here(mine: bool) -> bool:
    """The answer of a process that shares its weights with no other."""
    return mine


def generate(
    model: Model,
    spec: Spec,
    prompts: Sequence[Document],
    sampling: Sampling,
    stop_ids: Collection[int],
    seeds: Sequence[int] | None = None,
    anywhere: Anywhere = here,
    likeliest: int = 0,
) -> list[Answer]:
    """One answer per prompt, in order. Images with equal keys are encoded once. With `seeds`, one per prompt, each is sampled as if it were
    the only prompt and had that seed. So many of the `likeliest` tokens are kept at each token, with their log probabilities before
    temperature, top-k and top-p.

    The model must be in eval mode. Ranks that share its weights call this together, each with prompts of its own, or with none: all run as
    many forward passes as the rank with the longest answer. Refused when a prompt leaves no position for an answer.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    stopped = [False] * len(prompts)
    kept = _Likeliest(likeliest, len(prompts)) if likeliest else None
    for drawn in draw(model, spec, prompts, sampling, stop_ids, seeds, anywhere, kept):
        for row, token in drawn:
            if token in stop_ids:
                stopped[row] = True
            else:
                tokens[row].append(token)
    answers = [Answer(tuple(t), "stop" if ended else "length") for t, ended in zip(tokens, stopped, strict=True)]
    return answers if kept is None else [replace(answer, likely=kept.of(row)) for row, answer in enumerate(answers)]


class _Likeliest:
    """The likeliest tokens of each prompt's answer so far. It is called at each step."""

    def __init__(self, k: int, prompts: int):
        self.k = k
        self.ids: list[list[int]] = [[] for _ in range(prompts)]
        self.top: list[list[bytes]] = [[] for _ in range(prompts)]
        self.logp: list[list[bytes]] = [[] for _ in range(prompts)]

    def __call__(self, rows: Sequence[int], tokens: Sequence[int], logits_LV: Tensor) -> None:
        logp_LK, top_LK = logits_LV.float().log_softmax(-1).topk(min(self.k, logits_LV.shape[-1]))
        self.k = logp_LK.shape[1]
        top, logp = top_LK.to(torch.int32).cpu().numpy(), logp_LK.half().cpu().numpy()
        for n, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            self.ids[row].append(token)
            self.top[row].append(top[n].tobytes())
            self.logp[row].append(logp[n].tobytes())

    def of(self, row: int) -> Likely:
        return Likely(tuple(self.ids[row]), b"".join(self.top[row]), b"".join(self.logp[row]), self.k)


def stream(model: Model, spec: Spec, prompt: Document, sampling: Sampling, encoder: Encoder) -> Generator[str, None, Finish]:
    """The answer to one prompt as pieces of text, each as soon as it is certain. Returns how it ended."""
    finish: Finish = "length"

    def tokens() -> Iterator[int]:
        nonlocal finish
        for [(_, token)] in draw(model, spec, [prompt], sampling, encoder.stop_ids):
            if token in encoder.stop_ids:
                finish = "stop"
            else:
                yield token

    yield from pieces(tokens(), encoder.decode)
    return finish


def pieces(tokens: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """The text of `tokens` bit by bit; joined, the pieces are `decode` of all of them.

    A character of several bytes may need several tokens: until the last is there, decoders give U+FFFD for it, so trailing
    ones are held back until the next token or the end.
    """
    ids: list[int] = []
    given = ""
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        certain = text.rstrip("\ufffd")
        if len(certain) > len(given):
            yield certain[len(given) :]
            given = certain
    rest = decode(ids)[len(given) :] if ids else ""
    if rest:
        yield rest


@torch.no_grad()
def draw(
    model: Model,
    spec: Spec,
    prompts: Sequence[Document],
    sampling: Sampling,
    stop_ids: Collection[int],
    seeds: Sequence[int] | None = None,
    anywhere: Anywhere = here,
    hear: Callable[[Sequence[int], Sequence[int], Tensor], None] | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """Each step's (prompt number, token) of the rows that still continue; a row's last token is a stop token, or is cut. `hear`
    is told them with the logits."""
    assert not model.training, "dropout would be on: call model.eval() before generating"
    if not anywhere(bool(prompts)):
        return
    lengths = [len(p.tokens_T) for p in prompts]
    if max(lengths, default=0) >= spec.max_positions:
        raise Refused(f"a prompt has {max(lengths)} tokens, and the model's context holds {spec.max_positions} with the answer. Shorten it")
    device = next(model.parameters()).device
    limits = [min(sampling.max_new_tokens, spec.max_positions - length) for length in lengths]
    batch = batch_of(prompts, None, next_tokens=True)
    batch = replace(batch, has_images=anywhere(batch.has_images))  # a tower that others run gathers its weights from this rank, too
    room = max((length + limit for length, limit in zip(lengths, limits, strict=True)), default=0)
    cache = model.new_cache(len(prompts), room) if prompts else None
    logits_LV = model(batch.to(device), cache).out
    # the position of each answer's first token: visual tokens may share positions
    after = [len(p.tokens_T) if p.positions_T3 is None else int(p.positions_T3.max()) + 1 for p in prompts]
    rows = list(range(len(prompts)))  # the prompts that still continue, in the order of the cache's rows
    for step in count():
        tokens = next_tokens(logits_LV, sampling, rows, step, seeds) if rows else []
        if hear is not None and rows:
            hear(rows, tokens, logits_LV)
        yield list(zip(rows, tokens, strict=True))
        alive = [i for i, (row, token) in enumerate(zip(rows, tokens, strict=True)) if token not in stop_ids and step + 1 < limits[row]]
        if not anywhere(bool(alive)):
            return
        if len(alive) < len(rows):
            rows, tokens = [rows[i] for i in alive], [tokens[i] for i in alive]
            if cache is not None and alive:
                for layer in cache:
                    layer.keep(alive)
        if alive:
            logits_LV = model(one_token_each(tokens, [after[row] + step for row in rows]).to(device), cache).out
        else:  # other ranks continue
            model(one_token_each([0], [0]).to(device))


def one_token_each(tokens: Sequence[int], positions: Sequence[int]) -> Batch:
    """A batch of documents of one token: what each row of a cache continues with."""
    rows = len(tokens)
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(
        tokens_T=torch.tensor(tokens),
        positions_T3=torch.tensor(positions)[:, None].repeat(1, 3),
        real_T=torch.ones(len(positions), dtype=torch.bool),
        cu_S1=torch.arange(rows + 1, dtype=torch.int32),
        longest=1,
        rows_L=torch.arange(rows),
        labels_L=None,
        visual_M=nothing,
        sources_M=nothing,
        patches_PC=torch.empty(0, 0, dtype=torch.uint8),
        places_P2=torch.empty(0, 2, dtype=torch.int64),
        grids_N2=torch.empty(0, 2, dtype=torch.int64),
        cu_N1=torch.zeros(1, dtype=torch.int32),
        longest_image=0,
        counts=Counts(slots=rows, real=rows, visual=0, text=rows, supervised=0, documents=rows, images=0, patches=0),
        ids=(),
        has_images=False,
        image_gradients=False,
    )
