"""A teacher answers each sample of a recipe's `distill` section; what passes the filters is a source of messages."""
