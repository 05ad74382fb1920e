"""What a run did: reports, and its throughput against what the machine can do."""
