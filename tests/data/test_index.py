"""The index: what it keeps is what reading and tokenising give, on disk as in memory; whatever is not true any more is noticed."""

import base64
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyeline.core.batch import Budget, EncodedImage, Sample, Video
from eyeline.core.cost import Cost
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.image_rule import Area, ImageRule, Patches, Square, Tiles
from eyeline.data.containers import json_rows
from eyeline.data.images import image_files
from eyeline.data.images.decode import Size, size_of
from eyeline.data.images.image_files import frames_of, image_key
from eyeline.data.plan import index, read_shard
from eyeline.data.plan.index import Index
from eyeline.data.plan.shard_index import ShardIndex
from eyeline.data.plan.sizing import Sizing
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.text.documents import Measured, Tokenised, fit_to_limits, require_answer, tokenise
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder
from tests.data.container_files import archive, encoded, parquet_file
from tests.data.image_rules import NATIVE
from tests.data.indexes import opened, same
from tests.data.llava_rows import row
from tests.forked import Forked

NO_COST = Cost(0, 0, 0, 0, 0)


@pytest.fixture
def rows(tmp_path: Path, draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Three shards of rows of every kind: shared images of several sizes, two images, text, long ones, bad ones, no JSON."""
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 1500)
    for n in range(5):
        draw(f"{n}.png", seed=n, width=16 + 40 * n, height=12 + 25 * n)
    (tmp_path / "cut.png").write_bytes(b"cut")
    lines = [json.dumps(row(f"question {n}", f"{n % 5}.png", answer=f"answer {n}") | {"kind": "abc"[n % 3]}) for n in range(12)]
    lines += [json.dumps(row("two", "1.png", "2.png", more=("more", "yes " * 20, "again", "no " * 30))), json.dumps(row("text"))]
    lines += ["{torn", json.dumps(row("", answer=" ")), json.dumps(row("x", "absent.png")), json.dumps(row("x", "cut.png"))]
    lines += [json.dumps(row(f"last {n}", answer="a b " * n)) for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return open_source(Source(path=str(tmp_path / "rows.jsonl")))


def read(found: Sample | BadSample, encoder: Encoder, rule: ImageRule) -> tuple[Tokenised | BadSample, tuple[Size, ...]]:
    """What a row is worth, looked at alone."""
    try:
        if isinstance(found, BadSample):
            raise found
        require_answer(found)
        return tokenise(found.messages, encoder, rule), tuple(size_of(item) for item in found.media)
    except BadSample as bad:
        return bad, ()


def fitting(found: Sample, *rest: Any) -> tuple[Sample, Measured] | BadSample:
    try:
        return fit_to_limits(found, *rest)
    except BadSample as bad:
        return bad


def test_it_keeps_what_reading_gives(rows: Rows, plain: Encoder, rule: ImageRule) -> None:
    whole = opened(rows, plain, rule)
    assert len(rows.shards) >= 3
    met = 0
    for shard in range(len(rows.shards)):
        made = whole.shard(0, shard)
        for (place, kind, found), number in zip(rows.rows_in(shard), range(len(made)), strict=True):
            met += 1
            assert made.place(shard, number) == place
            assert (None if made.kind_R[number] < 0 else made.kinds[made.kind_R[number]]) == kind
            known, sizes = read(found, plain, rule)
            if isinstance(known, BadSample):
                assert made.bad_R[number]
                assert made.rejects[number] == (known.cause, known.field, known.message)
                continue
            assert not made.bad_R[number]
            assert not isinstance(found, BadSample)
            kept = made.tokenised(number)
            for name in ("ids_U", "trained_U", "places_W"):
                assert np.array_equal(getattr(kept, name), getattr(known, name))
            assert (kept.slices, made.sizes(number)) == (known.slices, sizes)
            assert looks(made.media(number, rows.file_of(shard))) == looks(found.media)
            assert made.images_R[number] > 0 if found.media else made.images_R[number] == 0
    assert met == 24


def looks(media: tuple[EncodedImage | Video, ...] | None) -> list[list[tuple[str, Any]]] | None:
    """Key and encoded bytes of every image of some media."""
    return None if media is None else [[(image_key(p), held(p)) for p in frames_of(item)] for item in media]


def held(image: EncodedImage) -> Any:
    return image_files.in_memory(EncodedImage("", image.source))


@pytest.mark.parametrize("form", ["tar", "json", "parquet"])
def test_it_keeps_where_images_lie(tokenizers, tmp_path: Path, form: str) -> None:
    """Stills and videos, in the file of the shard or in their own; a row that has bytes itself has to be read."""
    said = [{"from": "human", "value": "<image><video><image>?"}, {"from": "gpt", "value": "yes"}]
    names = [f"{n}.png" for n in range(5)]
    for n, name in enumerate(names):
        (tmp_path / name).write_bytes(encoded(n, "PNG"))
    video: dict[str, Any] = {"video": names[2:5], "images": names[:2], "conversations": said}
    url = {
        "image": f"data:image/png;base64,{base64.b64encode(encoded(7, 'PNG')).decode()}",
        "conversations": [{**said[0], "value": "<image>?"}, said[1]],
    }
    match form:
        case "tar":
            still = {"images": ["b.png", "a.png"], "conversations": [{**said[0], "value": "<image><image>"}, said[1]]}
            pairs = [("a.png", encoded(1, "PNG")), ("json", json.dumps(still)), ("b.png", encoded(2, "PNG"))]
            path = archive(tmp_path / "x.tar", [(f"{key}.{part}", data) for key in ("one", "two") for part, data in pairs])
            wanted = [2, 2]
        case "json":
            path, wanted = tmp_path / "x.json", [4, None, 4]
            path.write_text(json.dumps([video, url, video]))
        case _:
            inside = video | {"images": [{"bytes": encoded(8, "PNG"), "path": None}, {"bytes": None, "path": names[1]}]}
            outside = video | {"images": [{"bytes": None, "path": name} for name in names[:2]]}
            path, wanted = parquet_file(tmp_path / "x.parquet", [inside, outside], 2), [None, 4]
    rows = open_source(Source(path=str(path)))
    made = opened(rows, Encoder(tokenizers["qwen3"], TEMPLATES["qwen3"]), NATIVE, tmp_path / "i").shard(0, 0)
    assert not made.rejects
    for place, _, found in rows.rows_in(0):
        assert isinstance(found, Sample)
        media = made.media(place.number, rows.file_of(0))
        assert media is None if wanted[place.number] is None else len(found.images) >= 2
        assert looks(media) in (None, looks(found.media))
        assert media is None or [isinstance(m, Video) for m in media] == [isinstance(m, Video) for m in found.media]


RULES = {
    "square": Square(32),
    "area": Area(16 * 16, 48 * 48),
    "patches": Patches(36),
    "tiles": Tiles(32, 3),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("policy", ["reject", "drop_turns"])
def test_sizes_under_a_budget_are_those_of_each_sample(rows: Rows, qwen: Encoder, plain: Encoder, name: str, policy: Any) -> None:
    """Counted in one sweep over the arrays, and compared with `fit_to_limits` for each sample; one index serves every rule and budget."""
    rule = ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", RULES[name])
    budget = Budget(60, 60)
    sizing = Sizing(opened(rows, plain, rule), budget, 50, policy, Cost(token=3, pair=5, label=2, patch=7, patch_pair=11))
    shrunk = rejected = 0
    for shard in range(len(rows.shards)):
        sized, made = sizing(0, shard), sizing.index.shard(0, shard)
        for place, _, found in rows.rows_in(shard):
            n = place.number
            if n in made.rejects:
                assert not sized.usable_R[n]
                continue
            assert not isinstance(found, BadSample)
            wanted = fitting(found, made.sizes(n), 50, 60, policy, plain, rule)
            if isinstance(wanted, BadSample):
                assert (sized.usable_R[n], sized.rejects[n]) == (False, (wanted.cause, wanted.field, wanted.message))
                rejected += 1
                continue
            kept, size = wanted
            got = (sized.tokens_R[n], sized.visual_R[n], sized.supervised_R[n], sized.patches_R[n])
            assert got == (size.tokens, size.visual, size.supervised, size.patches)
            assert sized.messages.get(n, len(found.messages)) == len(kept.messages)
            shrunk += len(kept.messages) < len(found.messages)
            patches = [u.grid.patches for size in made.sizes(n)[: len(kept.media)] for u in rule.units(*size)]
            assert sized.vision_R[n] == sum(7 * p + 11 * p * p for p in patches)
            assert sized.language_R[n] == sum(3 + 5 * (t + 1) for t in range(size.tokens)) + 2 * size.supervised
    assert rejected > 0 if policy == "reject" else name in ("patches", "tiles") or shrunk > 0


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shards that are indexed again from now on."""
    calls: list[tuple[int, int]] = []
    original = index.shard_index_of

    def noted(rows: Rows, shard: int, *rest: Any) -> ShardIndex:
        calls.append((id(rows), shard))
        return original(rows, shard, *rest)

    monkeypatch.setattr(index, "shard_index_of", noted)
    return calls


def test_it_is_made_once_and_mapped_afterwards(rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch) -> None:
    calls = counted(monkeypatch)
    memory = [opened(rows, plain, rule).shard(0, n) for n in range(3)]
    first = [opened(rows, plain, rule, tmp_path / "i").shard(0, n) for n in range(3)]
    assert len(calls) == 6
    again = [opened(rows, plain, rule, tmp_path / "i").shard(0, n) for n in range(3)]
    assert len(calls) == 6
    assert all(same(a, b) and same(b, c) for a, b, c in zip(memory, first, again, strict=True))
    base = again[0].ids_U
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)  # not loaded
    opened(rows, plain, ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Patches(16)), tmp_path / "i").shard(0, 0)
    assert len(calls) == 6  # how images are resized does not matter to it


