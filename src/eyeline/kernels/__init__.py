"""Pure functions of tensors: the plain version first, then the fast one. Nothing here has weights."""
