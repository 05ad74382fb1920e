"""Experiment trackers: a file each, which alone imports its package."""
