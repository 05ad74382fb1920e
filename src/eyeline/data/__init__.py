"""From files to batches: sources -> samples -> documents -> packs -> batches. Read `loader.py` first."""
