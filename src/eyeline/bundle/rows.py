"""Rows of the embedding and of the head: for tokens that a tokenizer gets in addition."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyeline.bundle.bundle import Bundle
from eyeline.core.errors import Refused
from eyeline.core.plan import NewRows
from eyeline.data.text.tokenizer import add_text_tokens
from eyeline.models import Config

ROWS = 64  # an embedding that must grow grows to a multiple of this, which tensor cores prefer
EMBEDDINGS = ("language.embed.weight", "language.head.weight")  # the tensors that have a row for each token


def grown(config: Config, rows: int) -> Config:
    """The config with an embedding of at least so many rows."""
    if rows <= config.language.vocab_size:
        return config
    return with_vocabulary(config, -(-rows // ROWS) * ROWS)


def with_vocabulary(config: Config, rows: int) -> Config:
    """The config with an embedding of so many rows."""
    return config.model_copy(update={"language": config.language.model_copy(update={"vocab_size": rows})})  # type: ignore[return-value]


def with_rows(x_VD: Tensor, rows: int) -> Tensor:
    """An embedding with more rows: each new one is the mean of the old ones, so that a new token is like any other at first."""
    mean_D = x_VD.float().mean(0).to(x_VD.dtype)
    return torch.cat([x_VD, mean_D.expand(rows - len(x_VD), -1)])


def with_tokens(bundle: Bundle, tokens: Sequence[str]) -> Bundle:
    """The bundle with tokens added to its tokenizer, where it lacks them, and an embedding that has a row for each. Raises Refused."""
    if not tokens:
        return bundle
    add_text_tokens(bundle.tokenizer, tokens)
    new_rows(bundle, tokens)
    needed = 1 + max(bundle.tokenizer.get_vocab().values())
    return Bundle(grown(bundle.config, needed), bundle.tokenizer, bundle.template, bundle.generation, bundle.untrained)


def new_rows(bundle: Bundle, tokens: Sequence[str]) -> NewRows:
    """The rows of tokens that were added to the tokenizer of a bundle. Raises Refused where they do not follow one another."""
    added = bundle.tokenizer.get_added_vocab()  # pyright: ignore[reportCallIssue, reportOptionalCall]: transformers declares it twice
    ids = sorted(added[token] for token in tokens)
    if ids[-1] - ids[0] >= len(ids):
        listed = ", ".join(f"{token} ({added[token]})" for token in sorted(tokens, key=added.__getitem__))
        raise Refused(
            f"add_tokens: the rows of these tokens do not follow one another: {listed}. Some are in the tokenizer already: name only the "
            "new ones, or only those that an earlier run added"
        )
    return NewRows(ids[0], len(ids))
