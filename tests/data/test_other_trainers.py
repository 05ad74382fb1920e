"""Data in the format of another trainer trains here as it is: the layouts that LLaMA-Factory, ms-swift, Qwen3-VL's finetuning code,
TRL and nanoVLM document, in small files of our own. What must come out is written as what was trained: images by colour, in «» what is
learned.

What they document and Eyeline does not train on is rejected by name: no field is silently dropped where that changes what is learned.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as pq
import pytest

from eyeline.core.errors import BadSample, Refused
from eyeline.data.sources.sources import Source, open_source
from tests.data.small_training import causes, draw, one

Rows = list[dict[str, Any]]
IMAGE_COLUMNS = ("red.png", "images/green.jpg", "images/blue.jpg")
VIDEO = ("frames/black-1.jpg", "frames/black-2.jpg", "frames/white-3.jpg")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*IMAGE_COLUMNS, *VIDEO):
        draw(tmp_path / name)
    return tmp_path


def as_list(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    return path


def as_lines(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def as_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(arrow.Table.from_pylist(rows), path)
    return path


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def talk(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": value} for role, value in turns]


def stored(folder: Path, name: str) -> dict[str, Any]:
    """An image as Hugging Face's `datasets` stores it in Parquet."""
    return {"bytes": (folder / name).read_bytes(), "path": None}


# LLaMA-Factory (data/README.md, data/mllm_demo.json, data/mllm_video_demo.json)


def test_llama_factory_images(folder: Path) -> None:
    """mllm_demo: `messages` with <image> in the text, and `images`."""
    rows = [
        {
            "messages": said(("user", "<image>Who is it?"), ("assistant", "A cat."), ("user", "And now?"), ("assistant", "它睡了。")),
            "images": ["images/green.jpg"],
        },
        {"messages": said(("user", "<image><image>Alike?"), ("assistant", "No.")), "images": ["images/blue.jpg", "red.png"]},
    ]
    assert one(as_list(folder / "mllm_demo.json", rows)) == [
        ["user: [green]Who is it?", "assistant: «A cat.»", "user: And now?", "assistant: «它睡了。»"],
        ["user: [blue][red]Alike?", "assistant: «No.»"],
    ]


def test_llama_factory_images_without_places(folder: Path) -> None:
    """Its first demo had no <image> in the text: images come before the first question."""
    rows = [{"messages": said(("user", "Who is it?"), ("assistant", "A cat.")), "images": ["images/green.jpg", "red.png"]}]
    assert one(as_list(folder / "mllm_demo.json", rows)) == [["user: [green][red]Who is it?", "assistant: «A cat.»"]]


def test_llama_factory_sharegpt(folder: Path) -> None:
    """`conversations` in words of ShareGPT, with a column for the system prompt."""
    rows = [
        {
            "conversations": talk(("human", "<image>Name it."), ("gpt", "A cat.")),
            "images": ["red.png"],
            "system": "Be brief.",
            "tools": "",
        },
        {"conversations": talk(("human", "Hi"), ("gpt", "Hello"), ("human", "Bye"), ("gpt", "See you"))},
    ]
    assert one(as_list(folder / "data.json", rows)) == [
        ["system: Be brief.", "user: [red]Name it.", "assistant: «A cat.»"],
        ["user: Hi", "assistant: «Hello»", "user: Bye", "assistant: «See you»"],
    ]


def test_llama_factory_alpaca(folder: Path) -> None:
    """instruction, input and output, with system, history and images."""
    rows = [
        {"instruction": "Say hello.", "input": "", "output": "Hello."},
        {
            "instruction": "Name it.",
            "input": "<image>",
            "output": "A cat.",
            "system": "Be brief.",
            "history": [["Hi", "Hello"], ["Well?", "Yes"]],
            "images": ["red.png"],
        },
    ]
    assert one(as_list(folder / "alpaca.json", rows)) == [
        ["user: Say hello.", "assistant: «Hello.»"],
        [
            "system: Be brief.",
            "user: Hi",
            "assistant: «Hello»",
            "user: Well?",
            "assistant: «Yes»",
            "user: Name it.[red]",  # a newline next to an image is the template's affair
            "assistant: «A cat.»",
        ],
    ]


