"""Rejects are counted, named once, and stop the run when they are too many."""

import json
from pathlib import Path

import pytest

from eyeline.core.errors import BadSample, Refused, TooManyRejects
from eyeline.data.rejects import CAUSES, REMEDIES, Reject, Rejects


def reject(row: int, cause: str = "missing_image", message: str = "a.png does not exist") -> Reject:
    return Reject.of(f"x.json#{row}", "/data/x.json", row, BadSample(cause, "image", message))


def test_a_line_names_id_file_row_field_cause_and_message(tmp_path: Path) -> None:
    rejects = Rejects(tmp_path, 1.0)
    rejects.add(reject(7))
    assert json.loads((tmp_path / "rejects.jsonl").read_text()) == {
        "id": "x.json#7",
        "file": "/data/x.json",
        "row": 7,
        "field": "image",
        "cause": "missing_image",
        "message": "a.png does not exist",
    }


def test_a_sample_is_written_once_over_epochs_and_resumes(tmp_path: Path) -> None:
    rejects = Rejects(tmp_path, 1.0)
    for _ in range(3):
        rejects.add(reject(7))
    rejects.note(reject(8))
    again = Rejects(tmp_path, 1.0)
    again.restore(json.loads(json.dumps(rejects.state())))
    again.add(reject(7))
    again.add(reject(9, "no_target"))
    assert [json.loads(line)["row"] for line in (tmp_path / "rejects.jsonl").read_text().splitlines()] == [7, 8, 9]
    assert again.counts == {"missing_image": 4, "no_target": 1}


def test_reject_rate_is_over_all_rows(tmp_path: Path) -> None:
    rejects = Rejects(tmp_path, 0.02)
    for n in range(3):
        rejects.add(reject(n, "no_target" if n else "missing_image"))
    rejects.seen = 99
    rejects.check(False, lambda: 50)  # too few to say anything
    with pytest.raises(
        TooManyRejects, match=r"3 of 99 .*\(3\.0%\).* allows 2\.0%.*no_target 2×.*missing_image 1×.*rejects\.jsonl.*Against no_target: Give"
    ):
        rejects.check(True, lambda: 99)
    rejects.seen = 100
    rejects.check(False, lambda: 75)  # twice 1.5 are not fewer than 3
    with pytest.raises(TooManyRejects):
        rejects.check(False, lambda: 74)
    rejects.seen = 150
    rejects.check(True, lambda: 150)  # 2 % exactly is allowed


@pytest.mark.parametrize(
    ("rate", "seen", "bad", "total", "ends"),
    [
        (0.01, 30, 30, 10**6, True),  # all of them
        (0.01, 1, 1, 10**6, True),
        (0.01, 30, 4, 10**6, False),  # 0.3 + 4 × √0.3 + 2 = 4.49
        (0.01, 30, 5, 10**6, True),
        (0.01, 10, 2, 200, False),  # as many as are allowed of all
        (0.01, 10, 3, 200, True),
        (0.0, 50, 1, 10**6, True),  # none is allowed
        (1.0, 5, 5, 5, False),
    ],
)
def test_part_of_the_rows_is_judged_where_chance_does_not_explain_it(rate: float, seen: int, bad: int, total: int, ends: bool) -> None:
    rejects = Rejects(None, rate)
    rejects.seen = seen
    for n in range(bad):
        rejects.add(reject(n))
    if ends:
        with pytest.raises(TooManyRejects):
            rejects.check_part(lambda: total)
    else:
        rejects.check_part(lambda: total)


def test_text_that_no_file_can_hold_is_spelt_out(tmp_path: Path) -> None:
    Rejects(tmp_path, 1.0).add(reject(1, "bad_unicode", "a\udcff<script>"))
    assert json.loads((tmp_path / "rejects.jsonl").read_text(encoding="utf-8"))["message"] == "a\\udcff<script>"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{torn", "line 2 of .* is not a JSON object"),
        (b"7", "line 2 of .* is not a JSON object"),
        (b"\xff\xfe", "line 2 of .* is not a JSON object"),
        (b'{"id": 3}', "line 2 of .* has id; wanted id, file, row, field, cause, message"),
    ],
)
def test_what_something_else_wrote_is_refused_by_its_line(tmp_path: Path, line: bytes, words: str) -> None:
    Rejects(tmp_path, 1.0).add(reject(7))
    with open(tmp_path / "rejects.jsonl", "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(Refused, match=words):
        Rejects(tmp_path, 1.0)


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Rejects(None, 1.0).add(reject(1))
    assert list(tmp_path.iterdir()) == []


def test_causes_in_the_code_are_all_known() -> None:
    """Every cause that a BadSample is raised with has its explanation, and every explanation a use."""
    import re

    sources = Path(__file__).parents[2] / "src" / "eyeline"
    files = [*sources.glob("data/**/*.py"), *sources.glob("core/*.py")]
    used = {c for path in files for c in re.findall(r'(?:BadSample|Broken)\(\s*"(\w+)"', path.read_text())}
    assert used == set(CAUSES)


def test_every_cause_has_a_remedy_of_one_sentence() -> None:
    assert REMEDIES.keys() == CAUSES.keys()
    assert all(remedy[0].isupper() and remedy[-1] == "." and len(remedy) < 140 for remedy in REMEDIES.values())
