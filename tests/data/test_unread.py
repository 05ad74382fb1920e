"""Images that rows name where nothing reads them: found in whatever way they are named, and nothing else is."""

import base64
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eyeline.core.batch import Sample
from eyeline.core.errors import BadSample
from eyeline.data.sources.naming import placeholders_in
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.sources.unread import FIRST, FURTHER, SHARDS, Unread, unread


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images, one without an ending and one with a space in its name."""
    found = tmp_path_factory.mktemp("unread")
    Image.new("RGB", (4, 3)).save(found.parent / "outside.png")
    for n, name in enumerate([*(f"photos/{n}.png" for n in range(12)), "photos/my cat.png", "photos/plain"]):
        (found / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 3), (n, 0, 0)).save(found / name, format="PNG")
    return found


def rows_of(folder: Path, row: Callable[[int], Any], count: int = 12, name: str = "data.json", **settings: Any) -> Rows:
    (folder / name).write_text(json.dumps([row(n) for n in range(count)]))
    return open_source(Source(path=str(folder / name), **settings))


def looked(folder: Path, row: Callable[[int], Any], count: int = 12, **settings: Any) -> Unread:
    return unread(rows_of(folder, row, count, **settings))


def asked(text: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "A cat."}]}


def talked(text: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "A cat."}]}


ENCODED = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(90))).decode()
QUESTION = {"question": "What is it?", "answer": "A cat."}

TURNS = {
    "messages": [{"role": "user", "content": "?", "images": ["photos/0.png"]}, {"role": "assistant", "content": "!"}],
    "conversations": [{"from": "human", "value": "?", "image": "photos/0.png"}, {"from": "gpt", "value": "!"}],
}
COLUMNS: dict[str, tuple[Callable[[int], Any], str]] = {
    "a path": (lambda n: QUESTION | {"photo": f"photos/{n}.png"}, " photo names images and is not read (12 of 12 rows looked at"),
    "prompts": (lambda n: {"prompt": "?", "completion": "!", "img_path": f"photos/{n}.png"}, "Write columns: {image: img_path} for"),
    "talks": (lambda n: talked("?") | {"pixel": f"photos/{n}.png"}, "{image: pixel} for this source, and write <image> in the question"),
    "a placeholder": (lambda n: talked("<image>?") | {"photo": f"photos/{n}.png"}, "Write columns: {image: photo} for this source. Or"),
    "inside another": (lambda n: QUESTION | {"meta": {"pixel": f"photos/{n}.png"}}, "Write columns: {image: meta.pixel}"),
    "a list": (lambda n: QUESTION | {"photos": [f"photos/{n}.png", "photos/0.png"]}, "Write columns: {image: photos}"),
    "a list as text": (lambda n: QUESTION | {"photo": f"['photos/{n}.png', 'photos/0.png']"}, "the paths of a row as a list in JSON"),
    "several in a text": (lambda n: QUESTION | {"photo": f"photos/{n}.png;photos/0.png"}, "the paths of a row as a list in JSON"),
    "another folder": (lambda n: QUESTION | {"img": f"{n}.png"}, "Write columns: {image: img} and images: FOLDER/photos for this source"),
    "nowhere": (lambda n: QUESTION | {"img": f"gone/{n}.png"}, "does not exist in FOLDER). Write columns: {image: img} and images: the"),
    "outside": (lambda n: QUESTION | {"img": "FOLDER/../outside.png"}, "columns: {image: img} and images: / (or another folder"),
    "no ending": (lambda n: QUESTION | {"photo": "photos/plain"}, " photo names images and is not read (12 of 12"),
    "a data URL": (lambda n: QUESTION | {"photo": f"data:image/png;base64,{ENCODED}"}, " photo holds images"),
    "base64": (lambda n: QUESTION | {"photo": ENCODED}, " photo holds images"),
    "an object": (lambda n: QUESTION | {"photo": {"path": f"photos/{n}.png", "bytes": None}}, "Write columns: {image: photo}"),
    "a URL": (lambda n: QUESTION | {"img_url": f"https://a.b/{n}"}, "holds URLs of images and is not read"),
    "a file URL": (lambda n: QUESTION | {"photo": f"file://FOLDER/photos/{n}.png"}, "Write the paths without file://"),
    "a video": (lambda n: QUESTION | {"clip": f"clips/{n}.mp4"}, " clip names videos"),
    "a message": (lambda n: {"messages": TURNS["messages"]}, " messages[].images names"),
    "a turn": (lambda n: {"conversations": TURNS["conversations"]}, " conversations[].image names"),
    "a part": (lambda n: asked([{"type": "text", "text": "?", "image": f"photos/{n}.png"}]), " messages[].content[].image names"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_images_in_an_unread_column_are_refused(folder: Path, name: str) -> None:
    row, words = COLUMNS[name]

    def of(n: int) -> Any:
        return json.loads(json.dumps(row(n)).replace("FOLDER", str(folder)))

    found = looked(folder, of)
    assert found.refusal is not None
    assert "none of the 12 rows looked at shows an image, and 12 of them name one" in found.refusal
    assert words in found.refusal.replace(str(folder), "FOLDER")
    assert "Or set images: ignore" in found.refusal
    assert found.warnings == ()
    assert looked(folder, of, images="ignore") == Unread(keys=found.keys)


TEXTS: dict[str, tuple[str, str]] = {
    "Qwen-VL": ("Image 1: <img>photos/0.png</img>\nWhat is it?", "by <img>…</img>"),
    "Qwen-VL, absent": ("<img>gone.jpg</img>\nWhat is it?", "by <img>…</img>"),
    "a space": ("<img>photos/my cat.png</img>What?", "'photos/my cat.png'"),
    "markdown": ("![](photos/0.png) What is it?", "by ![…](…)"),
    "markdown URL": ("![cat](https://a.b/c.png) What is it?", "by ![…](…)"),
    "HTML": ("<img src='photos/0.png'> What is it?", 'by <img src="…">'),
    "brackets": ("[img]photos/0.png[/img] What is it?", "by [img]…[/img]"),
    "a path": ("photos/0.png\nWhat is it?", "by its path"),
    "a path in a sentence": ("Look at photos/0.png. What is it?", "by its path"),
    "a path with a space": ("photos/my cat.png\nWhat is it?", "by its path"),
    "vision_start": ("<|vision_start|>photos/0.png<|vision_end|>What?", "by its path"),
    "a data URL": (f"data:image/png;base64,{ENCODED} What?", "by a data: URL"),
    "base64": (f"/9j/{'A' * 300} What?", "by base64"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("layout", [asked, talked])
def test_images_in_the_text_are_refused(folder: Path, name: str, layout: Callable[[str], Any]) -> None:
    text, words = TEXTS[name]
    found = looked(folder, lambda n: layout(text))
    assert found.refusal is not None
    assert words in found.refusal
    assert "Put the paths into a column image" in found.refusal


PLACEHOLDERS = (
    "<IMG_CONTEXT> <image_0> <image1> <ImageHere> <|image_pad|> <|image_1|> <|image|> <|vision_start|> [IMG] [IMG_BREAK] <img> </img> "
    "<Img> <IMAGE> <image_placeholder> <start_of_image> <picture> <image_soft_token> <fake_token_around_image> <row_1_col_2> <global-img> "
    "<|begin_of_image|> <|media_pad|> <im_patch> <|video_pad|> <video_0> <__image__> <VIDEO_CONTEXT> {image} {{image}} "
    "<|IMAGE_PLACEHOLDER|> <audio>"
)


@pytest.mark.parametrize("placeholder", [*PLACEHOLDERS.split(), "<image 1>", "[Image 1]", "<\uff5cimage\uff5c>"])
def test_a_foreign_placeholder_is_found(placeholder: str) -> None:
    assert placeholders_in(f"Look:{placeholder}\nWhat is it?", answer=False) == [placeholder]


@pytest.mark.parametrize(
    "text",
    [
        *("List<Image> of a Vec<Frame>", "<|im_start|>user", "<VideoPlayer>", "<imagine>", "<b>bold</b>", "[Note]", "{name}", "<div>"),
        *(
            "<image>",
            "<video>",
            "a < image > b",
            "[an image of a cat]",
            "<img src='x.png'>",
            "{content}",
            "<path>",
            "<start>",
            "<id>",
            "[1]",
        ),
    ],
)
def test_other_text_is_no_placeholder(text: str) -> None:
    assert placeholders_in(text, answer=False) == []


def test_an_answer_may_write_html(folder: Path) -> None:
    """But not another trainer's token: the model would learn to write it."""
    for text in ("<img>", "<picture><video>", "[Image 1]", "{image}"):
        assert placeholders_in(text, answer=True) == []
    assert placeholders_in("See <image_0>.", answer=True) == ["<image_0>"]
    row = asked("Draw it.")
    row["messages"][1]["content"] = "<IMG_CONTEXT>"
    assert "has <IMG_CONTEXT> (12 of 12 rows" in str(looked(folder, lambda n: row).refusal)


