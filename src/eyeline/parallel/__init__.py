"""Devices and ranks of a run. The only folder that reads the environment."""
