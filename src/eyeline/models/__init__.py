"""Models in plain PyTorch, one file a family. `FAMILIES` is what recipes name and what the tests go through."""

from types import ModuleType

from eyeline.models import llava

FAMILIES: dict[str, ModuleType] = {"llava": llava}
