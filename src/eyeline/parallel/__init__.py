"""Where a run runs: devices and ranks. The only folder that reads the environment."""