def test_llama_factory_videos(folder: Path) -> None:
    """mllm_video_demo: a video file is refused with the way to its frames; with these in its place the row trains as it is."""
    row = {"messages": said(("user", "<video>Why is it funny?"), ("assistant", "It falls."))}
    assert causes(as_list(folder / "video.json", [row | {"videos": ["mllm_demo_data/1.mp4"]}])) == [("video_file", "videos[0]")]
    assert one(as_list(folder / "frames.json", [row | {"videos": [list(VIDEO)]}])) == [
        ["user: <0.2 seconds>[black]<1.0 seconds>[white]Why is it funny?", "assistant: «It falls.»"]
    ]


def test_llama_factory_v1(folder: Path) -> None:
    """v1_sft_demo: parts with a `value`, and a weight of the loss for each turn."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "hi"}], "loss_weight": 0.0},
                {"role": "assistant", "content": [{"type": "text", "value": "Hello!"}], "loss_weight": 1.0},
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "value": "red.png"}, {"type": "text", "value": "?"}],
                    "loss_weight": 0.0,
                },
                {"role": "assistant", "content": [{"type": "text", "value": "Red."}], "loss_weight": 1.0},
            ]
        },
    ]
    assert one(as_lines(folder / "v1_sft_demo.jsonl", rows)) == [
        ["user: hi", "assistant: «Hello!»"],
        ["user: [red]?", "assistant: «Red.»"],
    ]


# ms-swift (docs: Custom-dataset)


def test_ms_swift_messages(folder: Path) -> None:
    """Its standard form, JSON lines: images by absolute path, a video and images in one turn, text alone."""
    rows = [
        {"messages": said(("user", "Where is it?"), ("assistant", "There."))},
        {
            "messages": said(("user", "<image><image>What differs?"), ("assistant", "The colour.")),
            "images": [str(folder / "images/green.jpg"), str(folder / "red.png")],
        },
        {
            "messages": said(("system", "Be kind."), ("user", "<image>What is here, <video>and here?"), ("assistant", "Cats.")),
            "images": ["images/blue.jpg"],
            "videos": [list(VIDEO)],
        },
    ]
    assert one(as_lines(folder / "train.jsonl", rows)) == [
        ["user: Where is it?", "assistant: «There.»"],
        ["user: [green][red]What differs?", "assistant: «The colour.»"],
        [
            "system: Be kind.",
            "user: [blue]What is here, <0.2 seconds>[black]<1.0 seconds>[white]and here?",
            "assistant: «Cats.»",
        ],
    ]


def test_ms_swift_query_and_response(folder: Path) -> None:
    rows = [
        {"system": "Be kind.", "query": "<image>And this?", "response": "A dog.", "history": [["Hi", "Hello"]], "images": ["red.png"]},
        {"query": "Name it.", "response": "A cat.", "images": ["images/blue.jpg"]},
        {"query": "Hi", "response": "Hello", "history": []},
    ]
    assert one(as_lines(folder / "train.jsonl", rows)) == [
        ["system: Be kind.", "user: Hi", "assistant: «Hello»", "user: [red]And this?", "assistant: «A dog.»"],
        ["user: [blue]Name it.", "assistant: «A cat.»"],
        ["user: Hi", "assistant: «Hello»"],
    ]


def test_ms_swift_sharegpt(folder: Path) -> None:
    """A pair an exchange, under `conversation`."""
    rows = [
        {
            "system": "Be kind.",
            "conversation": [{"human": "<image>What?", "assistant": "A cat."}, {"human": "Sure?", "assistant": "Yes."}],
            "images": ["red.png"],
        }
    ]
    assert one(as_lines(folder / "train.jsonl", rows)) == [
        ["system: Be kind.", "user: [red]What?", "assistant: «A cat.»", "user: Sure?", "assistant: «Yes.»"]
    ]


# Qwen3-VL's finetuning code (qwen-vl-finetune/README.md, demo/single_images.json)

QWEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one image": (
        {"image": "images/green.jpg", "conversations": talk(("human", "<image>\nWhat is it?"), ("gpt", "An apple."))},
        ["user: [green]What is it?", "assistant: «An apple.»"],
    ),
    "an image behind the question": (
        {"image": "red.png", "conversations": talk(("human", "What is it?\n<image>"), ("gpt", "An apple."))},
        ["user: What is it?[red]", "assistant: «An apple.»"],
    ),
    "images in `images`": (
        {"images": ["red.png", "images/blue.jpg"], "conversations": talk(("human", "<image>\n<image>\nAlike?"), ("gpt", "No."))},
        ["user: [red][blue]Alike?", "assistant: «No.»"],
    ),
    "images in `image`, text between": (
        {"image": ["red.png", "images/blue.jpg"], "conversations": talk(("human", "Which?\n<image> or \n<image>"), ("gpt", "Blue."))},
        ["user: Which?[red] or [blue]", "assistant: «Blue.»"],
    ),
    "a box": (
        {"image": "red.png", "conversations": talk(("human", "<image>\nLocate it, in JSON."), ("gpt", '{\n"bbox_2d": [1, 2, 5, 6]\n}'))},
        ["user: [red]Locate it, in JSON.", 'assistant: «{\n"bbox_2d": [1, 2, 5, 6]\n}»'],
    ),
    "a video by its frames": (
        {"video": list(VIDEO), "conversations": talk(("human", "<video>\nWhat happens?\n(A) All\n(B) Nothing"), ("gpt", "(B)"))},
        ["user: <0.2 seconds>[black]<1.0 seconds>[white]What happens?\n(A) All\n(B) Nothing", "assistant: «(B)»"],
    ),
}


@pytest.mark.parametrize(("write", "name"), [(as_list, "annotations.json"), (as_lines, "annotations.jsonl")])
def test_qwen_vl_finetune(folder: Path, write: Callable[[Path, Rows], Path], name: str) -> None:
    """`annotation_path` and `data_path` are our `path` and `images`."""
    (folder / "annotations").mkdir()
    path = write(folder / "annotations" / name, [row for row, _ in QWEN.values()])
    assert one(path, images=str(folder)) == [told for _, told in QWEN.values()]


def test_qwen_vl_video_files(folder: Path) -> None:
    row = {"conversations": talk(("human", "<video>\nWhat happens?"), ("gpt", "Nothing."))}
    path = as_list(folder / "video.json", [row | {"video": "videos/005.mp4"}, row | {"video": ["videos/005.mp4"]}])
    assert [cause for cause, _ in causes(path)] == ["video_file", "video_file"]


# TRL (docs: dataset formats, SFT trainer), which reads Hugging Face's Parquet


def test_trl_vision_messages(folder: Path) -> None:
    """Parts of type image take theirs from `images`, in order; Parquet gives every part every field."""
    rows = [
        {
            "messages": said(
                ("user", [{"type": "image", "text": None}, {"type": "text", "text": "What colour?"}]),
                ("assistant", [{"type": "text", "text": "Red."}]),
            ),
            "images": [stored(folder, "red.png")],
        },
        {
            "messages": said(
                ("user", [{"type": "text", "text": "Is "}, {"type": "image", "text": None}, {"type": "image", "text": None}]),
                ("assistant", [{"type": "text", "text": "No."}]),
            ),
            "images": [stored(folder, "images/blue.jpg"), stored(folder, "images/green.jpg")],
        },
    ]
    assert one(as_parquet(folder / "train-00000-of-00001.parquet", rows)) == [
        ["user: [red]What colour?", "assistant: «Red.»"],
        ["user: Is [blue][green]", "assistant: «No.»"],
    ]


def test_trl_numbered_images(folder: Path) -> None:
    """Parts that say by `index` which of `images` they are, as in HuggingFaceH4/llava-instruct-mix-vsft."""
    parts = [
        {"index": 1, "text": None, "type": "image"},
        {"index": 0, "text": None, "type": "image"},
        {"index": None, "text": "Alike?", "type": "text"},
    ]
    answer = [{"index": None, "text": "No.", "type": "text"}]
    rows = [{"messages": said(("user", parts), ("assistant", answer)), "images": [stored(folder, n) for n in IMAGE_COLUMNS[:2]]}]
    assert one(as_parquet(folder / "train.parquet", rows)) == [["user: [green][red]Alike?", "assistant: «No.»"]]


@pytest.mark.parametrize("column", ["image", "images"])
def test_trl_prompt_and_completion_with_images(folder: Path, column: str) -> None:
    """Messages without places, as in trl-lib/llava-instruct-mix: images come before the first question."""
    image = stored(folder, "red.png")
    rows = [
        {
            column: image if column == "image" else [image],
            "prompt": said(("user", "What colour?")),
            "completion": said(("assistant", "Red.")),
        },
        {
            column: image if column == "image" else [image],
            "prompt": said(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "And?")),
            "completion": said(("assistant", "Nothing.")),
        },
    ]
    assert one(as_parquet(folder / "train.parquet", rows)) == [
        ["user: [red]What colour?", "assistant: «Red.»"],
        ["system: Be kind.", "user: [red]Hi", "assistant: «Hello»", "user: And?", "assistant: «Nothing.»"],
    ]


def test_trl_text(folder: Path) -> None:
    """Prompt and completion as strings, and messages alone."""
    rows = [{"prompt": "The sky is", "completion": " blue."}]
    assert one(as_lines(folder / "prompts.jsonl", rows)) == [["user: The sky is", "assistant: « blue.»"]]
    rows = [{"messages": said(("user", "What colour?"), ("assistant", "Blue."))}]
    assert one(as_parquet(folder / "messages.parquet", rows)) == [["user: What colour?", "assistant: «Blue.»"]]


# nanoVLM: The Cauldron, and FineVision with its ratings

RATINGS = {
    f"{what}_{how}": value
    for what in ("relevance", "image_correspondence", "visual_dependency", "formatting")
    for how, value in (("ratings", [5, 4]), ("min", 4))
}


def test_nanovlm_the_cauldron(folder: Path) -> None:
    turns = [{"user": "What colour?\nShort.", "assistant": "Red."}, {"user": "Sure?", "assistant": "Yes."}]
    rows = [{"images": [stored(folder, "red.png")], "texts": [turn | {"source": "VQA"} for turn in turns]}]
    assert one(as_parquet(folder / "train-00000-of-00001-abc.parquet", rows)) == [
        ["user: [red]What colour?\nShort.", "assistant: «Red.»", "user: Sure?", "assistant: «Yes.»"]
    ]


def test_nanovlm_images_with_places(folder: Path) -> None:
    """nanoVLM takes <image> out of a question and puts the images first; here it says where they stand, or the row is rejected."""
    rows = [
        {"images": ["red.png"], "texts": [{"user": "Hi", "assistant": "Hello"}, {"user": "What is <image>?", "assistant": "Red."}]},
        {"images": ["red.png"], "texts": [{"user": "<image> or <image>?", "assistant": "Both."}]},
    ]
    path = as_list(folder / "data.json", rows)
    assert one(path, limit=1) == [["user: Hi", "assistant: «Hello»", "user: What is [red]?", "assistant: «Red.»"]]
    [_, (_, _, bad)] = open_source(Source(path=str(path))).kept_rows()
    assert isinstance(bad, BadSample)
    assert (bad.cause, bad.field) == ("placeholder_count", "texts")


def test_nanovlm_finevision(folder: Path) -> None:
    """A folder for each subset with files of its split; columns that nothing reads are said."""
    turns = [{"user": "Which is blue?", "assistant": "The first."}, {"user": "Sure?", "assistant": "Yes."}]
    rows = [{"images": [stored(folder, "images/blue.jpg"), stored(folder, "red.png")], "texts": turns, "source": "mine", **RATINGS}]
    (folder / "ai2d").mkdir()
    as_parquet(folder / "ai2d" / "train-00000-of-00002.parquet", rows)
    as_parquet(folder / "ai2d" / "train-00001-of-00002.parquet", rows)
    wanted = ["user: [blue][red]Which is blue?", "assistant: «The first.»", "user: Sure?", "assistant: «Yes.»"]
    assert one(folder / "ai2d") == [wanted, wanted]
    why = open_source(Source(path=str(folder / "ai2d"))).layout.why
    assert all(name in why for name in ("not read", "source", *RATINGS))


# What is for other kinds of training: by name, never half

ASKED = {"messages": said(("user", "<image>What?"), ("assistant", "A cat.")), "images": ["red.png"]}
CALLED = said(("user", "Light!"), ("tool_call", '{"name": "light"}'), ("tool_response", "{}"), ("assistant", "Done."))
REJECTED: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "LLaMA-Factory: preference": (
        {
            "conversations": talk(("human", "<image>What?")),
            "chosen": {"from": "gpt", "value": "A cat."},
            "rejected": {"from": "gpt", "value": "A dog."},
            "images": ["red.png"],
        },
        ("preference", "chosen"),
    ),
    "LLaMA-Factory: KTO": ({"conversations": talk(("human", "What?"), ("gpt", "No.")), "kto_tag": False}, ("preference", "kto_tag")),
    "LLaMA-Factory: audio": (
        {"messages": said(("user", "<audio>What is said?"), ("assistant", "Hello.")), "audios": ["1.mp3"]},
        ("unsupported", "audios"),
    ),
    "LLaMA-Factory: tools": (
        {
            "conversations": talk(("human", "Light!"), ("function_call", "{}"), ("observation", "{}"), ("gpt", "Done.")),
            "tools": '[{"name": "light"}]',
        },
        ("tool_turn", "conversations[1].from"),
    ),
    "ms-swift: a rejected response": (ASKED | {"rejected_response": "I don't know"}, ("preference", "rejected_response")),
    "ms-swift: KTO": (ASKED | {"label": False}, ("preference", "label")),
    "ms-swift: tools": ({"messages": CALLED}, ("tool_turn", "messages[1].role")),
    "ms-swift: unused tools": (ASKED | {"tools": '[{"name": "light"}]'}, ("tool_turn", "tools")),
    "ms-swift: boxes apart": (
        ASKED
        | {
            "messages": said(("user", "<image>Where is <ref-object>?"), ("assistant", "<bbox>")),
            "objects": {"ref": ["the cat"], "bbox": [[1, 2, 5, 6]]},
        },
        ("unsupported", "objects"),
    ),
    "ms-swift: pretraining": (
        {"messages": said(("assistant", "<image>is a puppy")), "images": ["red.png"]},
        ("image_in_answer", "messages[0].content"),
    ),
    "ms-swift: prompts alone": ({"messages": said(("user", "What is 1 + 1?"))}, ("no_target", "messages")),
    "ms-swift: an image to draw": (
        {"messages": said(("user", "Draw it."), ("assistant", "<image>")), "images": ["red.png"]},
        ("image_in_answer", "messages[1].content"),
    ),
    "LLaMA-Factory: no answer in the loss": (
        {"messages": [*said(("user", "Hi")), {"role": "assistant", "content": "Hello", "loss_weight": 0.0}]},
        ("no_target", "messages[1].loss_weight"),
    ),
    "TRL: reasoning": (
        {"messages": [*said(("user", "Hi")), {"role": "assistant", "thinking": "A greeting.", "content": "Hello"}]},
        ("unsupported", "messages[1].thinking"),
    ),
    "TRL: unpaired preference": ({"prompt": "The sky is", "completion": " green.", "label": False}, ("preference", "label")),
    "TRL: tools": (
        {
            "messages": [
                *said(("user", "Light!")),
                {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "light", "arguments": {}}}]},
                *said(("tool", "On."), ("assistant", "Done.")),
            ]
        },
        ("tool_turn", "messages[1].tool_calls"),
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_not_trained_is_named(folder: Path, case: str) -> None:
    row, wanted = REJECTED[case]
    assert causes(as_list(folder / "data.json", [row])) == [wanted]


REFUSED: dict[str, tuple[Any, str]] = {
    "LLaMA-Factory: alpaca preference": ({"instruction": "What?", "input": "", "chosen": "A cat.", "rejected": "No."}, "preference data"),
    "TRL: preference": (
        {"prompt": said(("user", "What?")), "chosen": said(("assistant", "A cat.")), "rejected": said(("assistant", "No."))},
        "preference data",
    ),
    "TRL: preference without a prompt": (
        {"chosen": said(("user", "?"), ("assistant", "A cat.")), "rejected": said(("user", "?"), ("assistant", "No."))},
        "preference data",
    ),
    "Qwen3-VL: packed by its pack_data.py": ([QWEN["one image"][0], QWEN["a box"][0]], "several samples in a row"),
    "TRL: prompts alone": ({"prompt": said(("user", "What?"))}, "prompt and completion"),
    "LLaMA-Factory: pretraining": ({"text": "A document."}, "it has no known layout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_of_nothing_else_are_refused(folder: Path, case: str) -> None:
    row, wanted = REFUSED[case]
    with pytest.raises(Refused, match=wanted):
        open_source(Source(path=str(as_list(folder / "data.json", [row, row]))))
