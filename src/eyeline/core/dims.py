"""Shape suffixes, checked at a kernel's door."""

from torch import Tensor


def dims(*pairs: str | Tensor) -> dict[str, int]:
    """`dims("THK", q_THK, "TGK", k_TGK)` binds each letter to one size, or raises ValueError naming the letter."""
    sizes: dict[str, int] = {}
    for letters, x in zip(pairs[::2], pairs[1::2], strict=True):
        assert isinstance(letters, str) and isinstance(x, Tensor)
        if len(letters) != x.ndim:
            raise ValueError(f"expected {letters} ({len(letters)} dims), got shape {tuple(x.shape)}")
        for letter, size in zip(letters, x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"{letter} is {sizes[letter]} and {size}: {letters} is {tuple(x.shape)}")
    return sizes