def test_unknown_placeholders_refused_or_warned_of(folder: Path) -> None:
    found = looked(folder, lambda n: asked("<image_0>\nWhat is it?"))
    assert "The text has <image_0> (12 of 12 rows looked at, first in row 0)" in str(found.refusal)
    part = {"type": "image", "image": "photos/0.png"}
    shown = looked(folder, lambda n: asked([part, {"type": "text", "text": "<IMG_CONTEXT>\nWhat?" if n == 5 else "What?"}]))
    assert shown.refusal is None
    [warning] = shown.warnings
    assert "the text has <IMG_CONTEXT> (1 of 12 rows looked at, first in row 5)" in warning
    assert "Delete them" in warning
    ignored = looked(folder, lambda n: asked("<image_0>\nWhat is it?"), images="ignore")
    assert (ignored.refusal, len(ignored.warnings)) == (None, 1)


@pytest.mark.parametrize(
    "row",
    [
        lambda n: {"id": f"{n}.png", "image": f"photos/{n}.png", "source": f"https://a.b/{n}.jpg", **talked("<image>What is it?")},
        lambda n: {"image": f"photos/{n}.png", "file": f"./photos/../photos/{n}.png", **QUESTION},
        lambda n: asked([{"type": "image_url", "image_url": {"url": f"photos/{n}.png"}}, {"type": "text", "text": f"photos/{n}.png?"}]),
        lambda n: {"images": [f"photos/{n}.png"], "texts": [{"user": "?", "assistant": "!"}], "name": "notes.txt", "size": 3},
        lambda n: asked("How do I load cat.png, and what is <img src='x.png'>?"),
        lambda n: {"id": f"{n}.png", **asked("Say hello.")},
        lambda n: {"note": "the list of colours", "url": "https://a.b/c", "n": n, "tags": ["a", "b.txt"], **QUESTION},
    ],
)
def test_what_is_read_or_no_image_is_not_warned_of(folder: Path, row: Callable[[int], Any]) -> None:
    assert looked(folder, row) == Unread()


