"""Plan which rows make which pack, in which order: indexes, the order of rows, packing, ranks. No image is decoded here."""
