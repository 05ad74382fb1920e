"""The documents are true: their commands run, the files they name exist, and they leave no setting or figure out."""

import html
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from PIL import Image

from eyeline.core.files import read_lines
from eyeline.recipes.read import shipped_recipes
from eyeline.train.run import MAY_CHANGE
from tests.bundle.tiny import save_language, save_vision
from tests.command import Command
from tests.documented import ROOT, blocks, exports_as_documented
from tests.forked import Forked
from tests.hub import HUB, resize, write_mine
from tests.llava_pretrain import write_llava_pretrain
from tests.settings import LEAVES

DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
README = (ROOT / "README.md").read_text()


def in_process(eyeline: Command) -> Callable[[str, Path], str]:
    """Runs a line as `bash` does, without a process of its own."""

    def run(line: str, folder: Path) -> str:
        if line == "source .venv/bin/activate":
            return ""
        line, _, target = line.partition(" > ")
        program, *words = shlex.split(line)
        assert program == "eyeline", line
        done = eyeline(*words)
        assert done.code == 0, f"{line}\n{done.out}\n{done.err}"
        if target:
            (folder / target).write_text(done.out)
        return done.out

    return run


def follow(
    block: str, folder: Path, run: Callable[[str, Path], str], edit: Callable[[], None] | None = None, more: Mapping[str, str] | None = None
) -> str:
    """Run a document's block line by line; where it has a comment, `edit` obeys it. `more` is appended to lines of a command.
    Returns what the lines printed."""
    out = ""
    for line in block.strip().splitlines():
        if line.startswith("#"):
            if edit is not None:
                edit()
            edit = None
            continue
        line = line.partition("  #")[0].rstrip()
        for command, words in (more or {}).items():
            if line.startswith(f"eyeline {command}"):
                given = {word.partition("=")[0] for word in words.split() if "=" in word}  # no setting is given twice
                line = " ".join([*(word for word in line.split(" ") if word.partition("=")[0] not in given), words])
        out += run(line, folder)
        if line.startswith("eyeline import"):
            for preprocessor in (folder / "models").glob("*/preprocessor_config.json"):
                resize(preprocessor)
    return out


FEW_TOKENS = "stages.tune.batch.max_tokens=512 stages.tune.batch.max_patches=1024"  # a pack is padded to its budget


def block_of(document: str, words: str) -> str:
    [block] = [block for block in blocks((ROOT / document).read_text()) if words in block]
    return block


def rename_path(folder: Path) -> None:
    """What the comment of `my-data` asks for: the path, and nothing else."""
    recipe = (folder / "mine.yaml").read_text()
    (folder / "mine.yaml").write_text(recipe.replace("path: my-data.json", "path: mine.json"))


def test_own_data_works_as_the_readme_says(eyeline: Command, tmp_path: Path) -> None:
    HUB["Qwen/Qwen3-VL-2B-Instruct"](tmp_path / "Qwen/Qwen3-VL-2B-Instruct")
    write_mine(tmp_path)
    run = in_process(eyeline)
    small = {"check": FEW_TOKENS, "train": FEW_TOKENS}
    out = follow(block_of("README.md", "eyeline import"), tmp_path, run, lambda: rename_path(tmp_path), small)
    assert "my-data: no problems" in out
    (tmp_path / "photo.jpg").write_bytes((tmp_path / "images/1.png").read_bytes())
    [chat] = re.findall(r"`(eyeline chat runs/my-data[^`]*)`", README)
    [export] = re.findall(r"`(eyeline export runs/my-data[^`]*)`", README)
    run(f"{chat} --ask hello --max-new-tokens 4", tmp_path)
    run(export, tmp_path)
    assert (tmp_path / "exported" / "config.json").exists()


