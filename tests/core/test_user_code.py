"""Functions in a user's file: each fault is refused with file and line, and the bytes that were opened are what runs."""

import pickle
from pathlib import Path

import pytest

from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.user_code import CodeFailed, anchored, files_of, is_code, user_function


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder}/mine.py:read"


def test_only_a_file_and_a_function_name_code() -> None:
    assert is_code("a/b c.py:read") and not any(map(is_code, ("llava", "mine.py", "mine.py:", "mine.py:2x", "mine:read", None, 3)))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("x = 1\ndef read(row)\n    return row", 2, "SyntaxError: expected ':'"),
        ("import nowhere_at_all", 1, "ModuleNotFoundError: No module named 'nowhere_at_all'. Code .* imports installed packages alone"),
        ("\nimport sys\nsys.exit(3)", 3, "SystemExit: 3"),
        ("def help():\n    1 / 0\n\nhelp()", 2, "ZeroDivisionError: division by zero"),
        ("\ndef read(row, more): ...", 2, r"read does not take the arguments that it gets: missing .* 'more'\. Wanted: def read\(row\)"),
    ],
)  # fmt: skip
def test_code_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    with pytest.raises(Refused, match=rf"^{tmp_path}/mine\.py:{line}: {said}"):
        user_function(written(tmp_path, text), ("row",))


def test_an_absent_file_or_function_is_refused(tmp_path: Path) -> None:
    named = written(tmp_path, "def raed(row): ...\nlimit = 3")
    with pytest.raises(Refused, match=r"mine\.py has no function read; there are raed\. Did you mean 'raed'\?"):
        user_function(named, ("row",))
    with pytest.raises(Refused, match=r"none\.py does not exist, and a recipe names it as code"):
        user_function(f"{tmp_path}/none.py:read", ("row",))


def test_an_error_while_running_has_the_last_line_of_the_file(tmp_path: Path) -> None:
    code = user_function(
        written(tmp_path, "import json\ndef inner(row):\n    return json.loads(row)\ndef read(row):\n    return inner(row)"), ("row",)
    )
    assert code("[1]") == [1]
    with pytest.raises(CodeFailed, match=rf"^{tmp_path}/mine\.py:3: JSONDecodeError: Expecting value"):
        code("x")


def test_a_file_that_cannot_be_read_stops_and_is_no_fault_of_the_row(tmp_path: Path) -> None:
    code = user_function(written(tmp_path, "def read(row):\n    return open(row).read()"), ("row",))
    with pytest.raises(StorageFailed, match=rf"^{tmp_path}/mine\.py:2: FileNotFoundError"):
        code(str(tmp_path / "none"))


def test_what_was_opened_is_what_runs_in_every_process(tmp_path: Path) -> None:
    named = written(tmp_path, "from dataclasses import dataclass\n@dataclass\nclass X:\n    y: int\ndef read(row): return X(row).y + 1")
    code = user_function(named, ("row",))
    written(tmp_path, "def read(row): return row + 2")
    other = user_function(named, ("row",))
    assert (pickle.loads(pickle.dumps(code))(1), other(1)) == (2, 3)
    assert code.name == other.name == "mine.py:read"
    assert code.identity != other.identity


def test_paths_of_code_start_from_a_folder(tmp_path: Path) -> None:
    settings = {"sources": [{"layout": "a.py:read", "path": "a.py:x"}, {"layout": "/b.py:read"}], "metric": "exact_match", "name": "c.py:x"}
    found = anchored(settings, tmp_path)
    assert found == settings | {"sources": [{"layout": f"{tmp_path}/a.py:read", "path": "a.py:x"}, {"layout": "/b.py:read"}]}
    assert list(files_of(found)) == [f"{tmp_path}/a.py", "/b.py"]
