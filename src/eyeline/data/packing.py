"""Streaming best fit: items into packs of bounded tokens and patches. Pure: the state is the open bins, as plain JSON."""

from collections.abc import Iterable, Iterator
from typing import Any

from eyeline.core.batch import Budget

Item = Any  # plain JSON, so that open bins can be stored
Bins = list[dict[str, Any]]  # each {"items": [...], "tokens": int, "patches": int}


def pack(
    items: Iterable[tuple[Item, int, int]], budget: Budget, open_bins: int = 16, state: Bins | None = None, flush: bool = True
) -> Iterator[tuple[list[Item], Bins]]:
    """Yield (pack, bins still open) for items given as (item, tokens, patches).

    An item goes to the open bin that it fills best; if it fits nowhere it opens one, and when that is one too many the fullest
    is yielded. At most one pack follows an item, before the next item is taken, so that (position in the items, bins) is all
    there is to know. At the end of the items the open bins follow, fullest first, unless `flush` is False.
    An item that alone is over the budget is a defect of the caller.
    """
    bins = [{**b, "items": list(b["items"])} for b in state or []]
    for item, tokens, patches in items:
        assert tokens <= budget.tokens and patches <= budget.patches, f"{item}: {tokens} tokens, {patches} patches do not fit {budget}"
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
            done = best
        elif len(bins) > open_bins:
            done = max(bins, key=lambda b: _fill(b, budget))
        else:
            continue
        bins.remove(done)
        yield done["items"], _copy(bins)
    while flush and bins:
        done = max(bins, key=lambda b: _fill(b, budget))
        bins.remove(done)
        yield done["items"], _copy(bins)


def _fill(bin: dict[str, Any], budget: Budget) -> float:
    """How full the fuller of its two capacities is."""
    return max(bin["tokens"] / budget.tokens, bin["patches"] / budget.patches if budget.patches else 0.0)


def _copy(bins: Bins) -> Bins:
    return [{**b, "items": list(b["items"])} for b in bins]
