"""What the data engine promises as a whole, on random data and settings, in real processes, and with a model behind it."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast

from eyeline.core.batch import Budget, Counts, Sample
from eyeline.core.errors import Refused, StorageFailed, TooManyRejects
from eyeline.core.image_rule import Area, ImageRule
from eyeline.core.step import Step
from eyeline.core.world import World
from eyeline.data import loader
from eyeline.data.containers import json_rows
from eyeline.data.counts import count_steps
from eyeline.data.fetch import fetch
from eyeline.data.fetch.batches import batch_of
from eyeline.data.images import patches
from eyeline.data.images.patches import image_patches
from eyeline.data.loader import training_steps
from eyeline.data.plan import blend, index, sizing
from eyeline.data.reader import Reader, reader_of, sizing_of
from eyeline.data.sets import Data, held_out
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.text.documents import document_of
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_batches
from eyeline.models import qwen3, qwen3_vl, qwen_vision
from eyeline.models.shape import build
from tests.data.any_rows import ANY, UNUSABLE, line_of, one_source, text
from tests.data.llava_rows import row
from tests.forked import Forked
from tests.models import parity

# P2: any data and any settings


@pytest.fixture
def images(tmp_path: Path, draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 500)
    for n in range(4):
        draw(f"set/{n}.png", seed=n)
    return tmp_path / "set"


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    some=st.lists(one_source, min_size=1, max_size=3),
    validation_fraction=st.sampled_from([0.0, 0.0, 0.3, 0.7]),
    max_samples_per_image=st.integers(1, 4),
    budget=st.sampled_from([Budget(60, 32), Budget(90, 80), Budget(200, 48)]),
    epochs=st.integers(1, 3),
    packs=st.integers(1, 6),
    history=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3),
    seed=st.integers(0, 3),
)
def test_every_usable_row_as_often_as_it_should_be(
    images: Path, plain: Encoder, rule: ImageRule, some, validation_fraction, max_samples_per_image, budget, epochs, packs, history, seed
) -> None:
    """Whatever the data, the settings, and the (steps, ranks) after which a run was stopped and taken up again."""
    sources = []
    for n, one in enumerate(some):
        (images / f"{n}.jsonl").write_text("\n".join(line_of(m, *what) for m, what in enumerate(one["rows"])))
        rest = {name: one[name] for name in ("repeat", "limit", "categories")}
        sources.append(Source(path=str(images / f"{n}.jsonl"), **rest))
    data = Data(
        sources=tuple(sources), validation_fraction=validation_fraction, max_samples_per_image=max_samples_per_image, max_reject_rate=1.0
    )

    def reader() -> Reader:
        return reader_of(data, plain, rule, seed)

    trained, validated, met, lost = Counter[str](), Counter[str](), 0, 0
    sides, absent = set(), False
    for source, one in zip(sources, some, strict=True):
        try:
            rows = open_source(source)
        except Refused:  # no row of it can be recognised
            with pytest.raises(Refused):
                reader()
            return
        absent |= source.categories == ("a",) and source.limit is None and not any(k == "a" and w != "no row" for w, k in one["rows"])
        numbers = {place: n for n, (place, _, _) in enumerate(p for shard in range(len(rows.shards)) for p in rows.rows_in(shard))}
        for place, _, found in rows.kept_rows():
            usable = one["rows"][numbers[place]][0] not in UNUSABLE
            held = held_out(rows, place, found, validation_fraction)
            sides.add(held)
            if held:
                validated[rows.origin_of(place)[0]] += usable
            else:
                trained[rows.origin_of(place)[0]] += usable * source.repeat * epochs
                met += 1
                lost += not usable
    if absent or False not in sides or (validation_fraction and True not in sides):
        with pytest.raises(Refused):
            reader()
        return
    trained, validated = +trained, +validated
    if not trained:
        with pytest.raises(Refused, match="no sample can be used"):
            list(training_steps(reader(), budget, packs, epochs))
        with pytest.raises(Refused, match="no sample can be used"):
            count_steps(reader(), budget, packs, epochs)
        return
    got, state, count = Counter[str](), None, 0
    for stop, ranks in [*history, (10**9, 1)]:
        after = state
        for rank in range(ranks):
            last = replace(reader(), world=World(rank, ranks))
            for n, step in enumerate(training_steps(last, budget, packs, epochs, json.loads(json.dumps(state)))):
                got.update(id for batch in step.batches for id in batch.ids)
                count += rank == 0
                after = step.state
                if n + 1 == stop:
                    break
        state = after
    assert got == trained
    assert count == count_steps(reader(), budget, packs, epochs)
    assert (last.rejects.seen, last.rejects.rejected) == (met, lost)
    if validation_fraction and validated:
        assert Counter(id for batch in validation_batches(reader(), budget) for id in batch.ids) == validated


def test_a_set_smaller_than_a_pack_is_counted(images: Path, plain: Encoder, rule: ImageRule) -> None:
    """Its first epochs fill no pack, which does not mean that nothing can be used."""
    (images / "few.json").write_text(json.dumps([text(n) for n in range(3)]))
    reader = reader_of(Data(sources=(Source(path=str(images / "few.json")),)), plain, rule, 0)
    for epochs in (1, 4, 30):
        assert count_steps(reader, Budget(300, 32), 2, epochs) == len(list(training_steps(reader, Budget(300, 32), 2, epochs)))


def test_a_carried_row_that_can_no_longer_be_used_is_named(images: Path, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    lines = [json.dumps(row(f"question {n}", f"{n % 4}.png")) for n in range(40)]
    (images / "rows.jsonl").write_text("\n".join(lines))
    data = Data(sources=(Source(path=str(images / "rows.jsonl")),), max_reject_rate=1.0, cache=str(tmp_path / "index"))
    state = next(
        s.state
        for s in training_steps(reader_of(data, plain, rule, 0), Budget(90, 80), 1, None)
        if s.state["bins"] and s.state["number"] > 1
    )
    for n in range(4):
        (images / f"{n}.png").unlink()
    with pytest.raises(StorageFailed, match=r"rows\.jsonl row \d+ is in the plan and can no longer be used: .*\.png does not exist"):
        next(training_steps(reader_of(data, plain, rule, 0), Budget(90, 80), 1, None, state))


# P7: processes that wait for one another


def run_rank(folder: Path, encoder: Encoder, rule: ImageRule, rank: int, ranks: int) -> None:
    """In a process of its own: what it is given of three sets is written down."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)

    def ahead(asked: Any, fetch: Any, _: Any, verdicts: Any, group: Any) -> Any:
        """As workers do, and each rank another number of packs."""
        waiting = []
        for mark, visits in asked:
            waiting.append((mark, fetch(fetch.job(visits, verdicts))))
            if len(waiting) > 3 * rank:
                yield waiting.pop(0)
        yield from waiting

    loader.fetched_in_order = ahead

    def gather(value: Any) -> list[Any]:
        out = [None] * ranks
        dist.all_gather_object(out, value)
        return out

    def run(name: str, **settings: Any) -> list[Any]:
        data = Data(sources=(Source(path=f"{folder}/set/{name}.jsonl"),), max_samples_per_image=2, **settings)
        reader, steps, end = reader_of(data, encoder, rule, 0, world=World(rank, ranks, gather=gather)), [], ""
        try:
            for step in training_steps(reader, Budget(90, 80), 2 * ranks + 1, 2):
                own = [[batch.pack, batch.ids, astuple(batch.counts), batch.has_images, batch.image_gradients] for batch in step.batches]
                steps.append([own, [astuple(slot) for slot in step.slots], step.state])
        except (StorageFailed, TooManyRejects) as error:
            end = type(error).__name__
        return [steps, end]

    wrong = "other" if rank == 1 else "rows"
    given = [run("rows", max_reject_rate=1.0), run("rows", max_reject_rate=0.02), run(wrong, max_reject_rate=1.0)]
    (folder / f"given-{rank}").write_text(json.dumps(given))
    dist.destroy_process_group()


