"""The arithmetic of benchmarks by hand, and that both sides of each case do the same work. No time is asserted."""

import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import bench
from bench import attention, checkpoint, head, model, packed, peer, render, start, step
from bench.measure import Comparison, Fact, Result, Stopwatch, Timed, interleaved, peak_bytes, read_result, write_result
from bench.work import Sized, documents, made
from eyeline.core.errors import Refused
from eyeline.data.fetch.batches import batch_of
from eyeline.models.decoder import Head

SMALL = Sized(image=16, width=32, layers=2, vocabulary=300)


def timed(*cpu_s: float) -> tuple[Timed, ...]:
    return tuple(Timed(cpu_s=s, wall_s=2 * s) for s in cpu_s)


def comparison(judged: str = "time", limit: float | None = 0.95, ours: tuple[float, ...] = (1, 2, 3, 4, 8)) -> Comparison:
    times = {"ours": timed(*ours), "peer": timed(4, 4, 4, 4, 4)}
    return Comparison(name="a thing", unit="real tokens", amount=600, limit=limit, judged=judged, **times)  # type: ignore[arg-type]


def result(**changed: object) -> Result:
    fields: dict[str, object] = {
        "case": "made-up", "command": "python -m bench made-up", "work": "Nothing.", "agreement": "equal", "comparisons": (comparison(),),
        "facts": (Fact(name="padding", value=0.0123, limit="≤ 0.03", met=True),), "load": (0.2, 1.1), "when": "2026-01-01T00:00+00:00",
        "environment": {"eyeline": "0.1", "packages": {"torch": "2.13"}, "threads": 1},
    }  # fmt: skip
    return Result(**(fields | changed))  # type: ignore[arg-type]


def test_ratios_are_medians_of_pairs() -> None:
    """Pairs 1/4, 2/4, 3/4, 4/4, 8/4: the median is 0.75, and for a rate that of 4, 2, 4/3, 1, 1/2."""
    times = comparison().ratio("cpu_s")
    assert (times.median, times.low, times.high) == (0.75, 0.25, 2.0)
    assert comparison().met
    assert not comparison(ours=(4, 4, 4, 1, 1)).met
    rates = comparison("rate", 1.3).ratio("wall_s")
    assert (rates.median, rates.low, rates.high) == (4 / 3, 0.5, 4.0)
    assert comparison("rate", 1.3).met
    assert not comparison("rate", 2.0).met
    assert comparison(limit=None).met is None


def test_sides_take_turns_and_the_first_round_is_thrown_away() -> None:
    calls: list[str] = []

    def side(name: str) -> Timed:
        calls.append(name)
        return Timed(cpu_s=len(calls), wall_s=0)

    made_of = interleaved({"a": lambda: side("a"), "b": lambda: side("b")}, 3, "made-up")
    assert calls == ["a", "b"] * 4
    assert [t.cpu_s for t in made_of["a"]] == [3, 5, 7]
    assert [t.cpu_s for t in made_of["b"]] == [4, 6, 8]


def test_a_stopwatch_tells_work_from_waiting() -> None:
    watch = Stopwatch()
    time.sleep(0.2)
    waited = watch.read()
    assert waited.wall_s >= 0.2
    assert waited.cpu_s < 0.1


def test_results_survive_a_file_and_strangers_are_refused(tmp_path: Path) -> None:
    path = write_result(tmp_path / "results", result())
    assert path.name == "made-up.json"
    assert read_result(path) == result()
    path.write_text('{"version": 2}')
    with pytest.raises(Refused, match="not a benchmark result of version 1"):
        read_result(path)


