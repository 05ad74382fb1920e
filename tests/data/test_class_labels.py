"""Class labels train their names: of Parquet, Arrow and saved data sets, in lists and objects, too. A number without one is a reject."""

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from eyeline.core.batch import Sample
from eyeline.core.errors import BadSample
from eyeline.data.sources.sources import Source, open_source
from tests.data.small_training import draw, one

ANIMAL = {"names": ["cat", "dog", "eel"], "_type": "ClassLabel"}
TEXT = {"dtype": "string", "_type": "Value"}


def table(columns: dict[str, Any], features: dict[str, Any] | None) -> arrow.Table:
    made = arrow.table(columns)
    if features is None:
        return made
    return made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def written(folder: Path, form: str, columns: dict[str, Any], features: dict[str, Any]) -> Path:
    """In a container, the names in its own metadata, or (`saved`) in the file next to it alone."""
    if form == "parquet":
        pq.write_table(table(columns, features), folder / "rows.parquet")
        return folder / "rows.parquet"
    made = table(columns, None if form == "saved" else features)
    with open(folder / "data-00000-of-00001.arrow", "wb") as file, ipc.new_stream(file, made.schema) as out:
        out.write_table(made)
    if form == "arrow":
        return folder / "data-00000-of-00001.arrow"
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


FORMS = ("parquet", "arrow", "saved")
COLUMNS = {"question": ["a?", "b?"], "answer": [0, 2]}
FEATURES = {"question": TEXT, "answer": ANIMAL}
WANTED = [["user: a?", "assistant: «cat»"], ["user: b?", "assistant: «eel»"]]


@pytest.mark.parametrize("form", FORMS)
def test_names_are_trained(tmp_path: Path, form: str) -> None:
    assert one(written(tmp_path, form, COLUMNS, FEATURES)) == WANTED


def test_numbers_without_names_stay_numbers(tmp_path: Path) -> None:
    features = {"question": TEXT, "answer": {"dtype": "int64", "_type": "Value"}}
    assert one(written(tmp_path, "parquet", COLUMNS, features)) == [["user: a?", "assistant: «0»"], ["user: b?", "assistant: «2»"]]


@pytest.mark.parametrize("sequence", [{"feature": ANIMAL, "_type": "Sequence"}, {"feature": ANIMAL, "_type": "List"}, [ANIMAL]])
def test_names_in_lists(tmp_path: Path, sequence: Any) -> None:
    columns = {"question": ["a?", "b?"], "answers": [[0, 0, 1], [2]]}
    assert one(written(tmp_path, "parquet", columns, {"question": TEXT, "answers": sequence})) == WANTED


def test_names_in_objects_and_other_columns(tmp_path: Path) -> None:
    draw(tmp_path / "red.png")
    columns = {"image": ["red.png"], "meta": [{"animal": 1}], "label": [2], "category": [0]}
    features = {"image": TEXT, "meta": {"animal": ANIMAL}, "label": ANIMAL, "category": ANIMAL}
    path = written(tmp_path, "parquet", columns, features)
    assert one(path, columns={"caption": "meta.animal"}) == [["user: [red]Describe the image.", "assistant: «dog»"]]
    assert one(path, columns={"caption": "label"}) == [["user: [red]Describe the image.", "assistant: «eel»"]]
    rows = open_source(Source(path=str(path), columns={"caption": "label"}))
    assert [kind for _, kind, _ in rows.kept_rows()] == ["cat"]


@pytest.mark.parametrize("form", FORMS)
def test_a_number_without_a_name_is_rejected(tmp_path: Path, form: str) -> None:
    columns = {"question": ["a?", "b?", "c?", "d?"], "answer": [0, 3, -1, None]}
    found = [found for _, _, found in open_source(Source(path=str(written(tmp_path, form, columns, FEATURES)))).kept_rows()]
    assert isinstance(found[0], Sample)
    bad = [(b.cause, b.field) for b in found[1:] if isinstance(b, BadSample)]
    assert bad == [("wrong_type", "answer"), ("wrong_type", "answer"), ("no_target", "answer")]
    assert "the class label 3, and the file has names for 0 to 2" in str(found[1])


def test_other_names_make_another_index(tmp_path: Path) -> None:
    prints = set()
    for names in (["cat", "dog", "eel"], ["ape", "bee", "cow"]):
        path = written(tmp_path, "saved", COLUMNS, FEATURES | {"answer": ANIMAL | {"names": names}})
        prints.add(open_source(Source(path=str(path))).shards[0].fingerprint)
    assert len(prints) == 2
