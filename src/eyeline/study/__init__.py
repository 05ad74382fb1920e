"""What a run did, and how it compares: reports and benchmarks."""
