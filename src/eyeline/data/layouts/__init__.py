"""A row to a sample: messages made of text and media, whatever trainer it was written for."""