def test_guide_to_own_data_works_on_its_example(eyeline: Command, tmp_path: Path) -> None:
    """The rows of the page, with enough of them that a tenth can be held out."""
    HUB["Qwen/Qwen3-VL-2B-Instruct"](tmp_path / "Qwen/Qwen3-VL-2B-Instruct")
    page = ROOT / "docs/guides/own-data.md"
    [example] = re.findall(r"^```json mine.json\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "images").mkdir()
    rows = []
    for n in range(60):
        row = json.loads(example)[n % 2]
        rows.append(row | {"image": f"images/{n}.jpg"})
        Image.new("RGB", (20 + n % 20, 30), (4 * n, 90, 90)).save(tmp_path / rows[-1]["image"])
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    block = block_of("docs/guides/own-data.md", "eyeline import")
    small = dict.fromkeys(("check", "data", "train"), FEW_TOKENS)
    out = follow(block, tmp_path, in_process(eyeline), lambda: rename_path(tmp_path), small)
    assert "my-data: no problems" in out
    assert (tmp_path / "data.html").exists()
    assert (tmp_path / "runs/my-data/report.html").exists()


def test_guide_to_qwen3_vl_works(eyeline: Command, tmp_path: Path) -> None:
    HUB["Qwen/Qwen3-VL-2B-Instruct"](tmp_path / "Qwen/Qwen3-VL-2B-Instruct")
    write_mine(tmp_path)
    guide, run = "docs/guides/fine-tune-qwen3-vl.md", in_process(eyeline)
    small = f"stages.tune.data.validation_fraction=0.2 device=cpu {FEW_TOKENS}"
    block = block_of(guide, "eyeline import")
    assert "no problems" in follow(block, tmp_path, run, more={"check": small, "train": small})
    [changed] = re.findall(r"`(stages\.tune\.trains\.projector=[^`]*)`", (ROOT / guide).read_text())
    [check] = [line for line in block.splitlines() if line.startswith("eyeline check")]
    run(f"{check} {small} out=runs/new {changed}", tmp_path)


def test_guide_to_a_vlm_from_parts_works(eyeline: Command, tmp_path: Path) -> None:
    """With tiny checkpoints in folders of the models' names, and its comment obeyed."""
    save_vision(tmp_path / "google" / "siglip2-base-patch16-224")
    save_language(tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct")
    write_llava_pretrain(tmp_path)
    rows = json.loads((tmp_path / "blip_laion_cc_sbu_558k.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps(rows[4:]))
    (tmp_path / "other.json").write_text(json.dumps(rows[:4]))

    def edit() -> None:
        recipe = yaml.safe_load((tmp_path / "mine.yaml").read_text())
        recipe["name"] = "mine"
        recipe["model"]["path"] = "models/start"
        for stage in recipe["stages"]:
            stage["data"] = {"sources": [{"path": "mine.json"}], "validation_fraction": 0.2}
            stage |= {"steps": 2, "batch": {"max_tokens": 256, "max_patches": 160}}
        recipe["evaluation"]["sources"][0]["path"] = "other.json"
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))

    out = follow(block_of("docs/guides/vlm-from-parts.md", "eyeline import"), tmp_path, in_process(eyeline), edit)
    assert "mine: no problems" in out
    assert "warning: evaluation" not in out


def test_guide_to_a_first_run_works(eyeline: Command, tmp_path: Path) -> None:
    guide = "docs/guides/first-run.md"
    limits = " ".join(f"stages.{stage}.steps=1 stages.{stage}.data.sources.0.limit=300" for stage in ("shapes", "all"))
    short = {"train": limits, "eval": "--limit 3"}
    for words in ("eyeline report", "seed=1"):
        follow(block_of(guide, words), tmp_path, in_process(eyeline), more=short)
    table = (ROOT / guide).read_text().split("then holds")[1].split("Stop a run")[0]
    listed = {name for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`([a-z.]+)/?`", cell)}
    assert "checkpoints" in listed
    assert listed - {"rejects.jsonl", "eval.json"} <= {path.name for path in (tmp_path / "runs/demo").iterdir()}


def test_memory_in_the_readme_follows_from_its_parameters() -> None:
    """2 bytes of a frozen parameter, 16 of a trained one."""
    rows = re.findall(r"\| ([\d.]+) \+ ([\d.]+) \| ([\d.]+) GB \| ([\d.]+) GB \|$", README, re.MULTILINE)
    assert len(rows) > 10
    for tower, rest, lora, full in (map(float, row) for row in rows):
        assert lora == pytest.approx(2 * (tower + rest), abs=0.051 if lora < 100 else 0.51)
        assert full == pytest.approx(2 * tower + 16 * rest, abs=0.051 if full < 100 else 0.51)


def test_speeds_in_the_readme_are_those_of_the_benchmarks() -> None:
    section = README[README.index("## How fast") : README.index("## Commands")]
    figures = set(re.findall(r"\b\d\.\d\d\b", section))
    measured = (ROOT / "docs/benchmarks.md").read_text().split("\n## ")[0]
    assert len(figures) >= 9
    assert figures <= set(re.findall(r"\b\d\.\d\d\b", measured))


def test_the_image_of_the_readme_is_what_check_shows(tmp_path: Path) -> None:
    def text(svg: Path) -> list[str]:
        return [html.unescape(piece) for piece in re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())]

    def make() -> None:
        sys.argv = ["docs/sample_image.py", str(tmp_path / "sample.svg")]
        runpy.run_path(str(ROOT / "docs/sample_image.py"), run_name="__main__")

    assert Forked(make).wait(240) == 0
    assert text(tmp_path / "sample.svg") == text(ROOT / "docs/sample.svg")
    assert "url(" not in (ROOT / "docs/sample.svg").read_text().replace("url(#", ""), "the image fetches nothing"


FIELD = [
    *("gradient accumulation", "gradient checkpointing", "mixed precision", "context length", "sequence length", "throughput", "SFT"),
    *("fine-tuning", "duplicates", "MoE", "LoRA", "flash attention", "sequence packing", "padding", "MFU", "chat template"),
]


@pytest.mark.parametrize("word", FIELD)
def test_words_of_the_field_are_found(word: str) -> None:
    text = (ROOT / "docs/words.md").read_text()
    assert word in text[text.index("## Usual words") :]


def test_exports_are_used_as_documented(eyeline: Command, tmp_path: Path) -> None:
    exports_as_documented(eyeline, tmp_path)


def test_the_two_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"^ *make ([a-z][a-z0-9-]*)|`make ([a-z][a-z0-9-]*)", document.read_text(), re.MULTILINE):
            assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), f"{document.name} names make {target}"


