"""Signals: figures of rows that were computed before, and expressions over them that choose rows."""
