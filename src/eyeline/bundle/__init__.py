"""A *bundle* is what it takes to use a model: its shape, its tokenizer, its chat template and, in a folder, its weights."""
