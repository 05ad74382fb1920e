"""Packages that report their use and errors to their makers, unless their environment says not to."""

import os

SWITCHES = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}


def report_nothing() -> None:
    """Say so for this process, before they are imported. What the user has set stays."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
