"""Answers from a model: prompts in, tokens or text out."""