def test_some_rows_that_name_images_are_warned_of(folder: Path) -> None:
    """Where others show theirs, or where they are few, the source can be used."""
    mixed = looked(folder, lambda n: QUESTION | {"photo" if n % 2 else "image": f"photos/{n}.png"})
    assert mixed.refusal is None
    assert " photo names images and is not read (6 of 12 rows looked at, first in row 1: 'photos/1.png')" in mixed.warnings[0]
    few = looked(folder, lambda n: QUESTION | ({"photo": f"photos/{n}.png"} if n < 6 else {}))
    assert (few.refusal, len(few.warnings)) == (None, 1)
    most = looked(folder, lambda n: QUESTION | ({"photo": f"photos/{n}.png"} if n < 7 else {}))
    assert most.refusal is not None


def test_a_second_column_of_images_is_warned_of(folder: Path) -> None:
    found = looked(folder, lambda n: QUESTION | {"image": f"photos/{n}.png", "image_2": "photos/0.png"}, count=2)
    assert " image_2 names images" in found.warnings[0]
    assert "Put all images of a row into one column, images" in found.warnings[0]


def test_other_columns_stay_in_the_remedy(folder: Path) -> None:
    found = looked(folder, lambda n: {"q": "?", "a": "!", "photo": f"photos/{n}.png"}, columns={"question": "q", "answer": "a"})
    assert "Write columns: {image: photo, answer: a, question: q}" in str(found.refusal)


def test_the_remedy_works(folder: Path) -> None:
    rows = rows_of(
        folder, lambda n: QUESTION | {"meta": {"photo": f"{n}.png"}}, columns={"image": "meta.photo"}, images=str(folder / "photos")
    )
    assert unread(rows) == Unread()
    assert all(isinstance(found, Sample) and len(found.images) == 1 for _, _, found in rows.kept_rows())