def test_the_page_says_every_figure_with_its_warnings(tmp_path: Path) -> None:
    write_result(tmp_path, result())
    render.write_page(tmp_path, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| made-up | a thing | 0.75 (0.25–2.00) | 0.75 (0.25–2.00) | ≤ 0.95 | yes |" in page
    assert "| a thing | ours | 1.00  2.00  3.00  4.00  8.00 | 2.00  4.00  6.00  8.00  16.00 | 200 real tokens |" in page
    assert "| padding | 0.0123 | ≤ 0.03 | yes |" in page
    assert "Eyeline 0.1" in page
    assert "torch 2.13" in page
    assert "trial" not in page
    assert "busy" not in page
    few = comparison().model_copy(update={"ours": timed(1), "peer": timed(4)})
    page = render.render([result(comparisons=(few,), load=(0.1, 1.6))])
    assert "A trial: fewer than 5 pairs" in page
    assert "busy with something else" in page
    slow = render.render([result(comparisons=(comparison(ours=(4, 4, 4, 4, 4)), comparison("rate", None)))])
    assert "| 1.00 (1.00–1.00) | 1.00 (1.00–1.00) | ≤ 0.95 | **no** |" in slow
    assert "| 1.33 (0.50–4.00) × the rate | 1.33 (0.50–4.00) × the rate |  |  |" in slow
    with pytest.raises(Refused, match="no results"):
        render.write_page(tmp_path / "absent", tmp_path / "page.md")


def test_both_sides_compute_the_same_loss_and_gradients(tmp_path: Path) -> None:
    """On samples of several lengths, ours packed and the peer's padded: the loss of the batch and some gradients of each part."""
    peer.quiet()
    bundle, model = made(SMALL, tmp_path / "model")
    docs = documents(SMALL, bundle.encoder().image_token, [9, 30, 17])
    hf_model = peer.load(tmp_path / "model")
    batch = batch_of(docs, None)
    loss = model(batch).out / batch.counts.supervised
    theirs = hf_model(**peer.collate([peer.example(d, SMALL) for d in docs])).loss
    assert abs(loss.item() - theirs.item()) < 1e-5
    loss.backward()
    theirs.backward()
    inner = hf_model.model
    pairs = (
        (model.projector.down.weight, inner.multi_modal_projector.linear_2.weight),
        (model.language.embed.weight, inner.language_model.embed_tokens.weight),
        (model.vision.positions.weight, inner.vision_tower.embeddings.position_embedding.weight),
    )
    for mine, other in pairs:
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_the_samples_are_what_the_cases_say(tmp_path: Path) -> None:
    bundle, _ = made(SMALL, tmp_path / "model")
    [one] = documents(SMALL, bundle.encoder().image_token, [24])
    assert (len(one.tokens_T), len(one.visual_M), int((one.labels_T >= 0).sum())) == (24, 4, 10)  # half of the 20 tokens of text
    assert one.labels_T[13:23].tolist() == one.tokens_T[14:].tolist()
    drawn = sorted(packed.lengths())
    assert len(drawn) == 2000
    assert abs(drawn[1000] - 180) < 15
    assert abs(drawn[1900] - 1000) < 100
    assert (drawn[0], drawn[-1]) == (32, 2048)
    assert packed.BUDGET.tokens >= 2048


def test_cases_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny sizes and one pair: they check their own agreement, write their results, and make the page of a checkout."""
    for module, changes in ((step, {"SIZED": SMALL, "TOKENS": 12, "STEPS": 2}), (packed, {"SIZED": SMALL, "LONGEST": 64})):
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(bench.CASES, "packed", lambda pairs: packed.run(pairs, samples=12))
    (tmp_path / "docs").mkdir()
    out = tmp_path / "bench" / "results"
    bench.run_cases(["step", "packed"], out, pairs=1)
    results = {path.stem: read_result(path) for path in out.iterdir()}
    assert sorted(results) == ["packed", "step"]
    assert sum(packed.lengths(12)) == results["packed"].comparisons[0].amount
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "| packed | against padding |" in page
    assert "| step | a step |" in page
    assert "A trial" in page
    with pytest.raises(Refused, match=r"no benchmark 'stpe'.*'step'"):
        bench.run_cases(["stpe"], out)


def test_the_recipe_of_start_is_one_that_eyeline_takes(tmp_path: Path) -> None:
    recipe = start.prepare(tmp_path)
    assert start.ended(["-m", "eyeline", "check", str(recipe)]).wall_s > 0  # refused if it ends with any other code than 0


def test_a_difference_between_the_sides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "SIZED", SMALL)
    monkeypatch.setattr(step, "TOKENS", 12)
    monkeypatch.setattr(step, "STEPS", 1)
    monkeypatch.setattr(step, "TOLERANCE", -1.0)
    with pytest.raises(Refused, match="do not do the same work"):
        step.run(1)


def test_processes_are_timed_until_ready_and_then_ended(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    busy = f"import time, pathlib\nwhile time.process_time() < 0.3: pass\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(60)"
    begin = time.monotonic()
    took = start.until(["-c", busy], mark.exists, tmp_path)
    assert time.monotonic() - begin < 30
    assert took.cpu_s >= 0.25
    assert took.wall_s >= 0.25
    with pytest.raises(Refused, match="no reason"):
        start.until(["-c", "import sys; sys.exit('no reason')"], lambda: False, tmp_path)
    assert start.ended(["-c", busy.removesuffix("\ntime.sleep(60)")]).cpu_s >= 0.25
    with pytest.raises(Refused, match="ended with code 3"):
        start.ended(["-c", "raise SystemExit(3)"])


def test_help_does_not_import_torch() -> None:
    assert start.imports_torch(["-c", "import torch"])
    assert not start.imports_torch(["-m", "eyeline", "--help"])


@pytest.mark.slow
def test_start_reaches_the_first_step_on_both_sides() -> None:
    result = start.run(1)
    assert {f.name: f.met for f in result.facts}["eyeline --help imports torch"]


def test_head_and_attention_do_the_same_work_on_both_sides() -> None:
    """The ratios mean nothing here: small shapes. That the sides agree is checked by the cases themselves, and refused if not."""
    made_of = head.run(pairs=1, rows=64, vocabulary=512)
    assert [c.name for c in made_of.comparisons] == ["25% of the rows labelled", "100% of the rows labelled"]
    made_of = attention.run(pairs=1, lengths=(24, 8, 5, 1))
    assert {c.name: c.amount for c in made_of.comparisons} == dict.fromkeys(["against padded", "against block mask"], 4 * 38.0)


def test_checkpoint_gives_back_the_same_on_all_sides(tmp_path: Path) -> None:
    found = checkpoint.run(1, mib=1)
    assert [one.name for one in found.comparisons] == [
        "against safetensors",
        "against safetensors, read again for a digest",
        "against torch.save",
    ]
    assert all(one.met is None for one in found.comparisons)
    tensors = checkpoint.weights(1)
    assert sum(x.nbytes for x in tensors.values()) == 1 << 20
    for once in checkpoint.sides_in(tmp_path, tensors).values():
        once()
    for again in checkpoint.read_back(tmp_path):
        assert again.keys() == tensors.keys() and all(torch.equal(again[name], x) for name, x in tensors.items())


def test_sides_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "summed_cross_entropy", lambda x, w, labels: F.cross_entropy(x @ w.T, labels, reduction="sum") * 1.001)
    with pytest.raises(Refused, match="differ by"):
        head.run(pairs=1, rows=64, vocabulary=512)
    monkeypatch.setattr(attention, "packed_attention", lambda q, k, v, cu, longest, causal: q + (k.sum() + v.sum()) * 0.001)
    with pytest.raises(Refused, match="differ by"):
        attention.run(pairs=1, lengths=(24, 8))


def test_peak_memory_is_what_was_held_at_once() -> None:
    """64 MiB held at once, then given back; two of 32 one after the other are 32."""
    megabyte = 1 << 20
    at_once = peak_bytes(lambda: bytearray(64 * megabyte))
    in_turn = peak_bytes(lambda: [len(bytearray(32 * megabyte)) for _ in range(2)])
    assert 60 * megabyte < at_once < 80 * megabyte
    assert 28 * megabyte < in_turn < 48 * megabyte


@pytest.mark.slow  # seconds each; a benchmark itself refuses sides that differ
@pytest.mark.parametrize("name", list(model.CONFIGS))
def test_families_do_the_same_work_as_their_references(name: str) -> None:
    """Loss and gradients of both sides, one document at a time and mixed: checked by the case itself, and refused if they differ."""
    made_of = model.run(pairs=1, names=[name], alone=1, mixed=2)
    assert [c.limit for c in made_of.comparisons] == [1.0, None]


def test_family_that_differs_from_its_reference_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Head.forward
    monkeypatch.setattr(Head, "forward", lambda *args: forward(*args) * (1 + 1e-4))
    with pytest.raises(Refused, match="losses differ by"):
        model.run(pairs=1, names=["text, llama"], alone=1, mixed=1)
