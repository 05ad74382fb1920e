"""Containers of rows: a file per kind. `container.py` states what all of them provide."""
