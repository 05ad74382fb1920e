"""Does a stage of distilled rationales pay? Questions of two steps (count, compare) on images made by a rule, on a CPU.

    python -m bench.rationales OUT [--seeds 0 1 2] [--steps 400]

A model from scratch learns to count, and to compare at once (`instruct`). Then, for the same further steps, it learns rationales that a
teacher wrote for the same questions (`reason`), or continues with their short answers: for as many samples (`answers, equal samples`), and
for as many FLOPs (`answers, equal FLOPs`), which are more samples, since short answers are cheaper. The teacher is a server on this machine
that counts by looking at the pixels, and is wrong in one of seven cases: `eyeline distill` throws those out. Results are appended to
OUT/results.jsonl, whichever way they go.
"""

import argparse
import base64
import io
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from eyeline.core.files import append_line, read_lines
from eyeline.core.log import say
from eyeline.offline.run import Where
from eyeline.recipes.read import run_of
from eyeline.study.evaluate import evaluate
from eyeline.train.distill import distill_recipe
from eyeline.train.loop import train

COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220), "green": (40, 180, 60)}
CELL, SIDE = 8, 4  # pixels of a cell, cells of a side
COUNT, COMPARE = "How many {} cells are there?", "Which of red, blue and green is neither most nor least?"
WRONG = 7  # one in so many requests the teacher gets wrong


def counts_in(pixels: Any) -> dict[str, int]:
    """The cells of each colour, by looking."""
    cells = np.asarray(pixels)[CELL // 2 :: CELL, CELL // 2 :: CELL].reshape(-1, 3)
    return {name: int((cells == colour).all(-1).sum()) for name, colour in COLOURS.items()}


def verdict(counts: dict[str, int]) -> str:
    """The colour in the middle; none where two are equally frequent."""
    ordered = sorted(COLOURS, key=lambda name: counts[name])
    return ordered[1] if len(set(counts.values())) == len(counts) else "none"


def write_data(folder: Path, images: int, seed: int) -> None:
    """Images of coloured cells, with a question of each kind: count.json and compare.json."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    rows: dict[str, list[dict[str, Any]]] = {"count": [], "compare": []}
    for n in range(images):
        share = rng.dirichlet(np.ones(4) * 2)
        cells = rng.choice(4, SIDE * SIDE, p=share)
        palette = np.array([*COLOURS.values(), (245, 245, 245)], np.uint8)
        pixels = palette[cells].reshape(SIDE, SIDE, 3).repeat(CELL, 0).repeat(CELL, 1)
        Image.fromarray(pixels).save(folder / f"{n}.png")
        counts = counts_in(pixels)
        name = list(COLOURS)[n % 3]
        for kind, question, answer in (("count", COUNT.format(name), str(counts[name])), ("compare", COMPARE, verdict(counts))):
            rows[kind].append({"image": f"{n}.png", "question": question, "answer": answer, "kind": kind})
    for kind, some in rows.items():
        (folder / f"{kind}.json").write_text(json.dumps(some))


class Teacher(BaseHTTPRequestHandler):
    """Counts, compares and says so; sometimes it counts wrong."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        url = next(part["image_url"]["url"] for part in body["messages"][-1]["content"] if part["type"] == "image_url")
        counts = counts_in(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))
        if body["seed"] % WRONG == 0:
            counts["red"] += random.Random(body["seed"]).choice((-1, 1, 2))
        seen = ", ".join(f"{counts[name]} {name}" for name in COLOURS)
        text = f"I see {seen}.\nAnswer: {verdict(counts)}"
        said = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
        data = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def recipe(folder: Path, seed: int, url: str) -> dict[str, Any]:
    """What all runs share."""
    config = {
        "vision": {"image_size": CELL * SIDE, "patch": CELL, "hidden_size": 48, "layers": 2, "heads": 2, "intermediate_size": 96},
        "projector": {"hidden_size": 64},
        "language": {
            **{"vocab_size": 400, "hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 160},
            **{"max_positions": 256, "tie_embeddings": True},
        },
    }
    compare = str(folder / "train" / "compare.json")
    return {
        **{"seed": seed, "device": "cpu", "threads": 1, "logging_steps": 100},
        "model": {"template": "plain", "config": config},
        "distill": {
            "sources": [{"path": compare}],
            "teacher": {"kind": "server", "urls": [url], "model": "counter", "concurrency": 8},
            **{"accept": {"by": "truth"}, "filters": {"min_words": 3}, "partition_rows": 256},
        },
        "evaluation": {"sources": [{"path": str(folder / "test" / "compare.json")}], "metric": "final_answer", "max_new_tokens": 32},
    }


def stage(name: str, paths: list[str], steps: int) -> dict[str, Any]:
    return {
        "name": name,
        "trains": {part: {"how": "full", "lr": 3e-3} for part in ("vision", "projector", "language")},
        "data": {"sources": [{"path": path} for path in paths]},
        "batch": {"max_tokens": 1024, "max_patches": 512},
        "steps": steps,
        "optimizer": {"kind": "muon", "adamw_lr_ratio": 0.5, "weight_decay": 0.05},
        "schedule": {"kind": "wsd", "warmup_ratio": 0.05, "decay_ratio": 0.3},
    }


def ran(base: dict[str, Any], name: str, stages: list[dict[str, Any]], out: Path, **more: Any) -> tuple[float, float, int]:
    """Train a run and evaluate it: accuracy, FLOPs of training, samples seen."""
    train(run_of(base | more | {"name": name, "out": str(out / name), "stages": stages}, name))
    steps = [line for line in read_lines(out / name / "metrics.jsonl") if line["kind"] == "step"]
    flops = sum(sum(line["flops"].values()) for line in steps)
    return evaluate(out / name).accuracy, flops, sum(line["documents"] for line in steps)


def of_seed(out: Path, seed: int, steps: int, url: str) -> None:
    """All arms of one seed."""
    base = recipe(out, seed, url)
    count, compare, reasoned = (str(out / name) for name in ("train/count.json", "train/compare.json", "reasoned"))
    first = ran(base, f"instruct-{seed}", [stage("instruct", [count, compare], steps)], out)
    start = {"model": {"path": str(out / f"instruct-{seed}")}}
    arms = {"instruct": first, "reason": ran(base, f"reason-{seed}", [stage("reason", [reasoned], steps)], out, **start)}
    probe = ran(base, f"probe-{seed}", [stage("answers", [compare], 5)], out, **start)
    of_step, samples_of_step = probe[1] / 5, probe[2] / 5
    wanted = {
        "answers, equal samples": round(arms["reason"][2] / samples_of_step),
        "answers, equal FLOPs": round(arms["reason"][1] / of_step),
    }
    for name, number in wanted.items():
        arms[name] = ran(
            base, f"{name.replace(', ', '-').replace(' ', '-')}-{seed}".lower(), [stage("answers", [compare], number)], out, **start
        )
    for name, (accuracy, flops, samples) in arms.items():
        line = {"seed": seed, "arm": name, "accuracy": accuracy, "flops": flops, "samples": samples}
        append_line(out / "results.jsonl", line)
        say(str(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--images", type=int, default=4000)
    asked = parser.parse_args()
    write_data(asked.out / "train", asked.images, 0)
    write_data(asked.out / "test", 500, 1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Teacher)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    only = run_of(
        recipe(asked.out, 0, url) | {"name": "distill", "stages": [stage("none", [str(asked.out / "train/count.json")], 1)]}, "distill"
    )
    distill_recipe(only, asked.out / "reasoned", Where())
    for seed in asked.seeds:
        of_seed(asked.out, seed, asked.steps, url)


if __name__ == "__main__":
    main()
