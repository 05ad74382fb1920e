"""What a document costs a model: the unit in which steps are planned and dealt to ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """In whole FLOPs, or any other unit."""

    token: int  # the language model, per token
    pair: int  # its attention on a pair of tokens, the earlier and the later (a token and itself included)
    label: int  # its head, per supervised token
    patch: int  # the tower, and the projector, on a patch
    patch_pair: int  # the tower's attention on a pair of patches of one image