def test_what_it_depends_on_makes_another(rows: Rows, plain: Encoder, qwen: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch) -> None:
    calls = counted(monkeypatch)
    opened(rows, plain, rule, tmp_path / "i").shard(0, 0)
    opened(rows, qwen, rule, tmp_path / "i").shard(0, 0)
    assert len(calls) == 2
    lines = rows.path.read_text().replace("question 0", "question X")
    rows.path.write_text(lines)
    opened(open_source(rows.source), plain, rule, tmp_path / "i").shard(0, 0)
    assert len(calls) == 3


def test_a_shared_folder_gives_no_source_the_index_of_another(
    rows: Rows, plain: Encoder, thinking: Encoder, rule: ImageRule, draw, tmp_path: Path
) -> None:
    """The same file with other images, under another name, read in another way, for another tokenizer or model: each as if alone."""
    for n in range(5):
        draw(f"else/{n}.png", width=30 + n)
    shutil.copy(rows.path, tmp_path / "copy.jsonl")
    (tmp_path / "two.jsonl").write_text(json.dumps({"image": "0.png", "a": "one", "b": "another one"}) + "\n")
    path, two = str(rows.path), str(tmp_path / "two.jsonl")
    ways: list[dict[str, Any]] = [
        *({"path": path}, {"path": path, "images": str(tmp_path / "else")}, {"path": str(tmp_path / "copy.jsonl")}),
        *({"path": path, "roles": {"assistant": "human", "user": "gpt"}}, {"path": two, "columns": {"caption": "a"}}),
        {"path": two, "columns": {"caption": "b"}},
    ]
    seen: list[ShardIndex] = []
    for source in map(open_source, (Source(**way) for way in ways)):
        for encoder in (plain, thinking):
            for of in (rule, None, ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Square(32), frames=2)):
                alone, shared = Index((source,), encoder, of, None), Index((source,), encoder, of, tmp_path / "i")
                assert all(same(shared.shard(0, n), alone.shard(0, n)) for n in range(len(source.shards)))
                seen.append(alone.shard(0, 0))
    assert sum(not same(one, seen[0]) for one in seen) > 24


