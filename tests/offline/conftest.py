"""An S3 server on this machine, and the tokenizers and images of the tests of data."""

from tests.data.conftest import draw, plain, rule, server, store, tokenizers

__all__ = ["draw", "plain", "rule", "server", "store", "tokenizers"]
