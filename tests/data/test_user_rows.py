"""A layout that is a function in the user's own file: its rows are read as OpenAI's messages, and each fault is told with its line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.image_rule import ImageRule
from eyeline.data.loader import training_steps
from eyeline.data.reader import changes, reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.sources.unread import unread
from eyeline.data.text.tokenizer import Encoder

READ = """
def read(row):
    asked = f"<image>\\n{row['q']}" if row.get("photo") else row["q"]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["a"]}]
    return {"messages": messages, "images": [row["photo"]] if row.get("photo") else [], "category": row["topic"]}
"""
ROWS = [
    {"photo": "a.png", "q": "what is it?", "a": "a red circle", "topic": "shape"},
    {"q": "is there a circle?", "a": "yes", "topic": "text"},
    {"photo": "b.png", "q": "what colour?", "a": "blue", "topic": "colour"},
]


@pytest.fixture
def source(tmp_path: Path, draw: Callable[..., Path]) -> Source:
    draw("a.png", 1)
    draw("b.png", 2)
    return written(tmp_path, ROWS)


def written(folder: Path, rows: list[Any], code: str = READ, **settings: Any) -> Source:
    (folder / "mine.py").write_text(code)
    (folder / "rows.json").write_text(json.dumps(rows))
    return Source(path=str(folder / "rows.json"), layout=f"{folder}/mine.py:read", **settings)


def said(rows: Rows) -> list[tuple[str | None, Any]]:
    return [(kind, getattr(found, "messages", found)) for _, kind, found in rows.kept_rows()]


def test_rows_are_those_of_the_same_messages_in_a_file(source: Source, tmp_path: Path) -> None:
    as_openai: dict[str, Any] = {}
    exec(READ, as_openai)
    (tmp_path / "openai.json").write_text(json.dumps([as_openai["read"](row) for row in ROWS]))
    assert said(open_source(source)) == said(open_source(Source(path=str(tmp_path / "openai.json"))))
    assert [kind for kind, _ in said(open_source(source))] == ["shape", "text", "colour"]
    assert open_source(source).layout.name == "mine.py:read"
    assert unread(open_source(source)) == unread(open_source(source)).__class__()


def test_categories_choose_among_those_that_the_function_gives(source: Source) -> None:
    assert [kind for kind, _ in said(open_source(source.model_copy(update={"categories": ("text", "colour")})))] == ["text", "colour"]


def test_row_may_be_a_list_of_messages(tmp_path: Path) -> None:
    code = 'def read(row): return [{"role": "user", "content": row[0]}, {"role": "assistant", "content": row[1]}]'
    assert len(said(open_source(written(tmp_path, [["q", "a"], ["q", "b"]], code)))) == 2


def test_every_column_of_a_table_is_given(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    source = written(tmp_path, [])
    parquet.write_table(pyarrow.Table.from_pylist([{"q": "what?", "a": "that", "topic": "t", "odd one": 3}]), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("q,a,topic,odd one\nwhat?,that,t,3\n")
    for name in ("rows.parquet", "rows.csv"):
        rows = open_source(source.model_copy(update={"path": str(tmp_path / name)}))
        assert [kind for kind, _ in said(rows)] == ["t"]
        assert set(next(rows.container.rows(0))[1]) == {"q", "a", "topic", "odd one"}


def test_failing_user_function_rejects_the_row_with_both_lines(source: Source, tmp_path: Path) -> None:
    rows = open_source(written(tmp_path, [ROWS[0], {"topic": "x"}, {"q": "?", "a": "b", "topic": 3, "photo": 0}], categories=("shape",)))
    found = list(rows.kept_rows())
    assert [(kind, getattr(bad, "cause", "")) for _, kind, bad in found] == [("shape", ""), (None, "user_code")]
    place, _, bad = found[1]
    assert rows.reject(place, bad).message == f"{tmp_path}/mine.py:3: KeyError: 'q' (line 1)"


@pytest.mark.parametrize(("value", "got"), [("None", "null"), ("'text'", "a string"), ("{'a': 1}", "a dict of a"), ("3", "a number")])
def test_another_type_is_refused_where_it_is_all_that_comes(tmp_path: Path, value: str, got: str) -> None:
    source = written(tmp_path, ROWS, f"def read(row): return {value}")
    with pytest.raises(
        Refused, match=rf"mine\.py:read makes a sample of none of its first 3 rows.*read returned {got}( \(.*\))?; wanted a list"
    ):
        open_source(source)


def test_columns_and_roles_have_no_place_beside_a_function(source: Source) -> None:
    with pytest.raises(Refused, match=r"columns and roles say .* Leave them out"):
        open_source(source.model_copy(update={"columns": {"image": "photo"}}))


@pytest.mark.parametrize("text", ["mine.py", "opnai", "mine.py:"])
def test_other_names_of_layouts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"wanted llava, openai, .* or a function of your own as FILE\.py:FUNCTION"):
        Source(path="x", layout=text)


def test_changed_file_makes_a_new_index_and_is_named_on_resume(source: Source, tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    budget, data = Budget(64, 64), Data(sources=(source,))

    def reader():
        return reader_of(data, plain, rule, 0, tmp_path / "run")

    step = next(training_steps(reader(), budget, 1, 1))
    (made,) = (tmp_path / "run" / "index").glob("*/*")
    assert changes(reader(), budget, step.state, tmp_path / "run" / "sources") == []
    (tmp_path / "mine.py").write_text(READ.replace("<image>\\n", "Look: <image>\\n"))
    ((what, how),) = changes(reader(), budget, step.state, tmp_path / "run" / "sources")
    assert what == "layout" and how.count("mine.py:read ") == 2
    next(training_steps(reader(), budget, 1, 1))
    assert len(list((tmp_path / "run" / "index").glob("*/*"))) == 2 and made.exists()


def test_a_changed_file_of_a_validation_source_is_told(source: Source, tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    data = Data(sources=(Source(path=source.path, layout=f"{tmp_path}/other.py:read"),), validation=(source,))
    (tmp_path / "other.py").write_text(READ)
    step = next(training_steps(reader_of(data, plain, rule, 0, tmp_path / "run"), Budget(64, 64), 1, 1))
    (tmp_path / "mine.py").write_text(READ + "# more")
    ((what, _),) = changes(reader_of(data, plain, rule, 0), Budget(64, 64), step.state)
    assert what == "layout of validation"


def test_workers_make_the_same_batches(source: Source, tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    def batches(workers: int) -> list[Any]:
        data = Data(sources=(source,), workers=workers)
        steps = training_steps(reader_of(data, plain, rule, 0, tmp_path / f"run{workers}"), Budget(64, 64), 1, 4)
        return [(batch.tokens_T.tolist(), batch.patches_PC.tolist()) for step in steps for batch in step.batches]

    assert batches(1) == batches(0)
