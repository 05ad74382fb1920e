"""The formats of counts, shares, times and sizes, by hand."""

from eyeline.core.words import counted, duration, gib, percent


def test_counts_have_commas_and_the_right_number() -> None:
    assert [counted(n, "sample") for n in (0, 1, 1200)] == ["0 samples", "1 sample", "1,200 samples"]
    assert counted(2, "query", "queries") == "2 queries"


def test_shares_have_one_decimal() -> None:
    assert [percent(share) for share in (0, 0.125, 1)] == ["0.0%", "12.5%", "100.0%"]


def test_times_have_hours_only_where_they_last_hours() -> None:
    assert [duration(seconds) for seconds in (0.9, 65, 3599, 7384.2)] == ["0:00", "1:05", "59:59", "2:03:04"]


def test_memory_is_in_gib() -> None:
    assert [gib(size) for size in (0, 5 * 2**28, 1500 * 2**30)] == ["0 bytes", "1.25 GiB", "1,500.00 GiB"]
    assert [gib(size) for size in (-(-(2**30) // 10), 2**30 // 10, 2**18, 5 * 2**10, 102)] == [
        "0.10 GiB", "102.40 MiB", "0.25 MiB", "5.00 KiB", "102 bytes",
    ]  # fmt: skip
