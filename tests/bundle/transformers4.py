"""Runs under transformers 4 in .venv-transformers4, without Eyeline: answers what a user of an exported folder sees there.

A request a line of standard input, an answer a line of standard output, tensors through safetensors files.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, GenerationConfig


def loaded(folder: str, architecture: str, **how: Any) -> tuple[Any, dict]:
    model, report = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True, local_files_only=True, **how)
    return model.eval(), {name: sorted(report[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}


@torch.no_grad()
def logits(folder: str, architecture: str, inputs: list[str], out: str, field: str = "logits", adapter: str | None = None) -> dict:
    """What the class computes from each file of inputs; `lacks` where there is no such class."""
    if not hasattr(transformers, architecture):
        return {"lacks": architecture}
    model, report = loaded(folder, architecture, attn_implementation="eager")
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    given = [{name: x for name, x in load_file(file).items() if name != "mm_token_type_ids"} for file in inputs]  # 4 finds them itself
    save_file({str(i): getattr(model(**one), field)[0].contiguous() for i, one in enumerate(given)}, out)
    return {"report": report}


def dtype(folder: str, architecture: str) -> dict:
    model, _ = loaded(folder, architecture, torch_dtype="auto")
    return {"dtype": str(model.dtype)}


def tokens(folder: str, texts: list[str], messages: list) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return {
        "class": type(tokenizer).__name__,
        "ids": [tokenizer(text)["input_ids"] for text in texts],
        "special": sorted(tokenizer.all_special_tokens),
        "ends": [tokenizer.eos_token, tokenizer.pad_token],
        "prompt": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        "decoded": [tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) for text in texts],
    }


def generation(folder: str) -> dict:
    return GenerationConfig.from_pretrained(folder, local_files_only=True).to_diff_dict()


def images(folder: str, files: list[str], out: str) -> dict:
    """What the folder's image processor makes of images."""
    processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, use_fast=False)
    save_file(dict(processor([Image.open(file) for file in files], return_tensors="pt")), out)
    return {"class": type(processor).__name__}


def prompt(folder: str, architecture: str, messages: list, files: list[str], out: str) -> dict:
    """What the folder's whole processor makes of a conversation with images, and the model's answer to it."""
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=text, images=[Image.open(file) for file in files], return_tensors="pt", add_special_tokens=False)
    save_file({name: x.contiguous() for name, x in inputs.items()}, out)
    model, _ = loaded(folder, architecture)
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return {"class": type(processor).__name__, "answer": answer.tolist()}


ANSWERS = {f.__name__: f for f in (logits, dtype, tokens, generation, images, prompt)}

if __name__ == "__main__":
    assert transformers.__version__.startswith("4."), f"{Path(transformers.__file__).parent} is {transformers.__version__}"
    for line in sys.stdin:
        request = json.loads(line)
        answer = ANSWERS[request.pop("ask")](**request)
        sys.stdout.write("\n" + json.dumps({"answer": answer}) + "\n")
        sys.stdout.flush()
