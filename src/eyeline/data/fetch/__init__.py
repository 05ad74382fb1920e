"""A planned pack to a batch, in worker processes if wanted."""
