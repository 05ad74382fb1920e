"""docs/your-data.md is true: a step is trained on every example of it, and every cause of a reject is explained."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

import obstore
import pytest
import yaml
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from eyeline.data.layouts.layouts import SHAPES
from eyeline.data.rejects import CAUSES, REMEDIES
from eyeline.data.sources.sources import Source
from eyeline.evals.metric import metric_named
from tests.data.small_training import draw, trained

BUCKET = "s3://my-bucket/"
PAGE = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text()


@dataclass
class Example:
    """The blocks of one section: files by name, programs that write some, and the sources of a recipe."""

    files: dict[str, str] = field(default_factory=dict)
    programs: list[str] = field(default_factory=list)
    sources: list[dict[str, object]] = field(default_factory=list)

    def make(self, folder: Path) -> tuple[Source, ...]:
        """Write everything, with every image that is named, below a folder, and the sources that read it."""
        for source in self.sources or [{"path": name} for name in self.files]:
            for name, text in self.files.items():
                root = folder / str(source.get("images") or Path(name).parent).removeprefix(BUCKET)
                if name.endswith(".txt"):
                    draw(root / Path(name).with_suffix(".jpg").name)
                for image in re.findall(r'(?<=[",\n])[\w/-]+\.(?:jpg|png)(?=[",])', text):
                    draw(root / image)
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        names: dict[str, object] = {}  # one program continues where the last one of the section ended
        for program in self.programs:
            for image in re.findall(r'(?:Path|open)\("([\w/-]+\.(?:jpg|png))"', program):
                draw(folder / image)
            exec(compile(program, "docs/your-data.md", "exec"), names)  # the page's own text
        found = self.sources or [{"path": name} for name in self.files]
        return tuple(Source.model_validate(source) for source in found)


def examples() -> dict[str, Example]:
    found: dict[str, Example] = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        example = found.setdefault(section.splitlines()[0], Example())
        for kind, name, text in re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
            match kind:
                case "python":
                    example.programs.append(text)
                case "yaml":
                    example.sources += yaml.safe_load(text)["sources"]
                case _:
                    assert name, f"a block of {kind} has no file name"
                    example.files[name] = text
    return {title: example for title, example in found.items() if example.files or example.programs}


EXAMPLES = examples()
A_CAT = ["user: [black]What is it?", "assistant: «A cat.»"]
CAPTIONS = [
    ["user: [black]Describe the image.", "assistant: «A black cat on a wall.»"],
    ["user: [white]Describe the image.", "assistant: «A cat asleep.»"],
]
TRAINED: dict[str, list[list[str]]] = {
    "Conversations": [
        [*A_CAT, "user: What colour?", "assistant: «Black.»"],
        ["user: [black] [white] Which one sleeps?", "assistant: «The second.»"],
        ["user: Say hello.", "assistant: «Hello.»"],
    ],
    "Messages": [
        ["system: Be brief.", *A_CAT],
        ["user: [white]What colour?", "assistant: «White.»"],
        ["user: [white]Alike?[black]", "assistant: «No.»"],
        ["user: Say hello.", "assistant: «Hello.»"],
    ],
    "Turns that are left out of the loss": [["user: [black]What is it?", "assistant: A dog.", "user: Sure?", "assistant: «A cat.»"]] * 2,
    "Prompts and completions": [
        ["user: Name it.[white]", "assistant: «A cat.»"],
        ["system: Be brief.", *A_CAT],
        A_CAT,
        ["user: Say hello.", "assistant: «Hello.»"],
        ["user: Say hello.", "assistant: «Hello.»", *A_CAT],
    ],
    "Questions and answers": [
        ["user: [black]It purrs.\nWhat is it?\nA. A dog.\nB. A cat.\nAnswer with the letter of the option.", "assistant: «B»"],
        ["user: [white]What colour?\nA. black\nB. white\nAnswer with the letter of the option.", "assistant: «B»"],
        A_CAT,
        ["user: [black][white]Which one, if any, sleeps?", "assistant: «The second.»"],
        A_CAT,
        ["user: [white]What colour?", "assistant: «white»"],
    ],
    "The Cauldron and FineVision": [
        [*A_CAT, "user: What colour?", "assistant: «Black.»"],
        ["user: [black][white]Which one sleeps?", "assistant: «The second.»"],
    ],
    "Captions": [CAPTIONS[1], CAPTIONS[0], *CAPTIONS],
    "A folder of images": [*CAPTIONS, CAPTIONS[1]],
    "Parquet and datasets": [A_CAT],
    "WebDataset": [["user: [white][black]Alike?", "assistant: «No.»"], A_CAT, CAPTIONS[1]],
    "Videos": [
        ["user: <0.5 seconds>[black/white]Does it move?", "assistant: «No.»"],
        ["user: <0.2 seconds>[black] or <0.0 seconds>[white]?", "assistant: «Both.»"],
    ],
    "Where images are stored": [
        *CAPTIONS,
        ["user: [black]Describe the image.", "assistant: «A black cat.»"],
        ["user: [black]Describe the image.", "assistant: «The same cat.»"],
        ["user: What is a cat?", "assistant: «An animal.»"],
    ],
    "Other names": [A_CAT, A_CAT, ["user: [white]What colour?", "assistant: «White.»"]],
    "Code of your own": [[*A_CAT, "user: What colour?", "assistant: «Black.»"]],
    "Object stores": CAPTIONS,
    "Several sources": [CAPTIONS[1], A_CAT],
}


@pytest.mark.parametrize("title", EXAMPLES)
def test_every_example_is_trained_on(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = EXAMPLES[title].make(tmp_path)
    with stored(tmp_path, monkeypatch) if any(source.path.startswith(BUCKET) for source in sources) else nullcontext():
        assert list(trained(*sources).values()) == TRAINED[title]


def test_the_example_of_a_metric_gives_scores(tmp_path: Path) -> None:
    (tmp_path / "my_metric.py").write_text(EXAMPLES["Code of your own"].files["my_metric.py"])
    metric = metric_named(f"{tmp_path}/my_metric.py:score")
    people = {"answers": ["Black", "black", "grey", "dark"]}
    assert [metric.score(said, "black", lambda: people) for said in ("black.", "grey", "red")] == [2 / 3, 1 / 3, 0]
    assert metric.score("Black", "black", dict) == 1 / 3


@contextmanager
def stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files of a folder as objects of BUCKET, on a server of this machine, and nowhere else."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {"ENDPOINT_URL": f"http://{host}:{port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        bucket = BUCKET.removeprefix("s3://").strip("/")
        urlopen(Request(f"http://{host}:{port}/{bucket}", method="PUT")).close()
        for file in [file for file in folder.rglob("*") if file.is_file()]:
            obstore.put(S3Store(bucket), str(file.relative_to(folder)), file)
            file.unlink()
        yield
    finally:
        server.stop()


def test_every_link_of_the_table_is_a_section() -> None:
    titles = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^##+ (.+)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= titles


def test_every_layout_has_its_name_in_the_settings() -> None:
    recipes = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    assert [shape.name for shape in SHAPES if f"`{shape.name}`" not in recipes] == []


def test_the_documented_causes_are_those_of_the_code() -> None:
    """A row a cause: what it means and what to do are the code's own words."""
    listed = {cause: (meaning, remedy) for cause, meaning, remedy in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)}
    assert listed == {cause: (CAUSES[cause], REMEDIES[cause]) for cause in CAUSES}
