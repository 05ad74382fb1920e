"""The form of a model on disk: which class of transformers loads it, and the tokens that its config.json names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from eyeline.models.hf.config_json import Json

Files = dict[str, Json]  # name inside the folder -> content
Shapes = Mapping[str, tuple[int, ...]]  # of the tensors stored in a folder, by name
NONE: Shapes = {}


@dataclass(frozen=True)
class Form:
    """The form of a model in a folder, and the reason for it: a phrase for the user.

    Key rules of a form that is made of several folders, or has a file next to them, name the place first:
    `vision/embeddings.patch_embedding.weight`, `projector.safetensors/projector.up.weight`.
    """

    name: str
    reason: str
    code: str | None = None  # a file of Python in bundle/ that goes along: a processor that transformers does not have
    modules: Mapping[str, str] = field(default_factory=dict)  # start of a tensor's name on disk -> in the model that is made of it


@dataclass(frozen=True)
class MediaTokens:
    """Ids of the control tokens that a template writes for images and videos."""

    image: int | None  # of every visual token of an image; a tokenizer of text alone may have none
    written: str  # the same as text
    video: int | None = None  # of a video
    start: int | None = None  # before them
    end: int | None = None  # after them


def within(theirs: str) -> str:
    """The name of a causal language model's tensor where that model is a module of another one."""
    return "model.language_model." + theirs.removeprefix("model.") if theirs.startswith("model.") else theirs
