"""The table of planted faults fits the code: each text occurs once, and each named test exists. The runner tells what a test sees."""

from pathlib import Path

import pytest

from tests.mutants import MUTANTS, SOURCE, Mutant, mutants, mutated, problem_with


def test_there_are_enough_of_them() -> None:
    assert len(mutants()) >= 75
    assert len(set(mutants())) == len(mutants())
    assert min(map(len, MUTANTS.values())) >= 4


@pytest.mark.parametrize("mutant", mutants(), ids=lambda one: f"{one.file}:{one.old[:40]}")
def test_fault_can_be_planted(mutant: Mutant) -> None:
    changed = mutated(mutant)
    assert mutant.old != mutant.new
    compile(changed, mutant.file, "exec")
    path, _, name = mutant.test.partition("::")
    text = (Path(__file__).parent / path).read_text(encoding="utf-8")
    assert name and f"def {name.partition('[')[0]}(" in text


@pytest.mark.parametrize(
    ("old", "new", "test", "problem"),
    [
        ("1 + 1", "1 + 2", "test_one.py::test_two", None),
        ("1 + 1", "1 + 2", "test_one.py::test_nothing", "survived"),
        ("1 + 1", "1 + gone", "test_one.py::test_two", "the text does not fit the code: NameError: name 'gone' is not defined"),
        ("1", "2", "test_one.py::test_two", "one.py: '1' occurs 2 times, and must occur once"),
        ("1 + 1", "1 + 2", "test_one.py::test_of_another_name", "pytest ended with 4: "),
    ],
)
def test_runner_tells_what_a_test_sees(tmp_path: Path, old: str, new: str, test: str, problem: str | None) -> None:
    (tmp_path / SOURCE).mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / SOURCE / "__init__.py").touch()
    (tmp_path / SOURCE / "one.py").write_text("def two():\n    return 1 + 1\n")
    tests = "from eyeline.one import two\n\ndef test_two():\n    assert two() == 2\n\ndef test_nothing():\n    two()\n"
    (tmp_path / "tests" / "test_one.py").write_text(tests)
    found = problem_with(Mutant("area", "one.py", old, new, test), tmp_path)
    assert found == problem or (problem is not None and found is not None and found.startswith(problem))
    assert (tmp_path / SOURCE / "one.py").read_text() == "def two():\n    return 1 + 1\n"