@pytest.mark.parametrize("harm", ["truncated", "a bit", "empty", "another's"])
def test_a_damaged_file_is_made_anew(rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch, harm: str) -> None:
    whole = opened(rows, plain, rule, tmp_path / "i")
    wanted = whole.shard(0, 0)
    path, other = (whole._path(whole._identity(0, n)) for n in (0, 1))
    assert path is not None
    assert other is not None
    whole.shard(0, 1)
    data = bytearray(path.read_bytes())
    if harm == "a bit":
        data[len(data) // 2] ^= 4
    path.unlink()
    path.write_bytes({"truncated": data[:-100], "a bit": data, "empty": b"", "another's": other.read_bytes()}[harm])
    calls = counted(monkeypatch)
    assert same(opened(rows, plain, rule, tmp_path / "i").shard(0, 0), wanted)
    assert len(calls) == 1
    opened(rows, plain, rule, tmp_path / "i").shard(0, 0)
    assert len(calls) == 1  # and it was repaired


def test_an_image_that_may_not_be_read_is_a_reject_until_it_may(
    rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving the right to read changes neither size nor time of a file. (Root may read everything, so the system's answers are made.)"""
    kept = Index((rows,), plain, rule, tmp_path / "kept")
    closed = str(tmp_path / "3.png")
    usable = [(~kept.shard(0, shard).bad_R).sum() for shard in range(len(rows.shards))]
    opened, access = open, os.access
    with monkeypatch.context() as patch:

        def refuse(path: Any, *args: Any) -> Any:
            if str(path) == closed:
                raise PermissionError(13, "Permission denied")
            return opened(path, *args)

        patch.setattr("builtins.open", refuse)
        patch.setattr(os, "access", lambda path, mode: str(path) != closed and access(path, mode))
        again = Index((rows,), plain, rule, tmp_path / "kept")
        rejects = [reject for shard in range(len(rows.shards)) for reject in again.shard(0, shard).rejects.values()]
        assert [cause for cause, *_ in rejects].count("unreadable") == 2
        assert any("3.png may not be read: Permission denied" in message for *_, message in rejects)
    after = Index((rows,), plain, rule, tmp_path / "kept")
    assert [(~after.shard(0, shard).bad_R).sum() for shard in range(len(rows.shards))] == usable


def test_changed_images_are_examined_again(rows: Rows, plain: Encoder, rule: ImageRule, draw, tmp_path: Path) -> None:
    """An image that was missing and is there now is not rejected for ever; another size is another size, in as many bytes too."""
    lines = rows.path.read_text().replace('"4.png"', '"4.bmp"')
    rows.path.write_text(lines)
    rows = open_source(rows.source)
    before = draw("4.bmp", width=20, height=12).stat()
    index = opened(rows, plain, rule, tmp_path / "i")
    shards = range(len(rows.shards))
    lost = next((s, n) for s in shards for n, why in index.shard(0, s).rejects.items() if why[0] == "missing_image")
    draw("absent.png")
    draw("0.png", width=64, height=32)
    index = opened(rows, plain, rule, tmp_path / "i")
    assert lost[1] not in index.shard(0, lost[0]).rejects
    assert (index.shard(0, 0).sizes(0), index.shard(0, 0).sizes(4)) == (((32, 64),), ((12, 20),))
    assert draw("4.bmp", width=12, height=20).stat().st_size == before.st_size
    assert opened(rows, plain, rule, tmp_path / "i").shard(0, 0).sizes(4) == ((20, 12),)


def test_a_store_that_fails_now_and_then_changes_no_index(rows: Rows, plain: Encoder, rule: ImageRule, monkeypatch) -> None:
    """Each image's header is asked for again, and no row is blamed; a store that stays away is no reject either."""
    wanted = [opened(rows, plain, rule).shard(0, n) for n in range(len(rows.shards))]
    asked = 0

    def fails(times: int) -> Callable[[Any], Size]:
        def look(item: Any) -> Size:
            nonlocal asked
            asked += 1
            if asked % (times + 1):
                raise StorageFailed("could not read it.") from OSError(errno.EIO, "Input/output error")
            return size_of(item)

        return look

    monkeypatch.setattr("eyeline.data.containers.container.time.sleep", lambda _: None)
    monkeypatch.setattr(read_shard, "size_of", fails(rows.retries))
    assert all(same(opened(rows, plain, rule).shard(0, n), whole) for n, whole in enumerate(wanted))
    assert asked >= 7 * (rows.retries + 1)
    monkeypatch.setattr(read_shard, "size_of", fails(rows.retries + 1))
    with pytest.raises(StorageFailed, match=f"Tried {rows.retries + 1} times"):
        opened(rows, plain, rule).shard(0, 0)


def test_without_a_folder_nothing_is_written(rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    before = sorted(p.name for p in tmp_path.iterdir())
    opened(rows, plain, rule).shard(0, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_made_is_a_failure_of_storage(rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="Not a directory"):
        opened(rows, plain, rule, tmp_path / "file").shard(0, 0)


def test_the_number_of_open_files_is_bounded(rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(index, "KEPT_OPEN", 2)
    index_ = opened(rows, plain, rule, tmp_path / "i")
    for shard in range(len(rows.shards)):
        index_.shard(0, shard)
        assert len(index_._open) <= 2
    assert os.listdir(tmp_path / "i")


# Several processes


def make_all(folder: Path, name: str, rows: Rows, encoder: Encoder, rule: ImageRule) -> None:
    """In a process of its own: what it makes is written down, and held up as long as there is a file `held`."""
    original = index.shard_index_of

    def noted(of: Rows, shard: int, *rest: Any) -> ShardIndex:
        with open(folder / "made", "a") as file:
            file.write(f"{name} {shard}\n")
        while (folder / "held").exists():
            time.sleep(0.05)
        return original(of, shard, *rest)

    index.shard_index_of = noted
    shared = Index((rows,), encoder, rule, folder / "i")
    shared.make((0, n) for n in range(len(rows.shards)))
    (folder / f"lengths-{name}").write_text(" ".join(str(len(shared.shard(0, n).ids_U)) for n in range(len(rows.shards))))


@pytest.fixture
def process(plain: Encoder, rule: ImageRule, tmp_path: Path) -> Iterator[Callable[[str], Forked]]:
    for n in range(4):
        archive(
            tmp_path / f"rows{n}.tar",
            [(f"{k}.{end}", encoded(n, "PNG") if end == "png" else "said") for k in range(3) for end in ("png", "txt")],
        )
    (tmp_path / "held").touch()
    started: list[Forked] = []

    def start(name: str) -> Forked:
        rows = open_source(Source(path=str(tmp_path / "rows*.tar")))
        started.append(Forked(lambda: make_all(tmp_path, name, rows, plain, rule)))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def notes(folder: Path, count: int) -> list[str]:
    """What is being made, once there are `many`."""
    deadline = time.monotonic() + 60
    while not (folder / "made").exists() or len((folder / "made").read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return (folder / "made").read_text().split("\n")[:-1]


def test_processes_make_each_index_once_and_different_ones(process, tmp_path: Path) -> None:
    two = [process(name) for name in "ab"]
    assert {line.split()[1] for line in notes(tmp_path, 2)} == {"0", "1"}  # the second one does not wait while there is other work
    (tmp_path / "held").unlink()
    assert [one.wait(60) for one in two] == [0, 0]
    lengths = [(tmp_path / f"lengths-{name}").read_text() for name in "ab"]
    assert lengths[0] == lengths[1] and len(lengths[0].split()) == 4
    assert sorted(line.split()[1] for line in notes(tmp_path, 4)) == ["0", "1", "2", "3"]
    assert not list((tmp_path / "i").rglob(".*"))


def test_when_the_maker_is_killed_another_one_makes_it(process, tmp_path: Path) -> None:
    killed = process("a")
    assert notes(tmp_path, 1) == ["a 0"]
    waits = process("b")
    assert notes(tmp_path, 2)[1] == "b 1"
    killed.kill()
    killed.wait()
    (tmp_path / "held").unlink()
    assert waits.wait(60) == 0
    assert sorted(notes(tmp_path, 5)) == ["a 0", "b 0", "b 1", "b 2", "b 3"]


def test_where_there_are_no_locks_it_is_made_all_the_same(rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("eyeline.core.files.fcntl.flock", lambda *_: none_of(errno.ENOLCK))
    assert same(opened(rows, plain, rule, tmp_path / "i").shard(0, 0), opened(rows, plain, rule).shard(0, 0))
    monkeypatch.setattr("eyeline.core.files.fcntl.flock", lambda *_: none_of(errno.EIO))
    with pytest.raises(StorageFailed, match="could not lock"):
        opened(rows, plain, rule, tmp_path / "j").shard(0, 0)


def none_of(number: int) -> None:
    raise OSError(number, os.strerror(number))
