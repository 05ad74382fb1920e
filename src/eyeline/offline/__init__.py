"""Jobs that run for days before a GPU trains: partitions in, partitions out, each committed exactly once."""
