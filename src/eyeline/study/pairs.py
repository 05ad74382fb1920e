"""Statistics of paired measurements: what a few launches of two variants can say about their ratio.

Times are compared by their logarithms: log(b / a) of each pair, so that a ratio and its inverse weigh the same. Their mean has an interval
by Student's t, as for any mean of a few numbers whose spread is not known.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE, POWER = 0.95, 0.80


@dataclass(frozen=True)
class Ratio:
    """b over a, from pairs that were measured next to one another."""

    pairs: int
    mean: float  # of log(b / a)
    sd: float

    @property
    def ratio(self) -> float:
        return math.exp(self.mean)

    @property
    def _error(self) -> float:
        return self.sd / math.sqrt(self.pairs)

    @property
    def interval(self) -> tuple[float, float]:
        """The ratios that the pairs do not contradict, at 95 %."""
        reach = t_quantile((1 + CONFIDENCE) / 2, self.pairs - 1) * self._error
        return math.exp(self.mean - reach), math.exp(self.mean + reach)

    @property
    def smallest_effect(self) -> float:
        """The relative difference that a design like this finds in four of five tries, if it is there."""
        freedom = self.pairs - 1
        return math.exp((t_quantile((1 + CONFIDENCE) / 2, freedom) + t_quantile(POWER, freedom)) * self._error) - 1

    @property
    def is_seen(self) -> bool:
        """Return whether the interval leaves out 1."""
        low, high = self.interval
        return not low <= 1 <= high


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The ratio b / a of at least two pairs."""
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    return Ratio(len(logs), statistics.fmean(logs), statistics.stdev(logs))


def t_quantile(share: float, freedom: int) -> float:
    """The value below which `share` (above a half) of Student's t distribution is."""
    low, high = 0.0, 1.0
    while t_share(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, freedom) < share else (low, middle)
    return high


def t_share(t: float, freedom: int) -> float:
    """The share of Student's t distribution below t >= 0. With t = √freedom · tan(angle) the density is a power of a cosine, which
    Simpson's rule integrates to ten digits."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    end, pieces = math.atan(t / math.sqrt(freedom)), 200
    values = [math.cos(end * n / pieces) ** (freedom - 1) for n in range(pieces + 1)]
    weights = [1, *[4, 2] * (pieces // 2 - 1), 4, 1]
    return 0.5 + scale * end / pieces / 3 * sum(weight * value for weight, value in zip(weights, values, strict=True))
