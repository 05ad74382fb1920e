"""Streaming best fit: items into packs of bounded tokens and patches. Pure: the state is the open bins, as plain JSON."""

from collections.abc import Iterable, Iterator
from typing import Any

from eyeline.core.batch import Budget

Item = Any  # plain JSON, so that open bins can be stored
Bins = list[dict[str, Any]]  # each {"items": [...], "tokens": int, "patches": int}


OPEN_BINS = 16


def place(bins: Bins, item: Item, tokens: int, patches: int, budget: Budget, open_bins: int = OPEN_BINS) -> list[Item] | None:
    """Put an item into `bins` (changed in place), and return a pack if one is finished by that.

    The item goes to the bin that it fills best; if it fits nowhere it opens one, and when that is one too many the fullest is
    finished. A bin with no token left is finished at once. An item that alone is over the budget is a defect of the caller.
    """
    assert tokens <= budget.tokens, f"{item}: {tokens} tokens do not fit {budget}"
    assert patches <= budget.patches, f"{item}: {patches} patches do not fit {budget}"
    fits = [b for b in bins if b["tokens"] + tokens <= budget.tokens and b["patches"] + patches <= budget.patches]
    if fits:
        best = max(fits, key=lambda b: _fill(b, budget))
    else:
        best = {"items": [], "tokens": 0, "patches": 0}
        bins.append(best)
    best["items"].append(item)
    best["tokens"] += tokens
    best["patches"] += patches
    if best["tokens"] == budget.tokens:
        return _take(bins, best)
    return fullest(bins, budget) if len(bins) > open_bins else None


def fullest(bins: Bins, budget: Budget) -> list[Item]:
    """Finish the fullest bin: its items, taken out of `bins`."""
    return _take(bins, max(bins, key=lambda b: _fill(b, budget)))


def pack(
    items: Iterable[tuple[Item, int, int]], budget: Budget, open_bins: int = OPEN_BINS, state: Bins | None = None
) -> Iterator[tuple[list[Item], Bins]]:
    """Yield (pack, bins still open) for items given as (item, tokens, patches); at their end the open bins, fullest first.

    At most one pack follows an item, before the next item is taken, so that (position in the items, bins) is all there is to
    know to go on.
    """
    bins = copied(state or [])
    for item, tokens, patches in items:
        done = place(bins, item, tokens, patches, budget, open_bins)
        if done is not None:
            yield done, copied(bins)
    while bins:
        done = fullest(bins, budget)
        yield done, copied(bins)


def _take(bins: Bins, bin: dict[str, Any]) -> list[Item]:
    del bins[next(n for n, b in enumerate(bins) if b is bin)]
    return bin["items"]


def _fill(bin: dict[str, Any], budget: Budget) -> float:
    """How full the fuller of its two capacities is."""
    return max(bin["tokens"] / budget.tokens, bin["patches"] / budget.patches if budget.patches else 0.0)


def copied(bins: Bins) -> Bins:
    """A copy that later placing does not change."""
    return [{**b, "items": list(b["items"])} for b in bins]
