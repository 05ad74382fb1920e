"""Reports on runs, and their throughput compared with the machine's."""
