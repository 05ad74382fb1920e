"""`eyeline data`: the terminal and the page say the same, the figures are the model's own, and nothing in data is anything but text."""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from rich.console import Console

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.log import visible
from eyeline.core.randomness import seed_for
from eyeline.data.reader import Reader, reader_of
from eyeline.data.rejects import CAUSES
from eyeline.data.report import budgets
from eyeline.data.report.budgets import Load
from eyeline.data.report.budgets import packing as packing_of
from eyeline.data.report.preview import sample_previews
from eyeline.data.report.report import QUICK, THOROUGH, Depth, data_report
from eyeline.models import spec
from eyeline.models.flops import NONE, count
from eyeline.recipes.check import look, print_blocks
from eyeline.study.data_page import LARGEST_PAGE, Grid, Heading, Histogram, Line, StageData, blocks, data_page, flops_of, suggestion
from eyeline.study.page import table
from eyeline.train.run import Batching, Run
from eyeline.train.start import description
from eyeline.train.trainable import plan_of
from tests.command import Command
from tests.data.later_batches import batches_of
from tests.train.recipe import tiny_recipe, tiny_run

VOID = {"meta", "img"}
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "div", "table", "tr", "th", "td"),
    *("figure", "figcaption", "img", "b", "i"),
}
ATTRIBUTES = {"lang", "charset", "name", "content", "http-equiv", "class", "src", "alt", "data-label"}


