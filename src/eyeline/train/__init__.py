"""Training. Read `loop.py` first: it is the whole program, top to bottom."""
