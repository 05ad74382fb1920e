"""Where in a folder of transformers' a tensor is stored: a place is a folder or file inside it; "" is the folder itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from eyeline.checkpoint.tensors import entries_in, key_of, stream, unread_tensors
from eyeline.core.key_rules import KeyRule
from eyeline.core.log import say
from eyeline.models import Config
from eyeline.models.hf import mapping_of
from eyeline.models.hf.forms import Form


def stream_place(
    tensors: Mapping[str, Tensor], config: Config, form: Form, place: str, where: Path, only: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, Tensor]]:
    """`checkpoint.stream` of the tensors that belong to one place of a form. `tensors` are a whole model's."""
    mapping = mapping_of(config)
    found = {path_in_place(place, name): entry.shape for name, entry in entries_in(where).items()}
    rules = mapping.keys(config, form, found)
    here = {name: x for name, x in tensors.items() if place_of(name, rules) == place}
    dropped = [pattern.rpartition("/")[2] for pattern in mapping.dropped(config, form) if pattern.rpartition("/")[0] == place]
    if others := unread_tensors(entries_in(where), dropped):
        say(f"{where} has tensors that are not read, since Eyeline's model has no such layers: {others}. An export will lack them.")
    yield from stream(here, where, rules_at(place, rules), dropped, only)


def places(config: Config, form: Form) -> list[str]:
    """The places of a folder of this form that hold weights."""
    return list(dict.fromkeys(rule.theirs.rpartition("/")[0] for rule in mapping_of(config).keys(config, form)))


def place_of(ours: str, rules: Sequence[KeyRule]) -> str:
    """The place that holds a tensor of ours."""
    return key_of(ours, rules).theirs.rpartition("/")[0]


def rules_at(place: str, rules: Sequence[KeyRule]) -> list[KeyRule]:
    """The rules of one place, by the names that tensors have there."""
    split = [(rule, *rule.theirs.rpartition("/")[::2]) for rule in rules]
    return [replace(rule, theirs=name) for rule, at, name in split if at == place]


def parameters_by_name(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter under every name it has, so that a tied head is known as one."""
    return dict(model.named_parameters(remove_duplicate=False))


def text_place(config: Config, form: Form) -> str:
    """The place of the language model, where the tokenizer is stored, too."""
    return place_of("language.embed.weight", mapping_of(config).keys(config, form))


def path_in_place(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name
