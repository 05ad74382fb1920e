"""Makes docs/sample.svg: the samples that `eyeline check` shows, of a data set of two rows. `make sample-image` runs it."""

import io
import json
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from eyeline.recipes.check import check
from eyeline.recipes.read import run_of

ROWS = [
    {
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": "<image>What stands on the table?"},
            {"role": "assistant", "content": "A red cup and a plate."},
            {"role": "user", "content": "Is the cup full?"},
            {"role": "assistant", "content": "No, it is empty."},
        ],
        "images": ["table.png"],
    },
    {
        "messages": [
            {"role": "user", "content": "<image><image>What has changed?"},
            {"role": "assistant", "content": "The cup is gone.", "weight": 0},
            {"role": "user", "content": "Only the cup?"},
            {"role": "assistant", "content": "The cup and the plate."},
        ],
        "images": ["table.png", "later.png"],
    },
]
VISION = {"image_size": 64, "patch": 8, "hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64}
LANGUAGE = {
    **{"vocab_size": 512, "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 64},
    **{"max_positions": 512, "tie_embeddings": True},
}
PARTS = ("vision", "projector", "language")
STAGE = {
    **{"name": "tune", "steps": 1, "batch": {"max_tokens": 512, "max_patches": 512}},
    "trains": {part: {"how": "full", "lr": 1e-3} for part in PARTS},
}


def main(target: Path) -> None:
    """Run `check` on the rows, and write the lines of its samples as they look in a terminal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.json").write_text(json.dumps(ROWS))
        for image, colour in (("table.png", "peru"), ("later.png", "tan")):
            Image.new("RGB", (64, 64), colour).save(folder / image)
        model = {"template": "qwen2.5", "config": {"family": "llava", "vision": VISION, "projector": {"shuffle": 2}, "language": LANGUAGE}}
        stages = [STAGE | {"data": {"sources": [{"path": str(folder / "rows.json")}]}}]
        run = run_of({"name": "sample", "out": str(folder / "run"), "device": "cpu", "model": model, "stages": stages}, "the recipe")
        console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True, color_system="standard")
        if not check(run, samples=len(ROWS), console=console):
            sys.exit(console.export_text())
    lines = console.export_text(styles=True).splitlines()
    [begin] = [n for n, line in enumerate(lines) if "the first samples" in line]
    [end] = [n for n, line in enumerate(lines) if "no problems" in line]
    small = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    small.print(Text.from_ansi("\n".join(lines[begin : end - 1])))
    svg = small.export_svg(title="eyeline check", unique_id="sample")
    target.write_text(re.sub(r"\s*@font-face \{[^}]*\}", "", svg), encoding="utf-8")  # fonts of the reader: nothing is fetched


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("sample.svg"))
