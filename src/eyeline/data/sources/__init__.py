"""A path in a recipe to a source: which files it means, what they are, and the images that nothing reads."""
