"""Randomness has an address: (seed, purpose, index ...) gives the same numbers wherever and whenever it is asked."""

import hashlib

import numpy as np
import torch


def seed_for(seed: int, purpose: str, *index: int) -> int:
    """A 63-bit seed for one address. Different addresses give unrelated seeds (SHA-256)."""
    text = "/".join([str(seed), purpose, *map(str, index)])
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def rng_for(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """A numpy generator for one address: data order, augmentation, sampling of rows."""
    return np.random.default_rng(seed_for(seed, purpose, *index))


def torch_rng_for(seed: int, purpose: str, *index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for one address: initial weights, sampling of tokens."""
    return torch.Generator(device=device).manual_seed(seed_for(seed, purpose, *index))
