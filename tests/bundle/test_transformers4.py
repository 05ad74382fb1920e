"""Exports in the newest transformers 4, which many serving stacks pin: `make test-transformers4`, in .venv-transformers4.

Weights, logits, tokenizer, processors and adapters are compared with Eyeline's own numbers, or with what transformers 5 makes of the same
folder. Classes that 4 lacks are listed here and in docs/exports.md.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, GenerationConfig

from eyeline.bundle.exporting import export
from eyeline.models.hf import mapping_of
from tests.bundle.exported import PARTED, WHOLE, Exported, adapted, bundle_of, close, our_logits, random_model
from tests.bundle.tiny import CONVERSATION, built, drawing, imported
from tests.command import Command
from tests.documented import exports_as_documented
from tests.models.parity import Case

pytestmark = pytest.mark.transformers4
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-transformers4" / "bin" / "python"
LACKING = {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
MESSAGES = [{"role": "user", "content": "what is this?"}, {"role": "assistant", "content": "that"}, {"role": "user", "content": "and this"}]
TEXTS = [
    "what is this, and what is that?",
    "I'll ask: 1234 cafe\u0301s?\n\n  \ufb01ne, \u00c5ngstr\u00f6m",
    "<|im_start|>user\na<|im_end|>\n<|image_pad|>",
]


class Older:
    """A process with transformers 4. One that failed is replaced with the next question."""

    def __init__(self, errors: Path):
        assert PYTHON.exists(), f"{PYTHON} does not exist: run `make test-transformers4`, which makes it"
        self.errors, self.process = errors, None

    def ask(self, question: str, **request: Any) -> dict:
        if self.process is None or self.process.poll() is not None:
            command = [PYTHON, Path(__file__).with_name("transformers4.py")]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors.open("w"), text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"ask": question, **request}, default=str) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"answer": '):
                return json.loads(line)["answer"]
        self.process.wait()
        pytest.fail(f"{question} failed under transformers 4:\n{self.errors.read_text()[-3000:]}")

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Older]:
    process = Older(tmp_path_factory.mktemp("older") / "errors.txt")
    yield process
    process.close()


def architecture(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def stored_inputs(case: Case, folder: Path) -> list[Path]:
    """Each document's inputs, with its positions where they are not plain: 4 would find them by tokens that these documents lack."""
    files = [folder / f"{i}.inputs.safetensors" for i in range(len(case.documents))]
    for document, file in zip(case.documents, files, strict=True):
        inputs = case.inputs(document)
        if document.positions_T3 is not None:
            inputs["position_ids"] = torch.from_numpy(document.positions_T3).long().T[:, None]
        save_file({name: x.contiguous() for name, x in inputs.items()}, file)
    return files


def lacked(case: Case, name: str) -> str | None:
    """Why transformers 4 does not compute this case; None where it does."""
    if name in LACKING:
        return f"no {name}"
    if name == "Lfm2VlForConditionalGeneration" and not case.config.projector.norm:
        return "a LayerNorm in every projector of LFM2-VL's class"
    return None


def ids(case: Case) -> str:
    return f"{case.config.family}: {case.id}"


@pytest.mark.parametrize("case", WHOLE, ids=ids)
def test_weights_and_logits(case: Case, exported: Callable[[Case], Exported], older: Older, tmp_path: Path) -> None:
    made = exported(case)
    name, why = architecture(made.folder), lacked(case, architecture(made.folder))
    files = stored_inputs(case, tmp_path)
    answer = older.ask("logits", folder=made.folder, architecture=name, inputs=files, out=tmp_path / "out")
    if why is not None:
        assert answer.get("lacks") == name or answer["report"]["missing_keys"], f"transformers 4 has it now, and the documents say: {why}"
        return
    assert not any(answer["report"].values()), answer
    theirs = load_file(tmp_path / "out")
    rows = [theirs[str(i)][torch.from_numpy(d.labels_T) >= 0] for i, d in enumerate(case.documents)]
    close(torch.cat(rows), our_logits(made.model, case.documents))


@pytest.mark.parametrize("case", PARTED, ids=ids)
def test_parts(case: Case, exported: Callable[[Case], Exported], older: Older, tmp_path: Path) -> None:
    """Each part computes what it computes in transformers 5."""
    folder, vision = exported(case).folder, case.config.vision
    rng = torch.Generator().manual_seed(0)
    pixels = {"pixel_values": torch.randn(2, 3, vision.image_size, vision.image_size, generator=rng)}
    if vision.patches is not None:
        shapes = torch.tensor([[2, 3], [1, 2]])
        mask = (torch.arange(6) < shapes.prod(1, keepdim=True)).long()
        patches = torch.randn(2, 6, 3 * vision.patch**2, generator=rng)
        pixels = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    tokens = {"input_ids": torch.randint(0, 50, (1, 9), generator=rng)}
    for part, inputs, field in (("vision", pixels, "last_hidden_state"), ("language", tokens, "logits")):
        save_file(inputs, tmp_path / "inputs")
        name = architecture(folder / part)
        request = {"folder": folder / part, "architecture": name, "field": field}
        answer = older.ask("logits", inputs=[tmp_path / "inputs"], out=tmp_path / "out", **request)
        if name in LACKING:
            assert answer == {"lacks": name}
            continue
        assert not any(answer["report"].values()), answer
        model = getattr(transformers, name).from_pretrained(folder / part, attn_implementation="eager").eval()
        with torch.no_grad():
            close(load_file(tmp_path / "out")["0"], getattr(model(**inputs), field)[0])


