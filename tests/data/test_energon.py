"""Archives whose members are columns: crude ones with a declared mapping, and folders that Megatron-Energon has prepared."""

import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Sample
from eyeline.core.errors import Refused
from eyeline.data.containers import tars
from eyeline.data.containers.container import File
from eyeline.data.containers.energon import expand_braces
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.container_files import archive, encoded, energon_folder
from tests.data.read_back import outcomes, parts


def opened(path: Path, **settings: Any) -> Rows:
    return open_source(Source(path=str(path), **settings))


# Members as columns


IMAGE_COLUMNS = [("a.jpg", encoded(0)), ("b.JPG", encoded(1))]
CRUDE = [
    *[(f"0.{p}", c) for p, c in (*IMAGE_COLUMNS, ("question", "what?\n"), ("answer.text", "a dot"), ("cls", "7\n"), ("npy", b"\xff"))],
    *[(f"1.{part}", content) for part, content in (*IMAGE_COLUMNS, ("question", "and?"), ("answer.text", b"\xff"))],
    *[(f"2.{part}", content) for part, content in (*IMAGE_COLUMNS, ("question", "and?"))],
]


def test_members_are_columns_that_are_declared(tmp_path: Path) -> None:
    columns = {"image": "b.jpg", "question": "question", "answer": "answer.text", "kind": "cls"}
    rows = opened(archive(tmp_path / "x.tar", CRUDE), columns=columns)
    assert outcomes(rows) == ["a dot", "bad_unicode", "no_target"]
    assert parts(rows) == [["<0.b.jpg>", "what?"], ["a dot"]]
    assert next(kind for _, kind, _ in rows.kept_rows()) == "7"
    assert "not read: " in rows.layout.why and "npy" in rows.layout.why.rpartition("not read: ")[2]
    assert outcomes(pickle.loads(pickle.dumps(rows))) == outcomes(rows)


def test_archive_findings_are_reported(tmp_path: Path) -> None:
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


def test_patterns_of_names() -> None:
    assert expand_braces("a/s_{008..011}.tar") == ["a/s_008.tar", "a/s_009.tar", "a/s_010.tar", "a/s_011.tar"]
    assert expand_braces("{9..11}{x,yz}") == ["9x", "9yz", "10x", "10yz", "11x", "11yz"]
    assert expand_braces("{2..0}.tar") == ["2.tar", "1.tar", "0.tar"]
    assert expand_braces("plain.tar") == ["plain.tar"] and expand_braces("{one}.tar") == ["{one}.tar"]
    for pattern in ("{0..9999999}", "{000..999}{000..999}{0..9}"):
        with pytest.raises(ValueError, match="over 1,000,000 names"):
            expand_braces(pattern)


def test_the_train_split_by_patterns(tmp_path: Path) -> None:
    members = [[("k.jpg", encoded(0)), ("k.txt", str(n))] for n in range(12)]
    split = 'split_parts:\n  train:\n  - shard_{000..009}.tar\n  val:\n  - shard_{010..011}.tar\nexclude: ["shard_{003..004}.tar"]\n'
    assert outcomes(opened(energon_folder(tmp_path / "set", members, split=split))) == [str(n) for n in range(10) if n not in (3, 4)]
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
        "(the field_map of its dataset.yaml is not used, since choices: json[all] has no counterpart here)",
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
    rows = opened(energon_folder(tmp_path / "set", [SAMPLE], about))
    assert parts(rows) == wanted
    assert why in rows.layout.why
    own = opened(tmp_path / "set", columns={"caption": "q"}, layout="captions")  # who uses the folder knows better
    assert parts(own)[1] == ["what?"]


def test_a_dataset_yaml_that_cannot_be_obeyed(tmp_path: Path) -> None:
    folder = energon_folder(tmp_path / "set", [SAMPLE], "field_map: {image: jpg, caption: 'json[txt]'}")
    with pytest.raises(Refused, match=r"caption: json\.txt, but its rows have .*\. Did you mean 'json\.text'\?"):
        opened(folder)
    (folder / ".nv-meta" / "dataset.yaml").write_text("field_map: {image")
    with pytest.raises(Refused, match=r"dataset\.yaml is not YAML"):
        opened(folder)
    (folder / ".nv-meta" / "dataset.yaml").write_text("- 1")
    assert isinstance(next(iter(opened(folder).kept_rows()))[2], Sample)


# Its indexes


