"""An S3 server on this machine."""

from tests.data.conftest import server, store

__all__ = ["server", "store"]
