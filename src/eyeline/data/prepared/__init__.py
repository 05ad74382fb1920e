"""Data that were packed offline, read in place of their sources."""