COMMANDS = sorted(set(re.findall(r"^\| `eyeline ([a-z]+)", README, re.MULTILINE)))


def test_every_command_is_in_the_table(eyeline: Command) -> None:
    listed = re.findall(r"^│ ([a-z]+) ", eyeline("--help").out, re.MULTILINE)
    assert sorted(listed) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_every_documented_option(command: str, eyeline: Command) -> None:
    helped = eyeline(command, "--help")
    assert helped.code == 0
    assert f"Example: eyeline {command}" in " ".join(helped.out.split())
    below = re.findall(r"^│ ([a-z]+) ", helped.out, re.MULTILINE)  # of a group
    options = "".join([helped.out, *(eyeline(command, name, "--help").out for name in below)]).replace("--no-", "--")
    for document in DOCUMENTS:
        for line in re.findall(rf"eyeline {command}\b[^`\n]*", document.read_text()):
            for option in re.findall(r"(?<!\w)--[a-z][a-z-]*", line):
                if option not in ("--help", "--debug"):
                    assert option.replace("--no-", "--") in options, f"{document.name}: eyeline {command} {option}"


def test_exit_codes_are_those_of_the_errors(eyeline: Command) -> None:
    from eyeline.core.errors import EXPECTED

    codes = {0, 1, *(error.code for error in EXPECTED)}
    for text in (README[README.index("Exit codes") :], eyeline("--help").out[eyeline("--help").out.index("Exit codes") :]):
        assert codes == {int(n) for n in re.findall(r"(?:^|[\s·│,:])(\d{1,2}) [a-z]", " ".join(text.split("\n\n")[0].split()))}


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, spaces as hyphens, other punctuation dropped."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_that_documents_name_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            there = document.parent / link if link else document
            assert there.exists(), f"{document.name} links to {link}"
            assert not anchor or anchor in anchors(there), f"{document.name} links to {link}#{anchor}"
        for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)(?:: [a-z_]+)?`", text):
            if "foo" not in path:
                assert (ROOT / path).exists() or (ROOT / "src/eyeline" / path).exists(), f"{document.name} names {path}"


def test_architecture_is_short_and_names_every_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 150  # the files that a batch crosses are a line each
    for folder in (p.name for p in (ROOT / "src/eyeline").iterdir() if p.is_dir() and p.name != "__pycache__"):
        assert f"`{folder}/`" in text, folder


def test_every_setting_is_documented() -> None:
    words = set(re.findall(r"[\w.-]+", " ".join(re.findall(r"`[^`]+`", (ROOT / "docs/recipes.md").read_text())).replace(".", " ")))
    for leaf in LEAVES:
        assert re.split(r"[.\]>*]", leaf.removesuffix(".*"))[-1] in words, f"{leaf} is not in docs/recipes.md"


def test_what_may_change_on_resume_is_documented() -> None:
    text = (ROOT / "docs/recipes.md").read_text()
    section = text[text.index("## What may change on resume") : text.index("## Settings by other names")]
    assert set(re.findall(r"`([\w.*]+)`", section)) == {name.removeprefix("stages.*.") for name in MAY_CHANGE}


def test_every_figure_is_defined(eyeline: Command, tmp_path: Path) -> None:
    """Against the lines of a real run, both ways."""
    few = [f"stages.{stage}.{what}" for stage in ("shapes", "all") for what in ("steps=1", "data.sources.0.limit=300")]
    assert eyeline("train", "easyvqa-tiny", *few, "validation_steps=1", "threads=1").code == 0
    text = (ROOT / "docs/metrics.md").read_text()
    kinds = ("A step", "A validation", "A stage", "A start", "An end")
    step, validation, stage, start, end = (text[text.index(f"## {name}\n") :].split("\n## ")[0] for name in kinds)
    lines = {line["kind"]: set(line) - {"kind"} for line in read_lines(tmp_path / "runs/easyvqa-tiny/metrics.jsonl")}
    defined = {name for row in re.findall(r"^\| (`[^|]+`) \|", step, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert defined == lines["step"]
    every = {"wall", "attempt", "elapsed_s"}
    assert lines["validation"] - every == set(re.findall(r"`(\w+)`", validation))
    inner = {"parameters", "trained", "how", "lr", "layout", "container", "samples", "held_out"}  # of a part, and of a source
    assert lines["stage"] - every - {"stage", "stage_index", "global_step"} == set(re.findall(r"`(\w+)`", stage)) - inner - {"null"}
    inside = {"flops_per_s", "name", "mfu"}  # of the peak
    assert lines["start"] - {"wall", "attempt"} == set(re.findall(r"`(\w+)`", start)) - inside
    assert lines["end"] - {"wall", "attempt"} == set(re.findall(r"`(\w+)`", end)) - {"done", "stopped"}


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_commands_in_a_recipes_head_name_it(name: str) -> None:
    head = [line for line in shipped_recipes()[name].read_text().splitlines() if line.startswith("#")]
    assert any(f"eyeline train {name}" in line for line in head)
    assert any("xpected" in line for line in head), "the head says what to expect"