def test_processes_that_wait_for_one_another_have_as_many_steps(images: Path, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    """Rows that cannot be used, images that only the rank learns of which decodes them, another read-ahead on each rank. Then a
    rate of rejects that ends the run, and a rank with other data: all end in the same step, and none hangs."""
    kinds = ["image", "text", "missing", "two images", "same image", "text", "no row"]
    lines = [line_of(n, kinds[n % len(kinds)], "a") for n in range(150)]
    (images / "3.png").write_bytes((images / "3.png").read_bytes()[:200])
    (images / "rows.jsonl").write_text("\n".join(lines))
    (images / "other.jsonl").write_text("\n".join(lines[:-1]))
    started = [Forked(lambda rank=rank: run_rank(tmp_path, plain, rule, rank, 3)) for rank in range(3)]
    try:
        assert [process.wait(120) for process in started] == [0, 0, 0]
    finally:
        for process in started:
            process.kill()
    ends = [json.loads((tmp_path / f"given-{rank}").read_text()) for rank in range(3)]
    usable, capped, different = zip(*ends, strict=True)
    alone = reader_of(
        Data(sources=(Source(path=str(images / "rows.jsonl")),), max_samples_per_image=2, max_reject_rate=1.0), plain, rule, 0
    )
    wanted = list(training_steps(alone, Budget(90, 80), 7, 2))
    assert len(wanted) > 5
    assert wanted[-1].state["rejects"]["counts"]["broken_image"] > 3
    for steps, end in usable:
        assert end == ""
        assert [state for *_, state in steps] == [step.state for step in wanted]
        assert [len(batches) for batches, *_ in steps] == [3] * (len(steps) - 1) + [-(-len(wanted[-1].batches) // 3)]
    for step, *ranks in zip(wanted, *(steps for steps, _ in usable), strict=True):
        assert_all_ranks_know_the_step(step, [batches for batches, *_ in ranks], [slots for _, slots, _ in ranks])
    assert {end for _, end in capped} == {"TooManyRejects"}
    assert len({len(steps) for steps, _ in capped}) == 1
    assert {end for _, end in different} == {"StorageFailed"}
    assert len({len(steps) for steps, _ in different}) == 1  # as many as came before what differs


def assert_all_ranks_know_the_step(alone: Step, batches: list[list[Any]], slots: list[list[Any]]) -> None:
    """Each rank's batches have the numbers of the packs of the only rank, and all are told the same, which follows from them."""
    given = {pack: (ids, counts) for of_rank in batches for pack, ids, counts, *_ in of_rank}
    assert sorted(given) == list(range(len(slots[0]) * len(batches)))
    for pack, batch in enumerate(alone.batches):
        assert (batch.pack, given[pack]) == (pack, (list(batch.ids), list(astuple(batch.counts))))
    assert all(given[pack][1][4:] == [0, 0, 0, 0] for pack in range(len(alone.batches), len(given)))
    assert all(told == slots[0] for told in slots)
    for (counts, *flags, costs, _, encoders, _), *of_slot in zip(slots[0], *batches, strict=True):
        own = [Counts(*counts) for _, _, counts, *_ in of_slot]
        assert counts == list(astuple(sum(own, Counts.zero())))
        assert flags == [any(c.images for c in own), any(c.images and c.supervised for c in own)]
        assert encoders is None
        assert all([has, gradients] == flags for *_, has, gradients in of_slot)
        assert costs == [list(alone.slots[pack].costs[0]) if pack < len(alone.slots) else [0, 0] for pack, *_ in of_slot]


# P12: from files through a model

SIZES = {"small.png": (10, 14), "wide.jpg": (20, 90), "a.png": (24, 30), "b.png": (24, 30)}
SHOWN = [
    row("one?", "small.png"),
    row("and what is this?", "small.png", answer="a red circle"),
    row("is it blue?", "wide.jpg", more=("sure?", "no")),
    row("which?", "wide.jpg"),
    row("both?", "wide.jpg", "small.png", answer="yes yes"),
    row("no image?", answer="no"),
    row("and now?", "wide.jpg"),
    {"video": ["a.png", "b.png", "a.png"], "fps": 1} | {"conversations": row("<video>video?")["conversations"]},
    row("other?", "a.png"),
]


def test_packed_equals_unpacked_from_files(tmp_path: Path, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    """Loss and every gradient of an epoch, read by the reader in packs where rows share images of native sizes, are those of each
    row alone, its images prepared for itself."""
    for n, (name, (height, width)) in enumerate(SIZES.items()):
        Pillow.fromarray(np.random.default_rng(n).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / name)
    (tmp_path / "rows.json").write_text(json.dumps(SHOWN))
    encoder = Encoder(tokenizers["qwen3"], TEMPLATES["qwen3"])
    vision = qwen_vision.Config(
        patch=4,
        hidden_size=16,
        layers=2,
        heads=2,
        intermediate_size=24,
        position_grid=5,
        deepstack_layers=(0,),
        min_pixels=64,
        max_pixels=2000,
        video_min_pixels=64,
    )
    language = qwen3.Config(
        vocab_size=len(tokenizers["qwen3"]),
        hidden_size=24,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=40,
        mrope_section=(2, 1, 1),
        tie_embeddings=True,
    )
    model = build(qwen3_vl.Config(vision=vision, language=language), "cpu", compute_dtype=torch.float32)
    parity.randomise(model)
    rule = vision.rule()
    reader = reader_of(Data(sources=(Source(path=str(tmp_path / "rows.json")),), max_samples_per_image=3), encoder, rule, 0)
    batches = [batch for step in training_steps(reader, Budget(150, 400), 1, 1) for batch in step.batches]
    assert len(batches) > 1
    assert any(batch.counts.images < sum(len(SHOWN[int(id.partition("#")[2])].get("image") or ()) for id in batch.ids) for batch in batches)
    alone = []
    for place, _, sample in reader.training.index.sources[0].kept_rows():
        assert isinstance(sample, Sample), place
        media = [image_patches(item, rule) for item in sample.media]
        alone.append(batch_of([document_of(sample, encoder, rule, media)], None))
    assert sum(batch.counts.documents for batch in batches) == len(alone) == len(SHOWN)

    def run(some: list[Any]) -> parity.Run:
        model.zero_grad()
        losses = torch.stack([model(batch).out for batch in some])
        losses.sum().backward()
        return losses.sum().detach(), parity.gradients(model)

    parity.same(run(batches), run(alone))


# What is in the index is not read again


def test_what_is_too_long_is_known_without_reading_it(images: Path, plain: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a set with many such rows would be read and tokenised again at every resume."""
    (images / "rows.json").write_text(json.dumps([text(0), ANY["too long"](1), text(2)]))
    reader = reader_of(Data(sources=(Source(path=str(images / "rows.json")),), max_reject_rate=1.0), plain, None, 0)
    shards = [(0, shard) for shard in range(len(reader.training.index.sources[0].shards))]
    for shard in shards:
        reader.training.index.shard(*shard)
    monkeypatch.setattr(Rows, "read", lambda *_: pytest.fail("it was read"))
    sized = [sizing_of(reader, Budget(90, 0))(*shard) for shard in shards]
    assert [usable for one in sized for usable in one.usable_R.tolist()] == [True, False, True]
    assert [cause for one in sized for cause, *_ in one.rejects.values()] == ["too_long"]


def test_a_blend_of_many_sources_opens_no_shard_twice_a_window(images: Path, plain: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of all sources are open at once; if more than the cache holds, every row would open its shard again."""
    for n in range(8):
        (images / f"{n}.jsonl").write_text("\n".join(json.dumps(text(m)) for m in range(200)))
    made, opened = index.shard_index_of, Counter[tuple[str, int]]()

    def noted(rows: Rows, shard: int, *rest: Any) -> Any:
        opened[str(rows.path), shard] += 1
        return made(rows, shard, *rest)

    monkeypatch.setattr(index, "shard_index_of", noted)
    monkeypatch.setattr(blend, "MIXED_ROWS", (20, 160))  # as many as those windows have
    sources = tuple(Source(path=str(images / f"{n}.jsonl")) for n in range(8))
    steps = training_steps(reader_of(Data(sources=sources, mix="interleave"), plain, None, 0), Budget(90, 0), 2, None)
    for _ in range(150):
        next(steps)
    assert len(opened) > 8 * 32
    assert sum(opened.values()) < 1.5 * len(opened)  # some come in two epochs


def test_images_are_decoded_when_their_pack_is_fetched(images: Path, plain: Encoder, rule: ImageRule, monkeypatch) -> None:
    rows = [row(f"question {n}", f"{n % 4}.png") for n in range(300)]
    (images / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    upright, decoded = patches.upright, []
    monkeypatch.setattr(patches, "upright", lambda image: decoded.append(image) or upright(image))
    monkeypatch.setattr(fetch, "KEPT_IMAGE_BYTES", 0)
    reader = reader_of(Data(sources=(Source(path=str(images / "rows.jsonl")),)), plain, rule, 0)
    count_steps(reader, Budget(90, 80), 1, 1)
    assert decoded == []
    [batch] = next(training_steps(reader, Budget(90, 80), 1, 1)).batches
    assert len(decoded) == batch.counts.documents > 1


def test_changed_image_sizes_are_noticed_on_resume(images: Path, plain: Encoder, draw: Callable[..., Path]) -> None:
    """Even where the same rows would still be packed together; and never by a pack that is too full."""
    rule = ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Area(64, 4096))
    rows = [row(f"question {n}", f"{n % 4}.png") for n in range(60)]
    (images / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows))

    def steps(state: Any = None) -> Any:
        return training_steps(
            reader_of(Data(sources=(Source(path=str(images / "rows.jsonl")),)), plain, rule, 0), Budget(90, 80), 1, 2, state
        )

    states = [step.state for step in steps()]
    assert any(state["digest"] is None and state["bins"] for state in states)  # where a window begins
    for n, (width, height) in enumerate([(20, 12), (20, 36), (36, 12), (52, 44)]):
        draw(f"set/{n}.png", seed=n, width=width, height=height)
    for state in states[:-1]:
        if state["digest"] is not None:
            with pytest.raises((Refused, StorageFailed), match=r"no longer those that were planned|have grown"):
                next(steps(state))
        else:
            with suppress(StorageFailed):
                list(steps(state))


def test_changing_images_stop_the_run_and_overfill_no_pack(images: Path, plain: Encoder, draw, monkeypatch) -> None:
    """An index that was evicted is made again, and knows other sizes than the plan."""
    for module in (index, sizing):
        monkeypatch.setattr(module, "KEPT_OPEN", 1)
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 600)
    monkeypatch.setattr(fetch, "KEPT_IMAGE_BYTES", 0)
    rule = ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Area(64, 4096))
    rows = [row(f"question {n}", f"{n % 4}.png") for n in range(60)]
    (images / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    for width, height in ((52, 44), (20, 12)):
        for n in range(4):
            draw(f"set/{n}.png", seed=n, width=36, height=20)
        steps = training_steps(reader_of(Data(sources=(Source(path=str(images / "rows.jsonl")),)), plain, rule, 0), Budget(90, 80), 1, 1)
        while next(steps).state["number"] < 3:
            pass
        for n in range(4):
            draw(f"set/{n}.png", seed=n, width=width, height=height)
        with pytest.raises(StorageFailed, match=r"rows\.jsonl: images of its rows have changed|have grown"):
            list(steps)


def test_the_rate_at_the_end_of_an_epoch_is_of_all_of_it(images: Path, plain: Encoder, rule: ImageRule) -> None:
    """Even where its packs wait for a step that is larger than an epoch: one bad row in thirty is not more than 5 %."""
    rows = [ANY["missing"](0), *(row(f"question {n}", "0.png") for n in range(29))]
    (images / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    for seed in range(4):
        data = Data(sources=(Source(path=str(images / "rows.jsonl")),), max_reject_rate=0.05)
        whole = list(training_steps(reader_of(data, plain, rule, seed), Budget(90, 80), 64, 3))
        assert whole[-1].state["rejects"] == {"seen": 30, "counts": {"missing_image": 1}}
        reader = reader_of(data, plain, rule, seed)
        assert list(training_steps(reader, Budget(90, 80), 64, 3, whole[-1].state)) == []
        assert reader.rejects.state() == whole[-1].state["rejects"]  # the end is not counted twice
