"""Names of tensors in other programs' checkpoints, and ours."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class KeyRule:
    """Tensors of ours and their name in a Hugging Face checkpoint. `{i}` stands for a block's number in both.

    Several of ours are cut out of one tensor of theirs (fused): `read` gives a tuple in the order of `ours`, and `write` takes
    as many. `{e}` in `theirs` numbers tensors that are stacked into ours, [E, ...]: `read` and `write` then see one of them.
    Both are views, permutations and concatenations, never arithmetic.
    """

    ours: str | tuple[str, ...]
    theirs: str
    read: Callable[[Tensor], Tensor | tuple[Tensor, ...]] | None = None
    write: Callable[..., Tensor] | None = None


def prefixed(rules: Iterable[KeyRule], ours: str, theirs: str) -> tuple[KeyRule, ...]:
    """The rules of a part, for a model that holds it under `ours` in a folder that holds it under `theirs`."""

    def under(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return ours + names if isinstance(names, str) else tuple(ours + name for name in names)

    return tuple(replace(rule, ours=under(rule.ours), theirs=theirs + rule.theirs) for rule in rules)
