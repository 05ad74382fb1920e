"""Recent: the oldest go first, by number and by bytes; using one makes it the newest; and it pickles empty."""

import pickle

from eyeline.core.recent import Recent


def test_the_oldest_go_where_there_are_too_many() -> None:
    kept = Recent[str, int]()
    for key in "abc":
        assert kept.keep(key, ord(key), most=3) == ord(key)
    assert kept.get("a") == 97
    kept.keep("d", 100, most=3)
    assert (kept.keys(), kept.values(), kept.get("b"), "c" in kept) == (["c", "a", "d"], [99, 97, 100], None, True)


def test_the_oldest_go_where_they_have_too_many_bytes() -> None:
    kept = Recent[str, str]()
    for key, size in (("a", 4), ("b", 3), ("a", 1), ("c", 6)):
        kept.keep(key, key * size, most=9, bytes=size, most_bytes=10)
    assert kept.keys() == ["b", "a", "c"]  # a's four bytes were replaced by one
    kept.keep("d", "d", most=9, bytes=1, most_bytes=10)
    assert kept.keys() == ["a", "c", "d"]
    kept.keep("e", "e", most=9, bytes=11, most_bytes=10)
    assert kept.keys() == []
    kept.keep("e", "e", most=9, bytes=11, most_bytes=10, at_least=1)
    assert kept.keys() == ["e"]
    kept.clear()
    kept.keep("f", "f", most=9, bytes=10, most_bytes=10)
    assert kept.keys() == ["f"]


def test_it_pickles_empty() -> None:
    kept = Recent[str, int]()
    kept.keep("a", 1, most=1)
    assert pickle.loads(pickle.dumps(kept)).keys() == [] and kept.keys() == ["a"]
