"""Examples of the documentation, run as they are."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import dynamic_module_utils

from eyeline.core.files import read_object, write_json
from eyeline.data.text.templates import TEMPLATES
from tests.bundle.tiny import save_language, save_qwen3, save_vision, tokenizer
from tests.command import Command
from tests.forked import Forked

ROOT = Path(__file__).parent.parent


def blocks(text: str) -> list[str]:
    return re.findall(r"^```[^\n`]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_block(text: str, folder: Path, python: str | Path | None = None) -> str:
    """What a block prints under another Python, or else in a copy of this process, which has imported what it imports."""
    modules = str(folder / "modules")  # where transformers copies a folder's code to
    if python is not None:
        env = os.environ | {"HF_MODULES_CACHE": modules}
        done = subprocess.run([python, "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run() -> None:
        os.dup2(out.fileno(), 1)
        os.chdir(folder)
        dynamic_module_utils.HF_MODULES_CACHE = modules
        exec(compile(text, "block", "exec"), {"__name__": "__main__"})

    with open(folder / "printed", "w+b") as out:
        assert Forked(run, (out.fileno(),)).wait(240) == 0
        out.seek(0)
        return out.read().decode().strip()


def printable(text: str) -> str:
    """As chat shows a terminal what random weights answer: control characters are replaced."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text).strip()


def llama_language(folder: Path) -> None:
    """A language model whose tokenizer puts the first token of a text before every text, as Llama's does."""
    made = tokenizer(TEMPLATES["llama3"])
    first = "<|begin_of_text|>"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, made.convert_tokens_to_ids(first))]
    )
    save_language(folder, tok=made)


def exports_as_documented(eyeline: Command, folder: Path, python: str | Path | None = None) -> None:
    """Run docs/exports.md's blocks as they are, under `python` if one is given; their answers are Eyeline's own."""
    llava, lfm2, lfm2_by_hand, qwen, text, parts = (
        block for block in blocks((ROOT / "docs/exports.md").read_text()) if "from_pretrained" in block
    )

    def answers(model: str, question: str, *images: str) -> str:
        done = eyeline(
            "chat", model, *(word for image in images for word in ("--image", image)), "--ask", question, "--max-new-tokens", "8"
        )
        assert done.code == 0, done.err
        return printable(done.out)

    def asked(block: str) -> str:
        return printable(run_block(block, folder, python))

    def export(model: str) -> None:
        shutil.rmtree(folder / "exported", ignore_errors=True)
        assert eyeline("export", model, "exported").code == 0

    Image.effect_noise((20, 30), 80).convert("RGB").save(folder / "photo.jpg")
    Image.effect_noise((90, 40), 80).convert("RGB").save(folder / "photo.png")
    save_vision(folder / "siglip")
    save_language(folder / "qwen")
    llama_language(folder / "llama")
    for name, language, *how in (
        ("plain", "qwen", "--no-feature-norm"),
        ("with-bos", "llama", "--no-feature-norm"),
        ("shuffled", "qwen", "--projector", "linear", "--shuffle", "2"),
    ):
        assert eyeline("import", name, "--vision", "siglip", "--language", language, *how).code == 0
        export(name)
        block = parts if name == "shuffled" else llava
        assert asked(block) == answers(name, "Describe it.", "photo.jpg"), name

    assert eyeline("import", "text", "--model", "qwen").code == 0
    export("text")
    assert asked(text) == answers("text", "hello")

    few = [f"stages.{stage}.data.sources.0.limit=2000" for stage in ("shapes", "all")]
    assert eyeline("train", "easyvqa-tiny", "stages.shapes.steps=30", "stages.all.steps=1", *few, "out=run").code == 0
    export("run")
    for block in (lfm2, lfm2_by_hand):
        assert asked(block) == answers("run", "what shape is in the image?", "photo.png")

    save_vision(folder / "tower", layer_norm_eps=1e-6)
    shape = save_qwen3(folder / "qwen3", tied=True, experts=0) / "config.json"
    write_json(shape, read_object(shape) | {"max_position_embeddings": 2048})  # an image has at least 1024 tokens of these small patches
    assert eyeline("import", "shaped", "--vision", "tower", "--language", "qwen3", "--transplant").code == 0
    export("shaped")
    assert asked(qwen) == answers("shaped", "what shape is in the image?", "photo.png") != ""
