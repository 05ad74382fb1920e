"""Pure functions of tensors: the plain version first, the fast one beside it. Nothing here has weights."""
