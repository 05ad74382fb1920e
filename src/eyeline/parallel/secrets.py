"""Keys of servers, from the environment: they are in no recipe, no message and no file."""

import os

from eyeline.core.errors import Refused


def secret_named(name: str) -> str:
    """The value of an environment variable. Refused, without any part of it, where it is not set or cannot be sent as a header."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise Refused(f"the environment variable {name} is not set, and distill.teacher.key_env names it. Set it to the server's key")
    if not value.isascii() or not value.isprintable():
        raise Refused(f"the environment variable {name} holds characters that no key has. Set it to the server's key")
    return value


def has_secret(name: str) -> bool:
    """Return whether an environment variable is set."""
    return bool(os.environ.get(name, "").strip())
