"""Settings of CPU threads and of the GPU's allocator. Apart from `launch.py`, since it must be asked before torch is imported."""

import os
import sys

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the latter two are older names


def calm_threads() -> None:
    """Ask OpenMP's waiting threads to sleep instead of spin, and tokenizers to start none. Before torch is imported, or it has no effect.

    Spinning threads take the cores from the loader's workers; on a machine with anything else to do, a step of a small
    model was measured up to 20 times slower. Texts are tokenised one at a time, in several processes, so threads have nothing to share.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def expandable_segments() -> None:
    """Ask the GPU's allocator for segments that grow. Before torch is imported, or it has no effect; what the user has set stays.

    Packs differ in shape from step to step, and with segments of fixed size the gaps between them add up until a step that fits
    the memory finds no room in one piece.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