@pytest.mark.parametrize("case", [case for case in WHOLE if case.config.family != "qwen3_5_vl"], ids=ids)
def test_adapters(case: Case, older: Older, tmp_path: Path) -> None:
    """But for adapters of LFM2-VL's tower: see `_LFM2_VL_MODULES` of models/llava.py."""
    bundle = bundle_of(case)
    lfm2_vl = mapping_of(case.config).form(case.config).name == "lfm2_vl"
    model = adapted(bundle, ("projector", "vision") if lfm2_vl else ("projector",))
    export(bundle, model, tmp_path / "apart", adapter=True)
    base = tmp_path / "apart" / "base"
    if lacked(case, architecture(base)):
        return
    request = {"folder": base, "architecture": architecture(base), "adapter": tmp_path / "apart" / "adapter"}
    older.ask("logits", inputs=stored_inputs(case, tmp_path), out=tmp_path / "out", **request)
    theirs = load_file(tmp_path / "out")
    rows = [theirs[str(i)][torch.from_numpy(d.labels_T) >= 0] for i, d in enumerate(case.documents)]
    close(torch.cat(rows), our_logits(model, case.documents))


def first(name: str) -> Case:
    """A case of each class that has an image processor."""
    return (
        next(case for case in WHOLE if case.config.family == "qwen3_vl")
        if name == "qwen3_vl"
        else next(case for case in WHOLE if case.config.family == "llava" and case.config.feature_norm is (name == "lfm2_vl"))
    )


def test_tokenizer_and_template(exported: Callable[[Case], Exported], older: Older) -> None:
    made = exported(first("llava"))
    theirs = AutoTokenizer.from_pretrained(made.folder)
    answer = older.ask("tokens", folder=made.folder, texts=TEXTS, messages=MESSAGES)
    assert answer == {
        "class": "PreTrainedTokenizerFast",
        "ids": [theirs(text)["input_ids"] for text in TEXTS],
        "special": sorted(theirs.all_special_tokens),
        "ends": ["<|im_end|>", "<|endoftext|>"],
        "prompt": theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True),
        "decoded": [theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) for text in TEXTS],
    }
    assert answer["ids"][0] == made.bundle.tokenizer.encode(TEXTS[0])


def test_generation_settings(older: Older, tmp_path: Path) -> None:
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 17, "top_p": 0.85, "repetition_penalty": 1.1}
    bundle = replace(bundle_of(first("llava")), generation=sampling)
    export(bundle, random_model(bundle), tmp_path / "out")
    answer, theirs = older.ask("generation", folder=tmp_path / "out"), GenerationConfig.from_pretrained(tmp_path / "out")
    assert sampling.items() <= answer.items()
    assert (answer["eos_token_id"], answer["pad_token_id"]) == (theirs.eos_token_id, theirs.pad_token_id)


@pytest.mark.parametrize("name", ["llava", "lfm2_vl", "qwen3_vl"])
def test_image_processors(name: str, exported: Callable[[Case], Exported], older: Older, tmp_path: Path) -> None:
    folder = exported(first(name)).folder
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    for i, file in enumerate(files):
        drawing(i, 40).save(file)
    older.ask("images", folder=folder, files=files, out=tmp_path / "out")
    got, want = (
        load_file(tmp_path / "out"),
        AutoImageProcessor.from_pretrained(folder)([drawing(0, 40), drawing(1, 40)], return_tensors="pt"),
    )
    assert got.keys() == set(want.keys())
    assert all(got[key].shape == want[key].shape and float((got[key] - want[key]).abs().max()) < 1e-5 for key in got)


@pytest.mark.parametrize(("form", "processor"), [("llava", "LlavaProcessor"), ("lfm2_vl", "SquareProcessor")])
def test_a_conversation_with_images_as_a_user_asks_it(form: str, processor: str, older: Older, tmp_path: Path) -> None:
    _, bundle = imported(tmp_path, form)
    export(bundle, built(bundle, seed=3), tmp_path / "out")
    for i in (0, 1):
        drawing(i).resize((30 + 20 * i, 40)).save(tmp_path / f"{i}.png")
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    request = {"folder": tmp_path / "out", "messages": CONVERSATION, "architecture": architecture(tmp_path / "out")}
    answer = older.ask("prompt", files=files, out=tmp_path / "inputs", **request)
    assert answer["class"] == processor
    theirs = AutoProcessor.from_pretrained(tmp_path / "out", trust_remote_code=True)
    text = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    want = theirs(text=text, images=[Image.open(file) for file in files], return_tensors="pt")
    got = load_file(tmp_path / "inputs")
    assert got.keys() == set(want.keys())
    assert all(torch.allclose(got[key].float(), want[key].float(), atol=1e-5) for key in got)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    assert answer["answer"] == model.generate(**want, max_new_tokens=8, do_sample=False)[0, want["input_ids"].shape[1] :].tolist()


@pytest.mark.timeout(900)  # a process per block
def test_exports_are_used_as_documented(eyeline: Command, older: Older, tmp_path: Path) -> None:
    exports_as_documented(eyeline, tmp_path, PYTHON)


def test_bf16_is_loaded_as_bf16(older: Older, tmp_path: Path) -> None:
    bundle = bundle_of(first("llava"))
    export(bundle, random_model(bundle), tmp_path / "out", dtype="bf16")
    assert older.ask("dtype", folder=tmp_path / "out", architecture="LlavaForConditionalGeneration") == {"dtype": "torch.bfloat16"}