def indexed(folder: Path, forms: int = tarfile.USTAR_FORMAT, samples: int = 10) -> Path:
    """A prepared folder of one archive, and the index that Energon writes of it."""
    long = "in/" * 40 + "k" * 60 if forms != tarfile.USTAR_FORMAT else ""
    members = [(f"{long}{n:02}.{end}", encoded(n) if end == "jpg" else f"caption {n}") for n in range(samples) for end in ("jpg", "txt")]
    energon_folder(folder, [members])
    archive(folder / "shard_000.tar", members, forms)
    with tarfile.open(folder / "shard_000.tar") as tar:
        offsets = [info.offset for info in tar.getmembers()[::2]] + [tar.offset]
    (folder / "shard_000.tar.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))
    return folder


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_large_archive_is_read_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int) -> None:
    whole = opened(indexed(tmp_path / "set", form))
    assert [shard.name for shard in whole.shards] == ["shard_000.tar"]  # it is small
    monkeypatch.setattr(tars, "RUN_BYTES", 3 * max(place.length for place, _, _ in whole.rows_in(0)))
    rows = opened(tmp_path / "set")
    assert len(rows.shards) >= 4
    assert len({shard.fingerprint for shard in rows.shards}) == len(rows.shards)
    assert sum(shard.bytes for shard in rows.shards) <= whole.shards[0].bytes
    assert outcomes(rows) == outcomes(whole) == [f"caption {n}" for n in range(10)]
    ids = [[opened.origin_of(place) for place, _, _ in opened.kept_rows()] for opened in (rows, whole)]
    assert ids[0] == ids[1]
    assert [p.source for *_, f in rows.kept_rows() for p in f.images] == [p.source for *_, f in whole.kept_rows() for p in f.images]  # type: ignore[union-attr]
    assert outcomes(pickle.loads(pickle.dumps(rows))) == outcomes(rows)


def test_an_index_as_energon_writes_it(tmp_path: Path) -> None:
    """Bytes that megatron-energon 7.4.1 wrote of five samples of two members of up to 512 bytes each."""
    words = ("0000", "000a", "0014", "001e", "0028", "0032")
    written = bytes.fromhex("".join(word + 12 * "0" for word in words))
    (tmp_path / "x.tar.idx").write_bytes(written)
    assert tars.offsets_in(File.of(tmp_path / "x.tar.idx", 0), 0, 6) == [0, 2560, 5120, 7680, 10240, 12800]


def test_damage_costs_the_rest_of_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = indexed(tmp_path / "set")
    places = [place for place, _, _ in opened(folder).rows_in(0)]
    data = bytearray((folder / "shard_000.tar").read_bytes())
    data[places[4].start : places[4].start + 512] = b"x" * 512
    (folder / "shard_000.tar").write_bytes(data)
    assert outcomes(opened(folder)) == [*[f"caption {n}" for n in range(3)], "damaged_tar"]
    monkeypatch.setattr(tars, "SHARD_ROWS", 3)
    monkeypatch.setattr(tars, "RUN_BYTES", len(data) - 1)
    assert outcomes(opened(folder)) == [*[f"caption {n}" for n in range(3)], "damaged_tar", *[f"caption {n}" for n in range(6, 10)]]


WRONG: dict[str, tuple[Callable[[list[int]], Any], str]] = {
    "empty": (lambda _: [], "has 0 bytes"),
    "torn": (lambda o: b"x", "has 1 bytes, which is not a multiple of 8"),
    "not in order": (lambda o: [o[1], o[0], *o[2:]], "comes no position of a sample"),
    "beyond the end": (lambda o: [*o[:-1], 1 << 40], "comes no position of a sample"),
    "between blocks": (lambda o: [*o[:3], o[3] + 8, *o[4:]], "comes no position of a sample"),
    "the end is missing": (lambda o: o[:-1], "the archive continues at byte"),
    "a sample is missing": (
        lambda o: [*o[:3], *o[4:]],
        "sample . (starts at byte .* and not where the index|of the archive starts elsewhere)",
    ),
    "a sample too many": (lambda o: [*o[:3], o[3] - 512, *o[3:]], "sample 3 starts at byte"),
    "at the second member, inside of a run": (lambda o: [*o[:3], o[4] - 1024, *o[4:]], "sample 3 starts at byte"),
    "at the second member, where a run begins": (lambda o: [*o[:2], o[2] - 1024, *o[2:]], "sample 2 of the archive starts elsewhere"),
    "of another archive": (lambda o: [0, *(n + 1024 for n in o[1:-1]), o[-1]], "no sample starts at byte"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = indexed(tmp_path / "set")
    path = folder / "shard_000.tar.idx"
    change, message = WRONG[name]
    offsets = change(list(struct.unpack("<11Q", path.read_bytes())))
    path.write_bytes(offsets if isinstance(offsets, bytes) else struct.pack(f"<{len(offsets)}Q", *offsets))
    monkeypatch.setattr(tars, "RUN_BYTES", 5000 if "where a run begins" in name else 6000)  # two samples, or one and a half
    with pytest.raises(Refused, match=rf"shard_000\.tar\.idx does not fit its archive: .*({message})"):
        list(opened(folder).kept_rows())
