"""What holds rows: one file a kind. `container.py` says what all of them give."""
