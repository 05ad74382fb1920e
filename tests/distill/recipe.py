"""A tiny recipe with a distill section, and a teacher that knows the colours of its images."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from eyeline.core.files import read_lines
from tests.train.recipe import COLOURS, tiny_recipe

REASON = "I look at the image and compare its main colour with the colours that I know."


def recipe_with(folder: Path, teacher: dict[str, Any], **distill: Any) -> dict[str, Any]:
    """The tiny recipe, whose distill section asks `teacher`."""
    recipe = tiny_recipe(folder)
    source = {"path": str(folder / "data" / "data.json"), "limit": 10}
    return recipe | {"distill": {"sources": [source], "teacher": teacher, "partition_rows": 3, **distill}}


def server(url: str, *more: str, **settings: Any) -> dict[str, Any]:
    return {"kind": "server", "urls": [url, *more], "model": "tiny-teacher", "concurrency": 4, "retries": 3, "timeout": 5.0, **settings}


def write_recipe(folder: Path, recipe: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def question_in(body: dict[str, Any]) -> str:
    """The text of a request."""
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def colour_in(body: dict[str, Any]) -> str | None:
    """The colour of a request's image, looked at."""
    content = body["messages"][-1]["content"]
    for part in content if isinstance(content, list) else ():
        if part["type"] == "image_url":
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            mean = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).mean((0, 1))
            return min(COLOURS, key=lambda name: float(np.abs(mean - COLOURS[name]).sum()))
    return None


def right(body: dict[str, Any]) -> str:
    """The true answer to a question of the tiny data, with a reason; to one without an image, which no text answers, a wrong one."""
    colour = colour_in(body)
    for message in body["messages"]:  # an earlier answer
        colour = colour or next((name for name in COLOURS if name in str(message["content"])), None)
    sure = "are you sure?" in question_in(body)
    return f"{REASON}\nAnswer: {f'Yes, {colour}' if sure else f'It is {colour}.'}"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("samples-*.jsonl")) for row in read_lines(path)]


def rejects_of(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((folder / "rejected").glob("*.jsonl")) for row in read_lines(path)]
