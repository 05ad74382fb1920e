"""How CPU threads wait, and which there are none of. Apart from `launch.py`, since it must be asked before torch is imported."""

import os


def calm_threads() -> None:
    """Ask OpenMP's waiting threads to sleep instead of spin, and tokenizers to start none. Before torch is imported, or it has no effect.

    Spinning threads take the cores from the loader's workers; on a machine with anything else to do, a step of a small
    model was measured up to 20 times slower. Texts are tokenised one at a time, in several processes, so threads have nothing to share.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
