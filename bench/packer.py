"""Case `packer`: documents into packs of bounded tokens and images, as they come, against first-fit-decreasing over all of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, Stopwatch, Timed, interleaved
from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.randomness import rng_for
from eyeline.data.plan.plan import OPEN_BINS, Bins, pack_items

ITEMS, TOKENS, IMAGES = 100_000, 8_192, 18
MEDIAN, P95, SHORTEST, VISUAL = 180, 1_000, 16, 256  # tokens of the text (log-normal), and of an image
ANOTHER = 0.55  # chance of one more image
BUFFER = 1_024  # samples that a packer may hold back and still be called streaming

Sizes = Sequence[tuple[int, int]]  # tokens and images
Packs = list[list[int]]


def sizes(count: int = ITEMS) -> list[tuple[int, int]]:
    """Tokens, visual ones included, and images of each sample."""
    rng = rng_for(0, "bench packer")
    images = np.minimum(rng.geometric(1 - ANOTHER, count) - 1, IMAGES)
    sigma = math.log(P95 / MEDIAN) / 1.6449  # the 95th percentile of the standard normal distribution
    text = np.rint(np.exp(math.log(MEDIAN) + sigma * rng.standard_normal(count)))
    tokens = np.clip(text + VISUAL * images, SHORTEST, TOKENS).astype(int)
    return list(zip(tokens.tolist(), images.tolist(), strict=True))


def run(pairs: int = LEAST_PAIRS, count: int = ITEMS) -> Result:
    """Check that every side packs every sample once and within both limits, then time them in pairs."""
    conditions = Conditions()
    items = sizes(count)
    seen = {"ours": streamed(items), "peer": decreasing(items), "best fit decreasing": decreasing(items, best=True)}
    for side, packs in seen.items():
        check(side, packs, items)
    best = min(seen.values(), key=len)
    share, buffered = len(best) / len(seen["ours"]), most_held(items)
    real = sum(tokens for tokens, _ in items)

    def timed(pack: Callable[[Sizes], Packs]) -> Timed:
        watch = Stopwatch()
        pack(items)
        return watch.read()

    times = interleaved({"ours": lambda: timed(streamed), "peer": lambda: timed(decreasing)}, pairs, "packer")
    return Result(
        case="packer",
        command="python -m bench packer",
        work=f"{count:,} samples of {real / count:.0f} tokens and {sum(n for _, n in items) / count:.2f} images on average (text of "
        f"log-normal length, median {MEDIAN}, 95th percentile {P95:,}; {VISUAL} tokens an image) into packs of at most {TOKENS:,} tokens "
        f"and {IMAGES} images. Ours is the packer of training, best fit with {OPEN_BINS} open bins, which takes samples as they come; the "
        "peer is first-fit-decreasing, which must have all of them first, its search over the open packs vectorised. The best known is the "
        "fewest packs of any side, best-fit-decreasing over everything included. The package seqpacker takes no part: it knows "
        "one capacity only, and has no wheel for this platform on PyPI.",
        agreement="each side packs every sample once, within both limits",
        comparisons=(
            Comparison(
                name="streaming best fit, first-fit-decreasing over all", unit="samples", amount=count, ours=times["ours"],
                peer=times["peer"], limit=3.0, judged="time",
            ),
        ),
        facts=(
            Fact(name="fill, ours ÷ best known", value=share, limit="≥ 0.99", met=share >= 0.99),
            Fact(
                name=f"the same, if at most {BUFFER:,} samples were held back ({buffered:,} were)", value=share, limit="≥ 0.97",
                met=share >= 0.97 and buffered <= BUFFER,
            ),
            *(Fact(name=f"token slots that are padding, {side}", value=1 - real / (len(packs) * TOKENS)) for side, packs in seen.items()),
        ),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )  # fmt: skip


def streamed(items: Sizes) -> Packs:
    """Ours. A budget counts patches, so an image is one of them here."""
    bins: Bins = []
    given = ((n, tokens, images) for n, (tokens, images) in enumerate(items))
    return [*pack_items(given, bins, Budget(TOKENS, IMAGES)), *(bin.items for bin in bins)]


def most_held(items: Sizes) -> int:
    """The most samples that wait in open bins at once."""
    bins: Bins = []
    most = taken = given = 0

    def counted() -> Iterator[tuple[int, int, int]]:
        nonlocal taken, most
        for n, (tokens, images) in enumerate(items):
            taken += 1
            most = max(most, taken - given)
            yield n, tokens, images

    for pack in pack_items(counted(), bins, Budget(TOKENS, IMAGES)):
        given += len(pack)
    return most


def decreasing(items: Sizes, best: bool = False) -> Packs:
    """The largest first, each into the first pack that has room, or into the one that it fills best."""
    order = np.lexsort(np.array(items).T[::-1])[::-1].tolist()
    free, room = np.zeros(len(items), np.int64), np.zeros(len(items), np.int64)
    packs: Packs = []
    for n in order:
        tokens, images = items[n]
        count = len(packs)
        fits = (free[:count] >= tokens) & (room[:count] >= images)
        at = int(np.where(fits, free[:count], TOKENS + 1).argmin() if best else fits.argmax()) if count else 0
        if not count or not fits[at]:
            at = count
            free[at], room[at] = TOKENS, IMAGES
            packs.append([])
        free[at] -= tokens
        room[at] -= images
        packs[at].append(n)
    return packs


def check(side: str, packs: Packs, items: Sizes) -> None:
    """Refused where a side loses or repeats a sample, or breaks a limit."""
    if sorted(chain.from_iterable(packs)) != list(range(len(items))):
        raise Refused(f"{side} does not pack every sample once, so its figures mean nothing.")
    for pack in packs:
        tokens, images = sum(items[n][0] for n in pack), sum(items[n][1] for n in pack)
        if tokens > TOKENS or images > IMAGES:
            raise Refused(f"{side} made a pack of {tokens} tokens and {images} images, over {TOKENS} and {IMAGES}.")
