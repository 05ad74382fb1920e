"""Evaluation of a model on samples that it was not trained on."""
