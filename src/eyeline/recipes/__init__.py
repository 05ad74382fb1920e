"""Recipes: YAML files that describe a run, the reader of them, and the check before training."""