class Page(HTMLParser):
    """What a browser would make of the page; a tag or attribute that it may not have is an error."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.images: list[str] = []
        self.rows: list[list[str]] = []
        self.learned = ""
        self.policy = ""
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS, tag
        assert {name for name, _ in attrs} <= ATTRIBUTES, attrs
        known = dict(attrs)
        if tag == "img":
            self.images.append(known["src"] or "")
        if "http-equiv" in known:
            self.policy = known["content"] or ""
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            assert not re.search(r"url\(|@import|expression", data)
            return
        self.text.append(data)
        if "td" in self.open:
            self.rows[-1][-1] += data
        if "b" in self.open:
            self.learned += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data}")


def page_of(path: Path) -> Page:
    """The page, as far as every page is inert."""
    text = path.read_text("utf-8")
    assert path.stat().st_size <= LARGEST_PAGE
    assert text.startswith('<!doctype html>\n<html lang="en"><head>')
    assert all(c.isprintable() or c == "\n" for c in text)
    found = Page(text.removeprefix("<!doctype html>"))
    assert found.policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert all(re.fullmatch(r"data:image/(svg\+xml|jpeg);base64,[A-Za-z0-9+/=]+", src) for src in found.images)
    return found


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=1000, highlight=False), out


def looked(run: Run, folder: Path, depth: Depth = THOROUGH) -> tuple[Page, str]:
    made, out = console()
    return page_of(look(run, folder / "data.html", 6, depth, made)), out.getvalue()


def stage_data(run: Run, index: int = 0, depth: Depth = THOROUGH) -> tuple[StageData, Reader]:
    bundle = description(run)
    stage, stated = run.stages[index], spec(bundle.config)
    reader = reader_of(stage.data, bundle.encoder(), stated.image, seed_for(run.seed, "stage", index))
    report = data_report(reader, stage.batch.budget, depth)
    arithmetic = count(plan_of(run, index, bundle.config).model, stated.image)
    flops = tuple(flops_of(packing, arithmetic, stated.image) for packing in report.budgets)
    return StageData(stage.name, stage.batch, report, tuple(sample_previews(reader, stage.batch.budget, 3, thumbnails=True)), flops), reader


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "ROWS", (200, 400))
    monkeypatch.setattr(budgets, "WINDOWS", 4)


@pytest.fixture
def mixed(tmp_path: Path) -> Run:
    """The tiny recipe on data of which something is wrong, odd, or there twice."""
    run = tiny_run(tmp_path, "stages.0.data.max_reject_rate=0.5", "stages.1.data.max_reject_rate=0.5")
    rows = json.loads((tmp_path / "data" / "data.json").read_text())
    rows[0]["conversations"][-1]["value"] = ""
    rows[1]["image"] = "pictures/none.png"
    rows[2]["conversations"][0]["value"] = "<image> <|endoftext|>"
    rows += [rows[3], rows[5]]
    (tmp_path / "data" / "data.json").write_text(json.dumps(rows))
    return run


def cells(found: Iterator[Any]) -> list[list[str]]:
    return [[visible(cell) for cell in row] for block in found if isinstance(block, Grid) for row in block.rows]


def test_terminal_and_page_say_the_same(mixed: Run, tmp_path: Path) -> None:
    found, _ = stage_data(mixed)
    made, out = console()
    print_blocks(made, blocks(found))
    (tmp_path / "page.html").write_text(data_page("mixed", [found], []))
    page = page_of(tmp_path / "page.html")
    assert [row for row in page.rows if row] == cells(blocks(found))
    said = [block for block in blocks(found) if isinstance(block, Line)]
    assert len(said) > 8
    for line in said:
        assert visible(line.text) in page.text
        assert visible(line.text) in out.getvalue()
    terminal = [[cell.strip() for cell in row.strip("│").split("│")] for row in out.getvalue().splitlines() if row.startswith("│")]
    grids = [block for block in blocks(found) if isinstance(block, Grid)]
    assert terminal == [list(row) for grid in grids if grid.line is None for row in grid.rows]
    lines = [grid.line.format(*row) for grid in grids if grid.line for row in grid.rows]
    assert [line for line in lines if visible(line) not in out.getvalue()] == []
    assert len(lines) > 5
    assert sum(isinstance(block, Histogram) for block in blocks(found)) + sum(len(s.thumbnails) for s in found.samples) == len(page.images)
    assert page.learned == "".join(p.text for s in found.samples for p in s.pieces if p.trained)


def test_the_words_of_what_was_found_by_hand(mixed: Run, tmp_path: Path) -> None:
    whole = tuple(stage.model_copy(update={"data": stage.data.model_copy(update={"validation_fraction": 0.0})}) for stage in mixed.stages)
    page, out = looked(mixed.model_copy(update={"stages": whole}), tmp_path)
    text = "\n".join(page.text)
    for said in (out, text):
        assert "samples whose text spells a control token (trained on as text): 1" in said
        assert CAUSES["no_target"] in said and CAUSES["missing_image"] in said
        assert "Its data and its batches are those of stage whole." in said
    assert ["no_target", "1", "3.8%"] in [row[:3] for row in page.rows]
    assert [row[2] for row in page.rows if row and row[0] == "missing_image" and len(row) == 5][1:] == ["1"]
    assert text.count("rejected") == 1, "what two stages share is said once"
    assert "evaluation overlap with training: 4 of 5 samples" in text  # the first 6 rows, one without its image, one without an answer


@pytest.mark.parametrize("index", [0, 1])
def test_arithmetic_is_that_of_the_batches_that_training_gets(tmp_path: Path, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path, f"stages.{index}.data.max_reject_rate=1")
    found, reader = stage_data(run, index)
    bundle = description(run)
    stated = spec(bundle.config)
    arithmetic = count(plan_of(run, index, bundle.config).model, stated.image)
    assert len(found.flops) == len(found.report.budgets) > 1
    monkeypatch.setattr(budgets, "WINDOWS", 60)
    monkeypatch.setattr(budgets, "ROWS", (900, 900))
    texts = packing_of(reader, frozenset({(0, 0)}), Budget(20, 0))  # no image fits: no gradient comes from the tower
    assert texts is not None and texts.settled and not texts.with_images.packs
    of_texts = flops_of(texts, arithmetic, stated.image)
    both = replace(texts, with_images=found.report.budgets[0].with_images)
    assert flops_of(both, arithmetic, stated.image) == of_texts + flops_of(replace(both, texts=Load()), arithmetic, stated.image)
    for packing, flops in zip((*found.report.budgets, texts), (*found.flops, of_texts), strict=True):
        if packing.settled:
            batches = batches_of(reader, packing.budget, packing.load.packs)
            wanted = sum((arithmetic.of(batch) for batch in batches), NONE)
            for part in ("language", "head"):
                assert flops.by_part[part] == wanted.by_part[part] > 0
            for part in ("vision", "projector"):  # an image that two rows of a batch share is planned twice, and encoded once
                assert 0.7 * flops.by_part[part] <= wanted.by_part[part] <= flops.by_part[part]
            if packing.budget == run.stages[index].batch.budget:
                assert flops.by_part == wanted.by_part
    grid = next(block for block in blocks(found) if isinstance(block, Grid) and block.head[0] == "FLOPs per batch")
    assert len(grid.rows) == len(found.flops)


EVIL = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "]]><svg onload=alert(1)><![CDATA[",
    "</style><style>*{background:url(http://evil.example/)}</style>",
    "<!-- --><?php ?><iframe src='https://evil.example'>",
    "\x00\x1b[31m\x9b\u202e\u2066txt.exe\u2028\u00ad\ufeff",
    "&lt;b&gt;&#60;script&#62;",
    "{0} {1.__class__} {cell} %s [bold]x[/bold]",
    "<base href='http://evil.example'><form><input autofocus onfocus=alert(1)>",
)


def evil_recipe(folder: Path) -> Path:
    """A recipe whose data, names, kinds and layouts are hostile."""
    rng = np.random.default_rng(0)
    data = folder / "<img src=x onerror=alert(1)>.jsonl"
    rows: list[dict[str, Any]] = []
    for n, evil in enumerate(EVIL):
        name = f"{n} <svg onload=x> \u202e & '.png"
        Image.fromarray(rng.integers(0, 256, (30 + n, 40 * (n + 1), 3), dtype=np.uint8)).save(folder / name)
        asked = {"from": "human", "value": "<image>" + evil}
        rows.append({"id": evil, "image": name, "kind": evil, "conversations": [asked, {"from": "gpt", "value": evil}]})
        rows.append({"image": evil, "kind": evil, "conversations": [asked, {"from": "gpt", "value": evil}]})
        rows.append({"kind": evil, "conversations": [{"from": evil, "value": evil}]})
    rows.append(rows[0])
    huge = "<b>" * 350_000
    rows.append({"kind": huge, "conversations": [{"from": "human", "value": huge}, {"from": "gpt", "value": "x"}]})
    rows.append({"image": huge, "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "x"}]})
    data.write_text("\n".join(json.dumps(row) for row in rows))
    recipe = tiny_recipe(folder)
    recipe["model"]["config"]["language"]["max_positions"] = 4_000_000
    stage = recipe["stages"][0] | {"data": {"sources": [{"path": str(data)}], "max_reject_rate": 1.0, "validation": [{"path": str(data)}]}}
    stage["batch"] = {"max_tokens": 4_000_000, "max_patches": 200}
    (folder / "evil.yaml").write_text(
        yaml.safe_dump(recipe | {"stages": [stage], "evaluation": {"sources": [{"path": str(data)}], "max_new_tokens": 2}})
    )
    return folder / "evil.yaml"


def test_a_page_made_from_hostile_data_is_inert(eyeline: Command, tmp_path: Path) -> None:
    recipe = evil_recipe(tmp_path)
    out = tmp_path / "page <script>.html"
    done = eyeline("data", str(recipe), "--out", str(out), "--samples", "40")
    assert (done.code, done.err) == (0, "")
    assert all(c.isprintable() or c == "\n" for c in done.out)
    page = page_of(out)
    shown = "\n".join(page.text)
    for evil in EVIL:
        assert shown.count(visible(evil)) >= 2, evil  # as a kind, in messages, or in samples
    assert "[bold]x[/bold]" in done.out
    assert out.stat().st_size < 1 << 20


def test_a_page_stays_small_whatever_the_data(mixed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is left out whole: samples and plots first, since they are largest."""
    found, _ = stage_data(mixed)
    from eyeline.study import data_page as module

    whole = data_page("mixed", [found] * 3, [])
    monkeypatch.setattr(module, "LARGEST_PAGE", 60_000)
    less = data_page("mixed", [found] * 3, [])
    assert len(less.encode()) <= 60_000 < len(whole.encode())
    Page(less.removeprefix("<!doctype html>"))
    assert "FLOPs per batch" in less
    assert "pieces are left out, since the page would be over 60,000 bytes" in less
    assert "pieces are left out" not in "".join(Page(whole.removeprefix("<!doctype html>")).text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "nowhere/page.html"], "nowhere, the folder of the page, does not exist"),
        (["--out", "."], "is a folder"),
        (["model.template=chatml"], "template 'chatml' is not known"),
        (["stages.0.data.sources.0.path=nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_unusable_arguments_are_refused(eyeline: Command, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    done = eyeline("data", "tiny.yaml", *arguments)
    assert (done.code, words in done.err) == (2, True), done.err
    assert not list(tmp_path.glob("*.html"))


def test_problems_are_on_the_page_and_are_no_reason_to_end(eyeline: Command, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    done = eyeline("data", "tiny.yaml", "stages.0.batch.max_patches=15", "--samples", "0")
    assert done.code == 0
    assert "batch.max_patches=15 cannot hold one image" in done.out
    assert done.out.endswith("page: data.html\n")
    assert "batch.max_patches=15 cannot hold one image" in " ".join(page_of(tmp_path / "data.html").text)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_look_leaves_no_page(mixed: Run, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        look(mixed.model_copy(update={"evaluation": None, "name": "x"}), tmp_path / "none" / "x.html", 1, THOROUGH, console()[0])
    assert not (tmp_path / "none").exists()


def test_the_suggestion_keeps_the_size_of_a_step(mixed: Run) -> None:
    """What is learned from, not what it is laid into: of a budget that is half padding, half as many slots do."""
    found, _ = stage_data(mixed)
    now, best = found.report.budgets[:2]
    tokens = best.budget.tokens
    many = replace(now, with_images=Load(packs=10, token=4_000), texts=Load())
    few = replace(best, with_images=Load(packs=10, token=1_000), texts=Load())
    said = suggestion(few, [many, few], Batching(max_tokens=8 * tokens, max_patches=80, packs_per_step=2))
    assert f"batch: {{max_tokens: {tokens}, max_patches: {best.budget.patches}, packs_per_step: 8}}" in said
    assert suggestion(now, found.report.budgets, found.batch).startswith("suggested: the current batch")
    assert "packs_per_step: 1}" in suggestion(many, [few, many], Batching(max_tokens=1, max_patches=1))


def test_a_batch_that_is_mostly_padding_is_warned_of(mixed: Run) -> None:
    """Shown by check, too, which tries no other budget; not where too few packs were closed to say."""
    wide = mixed.stages[0].model_copy(update={"batch": Batching(max_tokens=4096, max_patches=32)})
    found, _ = stage_data(mixed.model_copy(update={"stages": (wide,)}), depth=QUICK)
    (now,) = found.report.budgets
    lines = [block for block in blocks(found) if isinstance(block, Line)]
    said = [line.text for line in lines if line.warns]
    assert said == [
        f"{now.waste * 100:.1f}% of batch.max_tokens is padding: batch.max_patches fills up long before. `eyeline data` tries other sizes"
    ]
    assert not any("suggested" in line.text for line in lines)
    for other in (replace(now, settled=False), replace(now, budget=Budget(now.load.token // now.load.packs + 1, 32))):
        calm = replace(found, report=replace(found.report, budgets=(other,)))
        assert not any(isinstance(block, Line) and block.warns for block in blocks(calm))


def test_numbers_that_follow_from_a_part_are_about(mixed: Run) -> None:
    found, _ = stage_data(mixed)
    source = found.report.sources[0]
    for exact, about in ((True, ""), (False, "about ")):
        made, out = console()
        print_blocks(made, blocks(replace(found, report=replace(found.report, exact=exact))))
        said = out.getvalue()
        assert f"), {about}{source.rows} samples, {source.validation} of them held out for validation, once per epoch\n" in said
        assert f"\n{about}{found.report.training} training samples" in said


def test_headings_of_parts_are_for_the_page(mixed: Run) -> None:
    found, _ = stage_data(mixed)
    made, out = console()
    print_blocks(made, iter([Heading("stage x"), Heading("Sizes", part=True)]))
    assert "stage x" in out.getvalue() and "Sizes" not in out.getvalue()
    assert [b.text for b in blocks(found) if isinstance(b, Heading)][:2] == ["stage whole", "Sources"]


def test_a_table_too_wide_for_a_phone_becomes_a_list_there() -> None:
    """Its numbers and longest words set the width and stay whole; a long path may break anywhere."""
    small = table(("", "min", "max"), [("tokens per sample", "1", "23")], numbers=1)
    wide = table(("source", "a", "b", "c"), [("x", "1,000,000,000,000", "1,000,000,000,000", "1,000,000,000,000")], numbers=1)
    assert 'class="stacked"' not in small and "data-label" not in small
    assert 'class="stacked"' in wide and '<td class="n" data-label="a">1,000,000,000,000</td>' in wide
    path = "/data/" + "x" * 40
    assert f'<td class="w">{path}</td>' in table(("source", "kind"), [(path, "red")])
