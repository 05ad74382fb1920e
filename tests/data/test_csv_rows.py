"""CSV: the same fields as Python's csv module finds, wherever rows are cut into shards; what is broken spoils its own row."""

import base64
import csv
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.data.containers import csv_rows
from eyeline.data.containers.container import Container
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.container_files import encoded
from tests.data.read_back import complaint, everything, parts
from tests.data.short_samples import chat


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Rows]:
    def write(content: str | bytes, name: str = "rows.csv", **settings: Any) -> Rows:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return open_source(Source(path=str(tmp_path / name), **settings))

    return write


def found(container: Container) -> list[Any]:
    """Every row, or why it cannot be read; by its place it must be the same."""
    everything(container)
    return [str(row) if isinstance(row, BadSample) else row for shard in range(len(container.shards)) for _, row in container.rows(shard)]


# Against Python's csv


def written(rows: list[list[str]], delimiter: str, quoting: Any, end: str) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator=end).writerows(rows)
    return out.getvalue().encode()


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_what_python_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quoting: Any, delimiter: str, piece: int) -> None:
    rng = random.Random(piece)
    for end in ("\n", "\r\n"):
        letters = 'ab é",;\t"""' + end  # Python leaves a line break of another kind without quotes
        rows = [["".join(rng.choices(letters, k=rng.randrange(9))) for _ in range(3)] for _ in range(80)]
        rows = [row for row in rows if any(row)]
        (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf" + written([["image", "caption", "n"], *rows], delimiter, quoting, end))
        monkeypatch.setattr(csv_rows, "SHARD_BYTES", piece)
        table = csv_rows.open_table(tmp_path / "x.csv", ("image", "caption"), 0)
        assert found(table) == [dict(zip(("image", "caption", "n"), (value or None for value in row), strict=True)) for row in rows]
        assert table.delimiter == delimiter.encode()
        assert (len(table.shards) > 1) == (piece < 1 << 20)
        numbers = [table.origin_of(place)[2] for shard in range(len(table.shards)) for place, _ in table.rows(shard)]
        assert numbers == list(range(len(rows)))


def test_what_python_reads() -> None:
    """Quotes in the wrong places are text where Python has them so, unless they tear a field apart."""
    rng = random.Random(0)
    tried = 0
    for _ in range(3000):
        line = "".join(rng.choices('ab",', k=rng.randrange(1, 12)))
        try:
            got = csv_rows.fields_of(line.encode(), b",")
        except BadSample:
            assert re.search('(^|,)"', line)
            with pytest.raises(csv.Error):
                list(csv.reader([line], strict=True))
            continue
        tried += 1
        assert [value or "" for value in got] == next(csv.reader([line])), line
    assert tried > 1500


# What is read


def test_captions_and_text_alone(opened) -> None:
    rows = opened('image,caption\na.png,"a cat, asleep"\nb.png,"two\nlines ""quoted"""\n\n')
    assert (rows.layout.name, rows.layout.why[:26]) == ("captions", "CSV; row 0 has image and c")
    assert parts(rows, 0) == [["<a.png>", "Describe the image."], ["a cat, asleep"]]
    assert parts(rows, 1)[1] == ['two\nlines "quoted"']
    rows = opened("question;answer;image\nwhat?;a dot;\nwhat?;a dot;a.png\n")
    assert [parts(rows, n)[0] for n in range(2)] == [["what?"], ["<a.png>", "what?"]]
    assert rows.layout.why.startswith("CSV with semicolons")


def test_base64_and_lists_in_cells(opened) -> None:
    png = encoded(0, "PNG")
    images = json.dumps(["a.png", "data:image/png;base64," + base64.b64encode(png).decode()])
    out = io.StringIO(newline="")
    table = csv.writer(out, delimiter="\t")
    table.writerow(["images", "messages"])
    table.writerow([images, json.dumps(chat("<image><image>?", "a"))])
    table.writerow([base64.b64encode(png).decode(), json.dumps(chat("?", "b"))])
    rows = opened(out.getvalue(), "rows.tsv")
    assert rows.layout.name == "openai"
    first, second = (rows.read(place) for place, _, _ in rows.kept_rows())
    assert [p.source for p in first.images][1] == png
    assert second.images[0].source == png


def test_columns_that_are_called_otherwise_choose_the_delimiter(opened) -> None:
    rows = opened("foto;titel, kurz\na.png;eine Katze\n", columns={"image": "foto", "caption": "titel, kurz"})
    assert parts(rows) == [["<a.png>", "Describe the image."], ["eine Katze"]]
    with pytest.raises(Refused, match=r"caption: titel, but its rows have foto, titel, kurz\."):
        opened("foto;titel, kurz\na.png;eine Katze\n", columns={"image": "foto", "caption": "titel"})


# What is broken


@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_broken_rows_spoil_themselves(opened, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(csv_rows, "SHARD_BYTES", piece)
    rows = opened(b'image,caption\na.png,a\nb.png,b,more\nc.png\nd.png,"\xff"\ne.png,e\nf.png,"never closed\ng.png,g\nh.png,h')
    got = [complaint(rows, n) if isinstance(row, BadSample) else parts(rows, n)[1] for n, (_, _, row) in enumerate(rows.kept_rows())]
    row, text = ("table_row", "row"), ("bad_unicode", "row.caption")
    assert got == [["a"], row, row, text, ["e"], row, ["g"], ["h"]]
    lost = opened('image,caption\na.png,"open\nb.png,b\nc.png,"closed"\nd.png,d\ne.png,"open\nf.png,"and more",f\n')
    assert [str(row) if isinstance(row, BadSample) else parts(lost, n)[1][0] for n, (_, _, row) in enumerate(lost.kept_rows())] == [
        "row: the quote at byte 6 of the row is never closed",
        *["b", "closed", "d"],
        "row: the quote at byte 6 of the row is never closed",
        "row: 3 fields, and the header has 2",
    ]
    over = opened('image,caption\na.png,"open\nb.png,b",c\nd.png,d\n')
    assert str(next(iter(over.kept_rows()))[2]) == "row: 3 fields, over 2 lines; a quote may be missing, and the header has 2"


def test_rows_over_the_cap_cost_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_rows, "SHARD_BYTES", 50)
    monkeypatch.setattr(csv_rows, "MAX_ROW_BYTES", 100)
    long, lined = "x" * 500, "x\n" * 20
    lines = ["image,caption", "a,a", f"b,{long}", "c,c", f'd,"{long[:60]}"', f'e,"{long}', "f,f", f'g,"{lined}"', "h,h"]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    table = csv_rows.open_table(tmp_path / "x.csv", ("image",), 0)
    got = [row["image"] if isinstance(row, dict) else row.partition(" ")[2][:9] for row in found(table)]
    assert got == ["a", "the row h", "c", "d", "the row h", "f", "g", "h"]
    assert max(shard.bytes for n, shard in enumerate(table.shards) if n not in table.over) < 200


REFUSED = {
    "no rows": ("image,caption\n", "holds no rows"),
    "names twice": ("image,caption,image\na,b,c\n", "names 'image' twice"),
    "no names": (",,\na,b,c\n", "names no columns"),
    "a quote in the header": ('"image,caption\na,b\n', "names no columns"),
    "data where the names should be": ("a.png,a cat\nb.png,a dog\n", r"Found: CSV; its rows have a\.png, a cat"),
    "empty": ("", "is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(opened, name: str) -> None:
    content, message = REFUSED[name]
    with pytest.raises(Refused, match=message):
        opened(content)


def test_a_table_that_changed_stops_the_run(opened, tmp_path: Path) -> None:
    rows = opened("image,caption\na,a\n")
    place = next(rows.rows_in(0))[0]
    (tmp_path / "rows.csv").write_text("image,caption\na,ab\n")
    with pytest.raises(StorageFailed, match="has changed"):
        rows.read(place)


def test_what_a_shard_says_depends_on_the_header(opened) -> None:
    first, second = opened("image,caption,text\na,b,c\n").shards, opened("image,text,caption\na,b,c\n").shards
    assert first[0].fingerprint != second[0].fingerprint
    assert first[0].fingerprint == opened("image,caption,text\na,b,c\n").shards[0].fingerprint
