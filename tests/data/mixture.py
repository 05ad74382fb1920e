"""Sizes of samples as a realistic mixture has them."""

import numpy as np


def mixture(samples: int, with_images: float, long: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and patches of samples: text of log-normal length (median 180, 95th percentile 1,000), a share with an image of native size
    (32 pixels per visual token, 4 patches each, at most 1,280), a share of long documents."""
    rng = np.random.default_rng(0)
    text = np.clip(np.exp(np.log(180) + 1.04 * rng.standard_normal(samples)), 16, 4096).astype(int)
    text = np.where(rng.random(samples) < long, rng.integers(4000, 8000, samples), text)
    sides = np.clip(np.exp(np.log(700) + 0.5 * rng.standard_normal((samples, 2))), 64, 2048) // 32
    visual = np.clip(sides.prod(1), 4, 1280).astype(int) * (rng.random(samples) < with_images)
    return np.minimum(text + visual, 8192), 4 * visual
