"""Archives whose members are columns: crude ones with a declared mapping, and folders that Megatron-Energon has prepared."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Sample
from eyeline.core.errors import Refused
from eyeline.data.energon import expanded
from eyeline.data.sources import Rows, Source, open_source
from tests.data.test_sources import parts
from tests.data.test_tars import archive, encoded, outcomes


def opened(path: Path, **settings: Any) -> Rows:
    return open_source(Source(path=str(path), **settings))


# Members as columns


PICTURES = [("a.jpg", encoded(0)), ("b.JPG", encoded(1))]
CRUDE = [
    *[(f"0.{p}", c) for p, c in (*PICTURES, ("question", "what?\n"), ("answer.text", "a dot"), ("cls", "7\n"), ("npy", b"\xff"))],
    *[(f"1.{part}", content) for part, content in (*PICTURES, ("question", "and?"), ("answer.text", b"\xff"))],
    *[(f"2.{part}", content) for part, content in (*PICTURES, ("question", "and?"))],
]


def test_members_are_columns_that_are_declared(tmp_path: Path) -> None:
    columns = {"image": "b.jpg", "question": "question", "answer": "answer.text", "kind": "cls"}
    rows = opened(archive(tmp_path / "x.tar", CRUDE), columns=columns)
    assert outcomes(rows) == ["a dot", "bad_unicode", "no_target"]
    assert parts(rows) == [["<0.b.jpg>", "what?"], ["a dot"]]
    assert next(kind for _, kind, _ in rows.kept()) == "7"
    assert "not read: " in rows.layout.why and "npy" in rows.layout.why.rpartition("not read: ")[2]
    assert outcomes(pickle.loads(pickle.dumps(rows))) == outcomes(rows)


def test_what_was_found_in_an_archive_is_said(tmp_path: Path) -> None:
    archive(tmp_path / "x.tar", CRUDE)
    with pytest.raises(Refused, match=r"its rows have question, answer\.text, cls, npy, images\."):
        opened(tmp_path / "x.tar")
    with pytest.raises(Refused, match=r"answer: answer\.txt, but its rows have .*\. Did you mean 'answer\.text'\?"):
        opened(tmp_path / "x.tar", columns={"question": "question", "answer": "answer.txt"})


def test_texts_that_are_called_as_columns_are(tmp_path: Path) -> None:
    members = [("0.jpg", encoded(0)), ("0.question.txt", "what?"), ("0.answer.txt", "a dot")]
    rows = opened(archive(tmp_path / "x.tar", members))
    assert (rows.layout.name, parts(rows)) == ("question-answer", [["<0.jpg>", "what?"], ["a dot"]])
    alone = opened(archive(tmp_path / "y.tar", [("0.jpg", encoded(0)), ("0.description.txt", "a dot")]))
    assert (alone.layout.name, parts(alone)) == ("captions", [["<0.jpg>", "Describe the image."], ["a dot"]])


def test_inside_of_a_json_member(tmp_path: Path) -> None:
    members = [("0.jpg", encoded(0)), ("0.meta.json", {"text": {"long": "a dot", "short": "dot"}})]
    rows = opened(archive(tmp_path / "x.tar", members), columns={"caption": "meta.json.text.long"})
    assert parts(rows) == [["<0.jpg>", "Describe the image."], ["a dot"]]
    assert parts(opened(tmp_path / "x.tar", columns={"caption": "text.short"}))[1] == ["dot"]


# Energon


def prepared(folder: Path, members: list[list[tuple[str, Any]]], about: str | None = None, split: str = "") -> Path:
    """As `energon prepare` leaves a folder (megatron-energon 7.4)."""
    (folder / ".nv-meta").mkdir(parents=True)
    for n, some in enumerate(members):
        archive(folder / f"shard_{n:03}.tar", some)
    last = f"shard_{{000..{len(members) - 1:03}}}.tar" if len(members) > 1 else "shard_000.tar"
    (folder / ".nv-meta" / "split.yaml").write_text(split or f"split_parts:\n  train:\n  - {last}\nexclude: []\n")
    if about is not None:
        (folder / ".nv-meta" / "dataset.yaml").write_text(about)
    return folder


def test_patterns_of_names() -> None:
    assert expanded("a/s_{008..011}.tar") == ["a/s_008.tar", "a/s_009.tar", "a/s_010.tar", "a/s_011.tar"]
    assert expanded("{9..11}{x,yz}") == ["9x", "9yz", "10x", "10yz", "11x", "11yz"]
    assert expanded("{2..0}.tar") == ["2.tar", "1.tar", "0.tar"]
    assert expanded("plain.tar") == ["plain.tar"] and expanded("{one}.tar") == ["{one}.tar"]
    for pattern in ("{0..9999999}", "{000..999}{000..999}{0..9}"):
        with pytest.raises(ValueError, match="over 1,000,000 names"):
            expanded(pattern)


def test_the_train_split_by_patterns(tmp_path: Path) -> None:
    members = [[("k.jpg", encoded(0)), ("k.txt", str(n))] for n in range(12)]
    split = 'split_parts:\n  train:\n  - shard_{000..009}.tar\n  val:\n  - shard_{010..011}.tar\nexclude: ["shard_{003..004}.tar"]\n'
    assert outcomes(opened(prepared(tmp_path / "set", members, split=split))) == [str(n) for n in range(10) if n not in (3, 4)]
    (tmp_path / "set" / ".nv-meta" / "split.yaml").rename(tmp_path / "set" / ".nv-meta" / "split.json")
    assert len(outcomes(opened(tmp_path / "set"))) == 8
    (tmp_path / "set" / ".nv-meta" / "split.json").write_text("split_parts: {train: ['{0..9999999}.tar']}")
    with pytest.raises(Refused, match="over 1,000,000 names"):
        opened(tmp_path / "set")


SAMPLE = [("0.jpg", encoded(0)), ("0.json", {"text": "a dot", "q": "what?", "all": ["dot", "a dot", "a dot"]}), ("0.other.txt", "another")]
MAPS: dict[str, tuple[str, list[list[str]], str]] = {
    "captions": (
        "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\nfield_map:\n  image: jpg\n  caption: json[text]\n",
        [["<0.jpg>", "Describe the image."], ["a dot"]],
        "has image (jpg) and caption (json.text)",
    ),
    "a text of another name": (
        "__module__: megatron.energon\n__class__: CaptioningWebdataset\nfield_map: {image: jpg, caption: other.txt}\n",
        [["<0.jpg>", "Describe the image."], ["another"]],
        "caption (other.txt)",
    ),
    "questions": (
        "field_map: {image: jpg, context: 'json[q]', answers: 'json[all]', answer_weights: 'json[w]'}",
        [["<0.jpg>", "what?"], ["a dot"]],
        "has question (json.q) and answers (json.all)",
    ),
    "a loader": (
        "sample_loader: sample_loader.py:sample_loader\npart_filter: sample_loader.py:part_filter\n",
        [["<0.jpg>", "Describe the image."], ["a dot"]],
        "WebDataset (the sample_loader of its dataset.yaml is not run)",
    ),
    "fields without a like": (
        "field_map: {image: jpg, choices: 'json[all]'}",
        [["<0.jpg>", "Describe the image."], ["a dot"]],
        "(the field_map of its dataset.yaml is not used, since choices: json[all] has no like here)",
    ),
    "a choice of members": (
        "field_map: {image: 'jpg,png', caption: 'json[text]'}",
        [["<0.jpg>", "Describe the image."], ["a dot"]],
        "is not used, since image: jpg,png",
    ),
    "crude": (
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n",
        [["<0.jpg>", "Describe the image."], ["a dot"]],
        "WebDataset; row 0",
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_what_a_dataset_yaml_says(tmp_path: Path, name: str) -> None:
    about, wanted, why = MAPS[name]
    rows = opened(prepared(tmp_path / "set", [SAMPLE], about))
    assert parts(rows) == wanted
    assert why in rows.layout.why
    own = opened(tmp_path / "set", columns={"caption": "q"}, layout="captions")  # who uses the folder knows better
    assert parts(own)[1] == ["what?"]


def test_a_dataset_yaml_that_cannot_be_obeyed(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "set", [SAMPLE], "field_map: {image: jpg, caption: 'json[txt]'}")
    with pytest.raises(Refused, match=r"caption: json\.txt, but its rows have .*\. Did you mean 'json\.text'\?"):
        opened(folder)
    (folder / ".nv-meta" / "dataset.yaml").write_text("field_map: {image")
    with pytest.raises(Refused, match=r"dataset\.yaml is no YAML"):
        opened(folder)
    (folder / ".nv-meta" / "dataset.yaml").write_text("- 1")
    assert isinstance(next(iter(opened(folder).kept()))[2], Sample)
