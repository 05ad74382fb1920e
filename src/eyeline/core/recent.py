"""What was used last: the one cache that forgets, used wherever something is remembered up to a limit."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by keys, those that were used last. Pickles empty: what it holds changes how fast something is, and no result."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> V | None:
        """The value of a key, which is then the newest; None where there is none."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def keep(self, key: K, value: V, most: int, bytes: int = 0, most_bytes: int = 0, at_least: int = 0) -> V:
        """The value, from now on the newest. The oldest are dropped where there are more than `most`, or all together have more bytes than
        `most_bytes`, but keeps at least `at_least`."""
        _, before = self._values.pop(key, (None, 0))
        self._values[key] = value, bytes
        self._bytes += bytes - before
        while len(self._values) > at_least and (len(self._values) > most or self._bytes > most_bytes):
            _, (_, dropped) = self._values.popitem(last=False)
            self._bytes -= dropped
        return value

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0

    def keys(self) -> list[K]:
        return list(self._values)

    def values(self) -> list[V]:
        return [value for value, _ in self._values.values()]

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __reduce__(self) -> tuple[type["Recent[K, V]"], tuple[()]]:
        return Recent, ()
