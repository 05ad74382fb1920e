"""A small LLaVA set: 31 rows that share nine images, and a budget that holds few of them."""

import json
from pathlib import Path
from typing import Any

from eyeline.core.batch import Budget

BUDGET = Budget(90, 80)  # five images of 16 patches


def row(text: str, *images: str, answer: str = "yes", more: tuple[str, ...] = ()) -> dict[str, Any]:
    turns = ["<image>" * len(images) + text, answer, *more]
    return {
        "image": list(images) or None,
        "conversations": [{"from": ("human", "gpt")[n % 2], "value": turn} for n, turn in enumerate(turns)],
    }


ROWS = (
    [row(f"question {n}?", f"{n // 3}.png", answer=f"answer {n}") for n in range(24)]  # eight images, three rows each
    + [row(f"text {n}", answer="a b c d e " * (n % 4 + 1)) for n in range(5)]
    + [row("compare", "0.png", "8.png"), row("other order", "8.png", "0.png")]
)


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.json").write_text(json.dumps(rows))
