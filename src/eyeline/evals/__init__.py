"""How good a model is, measured on samples that it was not trained on."""