def test_large_data_are_sampled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of later shards, too: what comes first may be text."""
    monkeypatch.setattr("eyeline.data.containers.json_rows.SHARD_BYTES", 1 << 14)
    text, seen = json.dumps(QUESTION), json.dumps({"photo": "photos/0.png", **QUESTION})
    (folder / "large.jsonl").write_text(f"{text}\n" * 3000 + f"{seen}\n" * 400)
    rows = open_source(Source(path=str(folder / "large.jsonl")))
    assert len(rows.shards) > SHARDS + 1
    [warning] = unread(rows).warnings
    assert f"({FURTHER} of {FIRST + SHARDS * FURTHER} rows looked at, first in large.jsonl@" in warning


def test_kinds_and_limit_choose_the_rows(folder: Path) -> None:
    def row(n: int) -> Any:
        return {"kind": "seen" if n < 4 else "text", **QUESTION, **({"photo": "photos/0.png"} if n < 4 else {})}

    assert looked(folder, row, categories=("text",)) == Unread()
    assert "none of the 4 rows" in str(looked(folder, row, categories=("seen",)).refusal)
    assert "none of the 3 rows" in str(looked(folder, row, limit=3).refusal)


def test_an_unread_column_of_parquet_is_seen(folder: Path, tmp_path: Path) -> None:
    """Though only the columns of a layout are read of it."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.feather as feather
    import pyarrow.parquet as parquet

    table = pyarrow.Table.from_pylist(
        [QUESTION | {"photo": {"bytes": (folder / f"photos/{n}.png").read_bytes(), "path": None}} for n in range(12)]
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "a.arrow", compression="uncompressed")
    for name in ("a.parquet", "a.arrow"):
        rows = open_source(Source(path=str(tmp_path / name)))
        assert " photo holds images and is not read (12 of 12 rows" in str(unread(rows).refusal)
        mapped = open_source(Source(path=str(tmp_path / name), columns={"image": "photo"}))
        assert unread(mapped) == Unread()


def test_a_member_of_an_archive_without_a_known_ending_is_seen(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for n in range(12):
            for name, data in ((f"{n}.photo", (folder / f"photos/{n}.png").read_bytes()), (f"{n}.json", json.dumps(asked("?")).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    found = unread(open_source(Source(path=str(tmp_path / "a.tar"))))
    assert " photo holds images and is not read (12 of 12 rows" in str(found.refusal)
    assert "Give the members the ending of an image, .jpg or .png, in place of .photo" in str(found.refusal)


def test_a_table_has_columns_too(folder: Path) -> None:
    (folder / "t.csv").write_text("photo,question,answer\n" + "".join(f"photos/{n}.png,?,!\n" for n in range(12)))
    assert "Write columns: {image: photo}" in str(unread(open_source(Source(path=str(folder / "t.csv")))).refusal)


def test_a_row_of_text_may_not_show_an_image(folder: Path) -> None:
    """images: ignore says that the rows are text: an image is neither shown nor silently dropped."""
    rows = rows_of(folder, lambda n: QUESTION | ({"image": "photos/0.png"} if n else {}), count=2, images="ignore")
    (place, _, first), (other, _, bad) = rows.kept_rows()
    assert isinstance(first, Sample)
    assert rows.read(place) == first
    assert isinstance(bad, BadSample)
    assert (bad.cause, bad.field) == ("image_ignored", "images")
    with pytest.raises(BadSample, match=r"images: ignore, and the row shows 'photos/0.png'"):
        rows.read(other)
    read = rows_of(folder, lambda n: QUESTION, count=2)
    assert rows.layout.identity != read.layout.identity  # else an index of one would be believed for the other


def test_limits_of_one_image_are_named(folder: Path) -> None:
    image = {"type": "image", "image": "photos/0.png", "min_pixels": 50176, "resized_height": 280, "uuid": "x"}
    found = looked(folder, lambda n: asked([image, {"type": "text", "text": "What?"}]) | {"max_pixels": 3})
    assert found.refusal is None
    [warning] = found.warnings
    assert "max_pixels, messages[].content[].min_pixels, resized_height are not read (12 of 12 rows looked at, first in row 0)" in warning
    assert "(--min-pixels, --max-pixels)" in warning
    assert [key.rpartition(".")[2] for key in found.keys] == ["min_pixels", "resized_height", "uuid"]


def test_limits_of_one_video_are_named(folder: Path) -> None:
    video = {"type": "video", "video": ["photos/0.png", "photos/1.png"], "fps": 1.0, "nframes": 2, "video_start": 1.0}
    found = looked(folder, lambda n: asked([video, {"type": "text", "text": "What?"}]))
    [warning] = found.warnings
    assert "messages[].content[].nframes, video_start are not read" in warning
    assert "every frame that is listed is used" in warning


def test_keys_that_are_read_or_empty_are_not_listed(folder: Path) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": "photos/0.png", "detail": "auto"}, "text": None},
        {"type": "text", "text": "?", "image_url": None},
    ]
    assert looked(folder, lambda n: asked(content)) == Unread()
    content[0]["image_url"]["detail"] = "low"  # type: ignore[index]
    assert looked(folder, lambda n: asked(content)).keys == ("messages[].content[].image_url.detail",)
