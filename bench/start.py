"""Case `start`: how long until something happens: `--help`, `check`, and the first optimizer step against a Trainer script."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from PIL import Image as Pillow

from bench import trainer_script
from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, Timed, interleaved, needs_peers, spread
from bench.work import TEMPLATE, Sized, made
from eyeline.core.errors import Refused
from eyeline.core.files import read_lines
from eyeline.core.log import say
from eyeline.core.randomness import rng_for

SIZED = Sized(image=64, width=64, layers=2)
SAMPLES = 4  # of equal length, so that one step is all of them on both sides
QUESTION, ANSWER = "what is in the image?", "a red circle"
TOLERANCE = 1e-5
PATIENCE_S = 300.0
IMPORTS = {  # the first two are what no step can do without: they explain how far the limit is within reach
    "python that does nothing": "",
    "import torch": "import torch",
    "import torch and transformers' tokenizer class": "import torch; from transformers import PreTrainedTokenizerFast",
    "the same and torch._dynamo (torch's own optimizers import it)": (
        "import torch, torch._dynamo; from transformers import PreTrainedTokenizerFast"
    ),
}


def run(pairs: int = LEAST_PAIRS) -> Result:
    """Time the commands as a user starts them, in processes of their own."""
    needs_peers()
    conditions = Conditions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = prepare(folder)
        helps = [ended(["-m", "eyeline", "--help"]) for _ in range(pairs)]
        without_torch = not imports_torch(["-m", "eyeline", "--help"])
        checks = [ended(["-m", "eyeline", "check", str(recipe)]) for _ in range(pairs)]
        say(f"start: help {[round(t.wall_s, 2) for t in helps]} s, check {[round(t.wall_s, 2) for t in checks]} s")
        imports = {name: spread([ended(["-c", code]).cpu_s for _ in range(pairs)]) for name, code in IMPORTS.items()}
        losses: dict[str, float] = {}

        def ours() -> Timed:
            out = Path(tempfile.mkdtemp(dir=folder)) / "run"
            metrics = out / "metrics.jsonl"
            timed = until(["-m", "eyeline", "train", str(recipe), f"out={out}"], lambda: bool(steps_in(metrics)), out.parent)
            losses["ours"] = steps_in(metrics)[0]
            return timed

        def theirs() -> Timed:
            out = Path(tempfile.mkdtemp(dir=folder))
            written = out / "loss"
            command = [trainer_script.__file__, str(folder / "model"), str(folder / "data.json"), str(written)]
            timed = until(command, lambda: written.exists() and written.read_text().endswith("\n"), out)
            losses["peer"] = float(written.read_text())
            return timed

        times = interleaved({"ours": ours, "peer": theirs}, pairs, "start")
        apart = abs(losses["ours"] - losses["peer"])
    if apart > TOLERANCE:
        raise Refused(f"the first losses are {losses} (at most {TOLERANCE} apart): the two sides do not do the same work.")
    help_s, check_s = (spread([t.wall_s for t in timed]) for timed in (helps, checks))
    return Result(
        case="start",
        command="python -m bench start",
        work=f"from the start of the process to the end of the first optimizer step, over {SAMPLES} JPEG images with a question each and "
        "a model folder in LLaVA's form: `eyeline train` against a script that loads model, tokenizer and image processor by transformers "
        "and calls its Trainer. Files are in the page cache and compiled bytecode exists.",
        agreement=f"the loss of the first step agrees within {apart:.1e}",
        comparisons=(
            Comparison(
                name="to the first step", unit="starts", amount=1, ours=times["ours"], peer=times["peer"], limit=0.75, judged="time"
            ),
        ),
        facts=(
            Fact(name="eyeline --help, wall s (median)", value=help_s.median, limit="≤ 1.0", met=help_s.median <= 1.0),
            Fact(name="eyeline --help, wall s (range)", value=f"{help_s.low:.2f}–{help_s.high:.2f}"),
            Fact(name="eyeline --help imports torch", value="no" if without_torch else "yes", limit="no", met=without_torch),
            Fact(name="eyeline check, wall s (median)", value=check_s.median),
            Fact(name="eyeline check, wall s (range)", value=f"{check_s.low:.2f}–{check_s.high:.2f}"),
            *(Fact(name=f"{name}, CPU s (median)", value=seconds.median) for name, seconds in imports.items()),
        ),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )


def prepare(folder: Path) -> Path:
    """Model, images, data and recipe in `folder`; returns the recipe."""
    bundle, _ = made(SIZED, folder / "model")
    (folder / "images").mkdir()
    rows = []
    for n in range(SAMPLES):
        pixels = rng_for(0, "bench image", n).integers(0, 256, (8, 8, 3)).astype("uint8")
        Pillow.fromarray(pixels).resize((SIZED.image, SIZED.image)).save(folder / "images" / f"{n}.jpg", quality=90)
        turns = [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": ANSWER}]
        rows.append({"id": str(n), "image": f"images/{n}.jpg", "conversations": turns})
    (folder / "data.json").write_text(json.dumps(rows))
    encoder = bundle.encoder()
    assert TEMPLATE == "plain"  # whose rendering the next line and the peer's script write out: image, question, newline, answer, end
    tokens = SAMPLES * (SIZED.visual + len(encoder.ids(QUESTION + "\n")) + len(encoder.ids(ANSWER)) + 1)
    trained = {"how": "full", "lr": 1e-3}
    stage = {
        "name": "tune",
        "trains": {"vision": trained, "projector": trained, "language": trained},
        "data": {"sources": [{"path": str(folder / "data.json")}]},
        "batch": {"max_tokens": tokens, "max_patches": SAMPLES * SIZED.visual},
        "steps": 100_000,
    }
    recipe = {"name": "bench-start", "model": {"path": str(folder / "model")}, "device": "cpu", "threads": 1, "stages": [stage]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def steps_in(metrics: Path) -> list[float]:
    """The losses of the steps that a run has written so far."""
    return [line["loss"] for line in read_lines(metrics) if line["kind"] == "step"]


def started(arguments: Sequence[str], output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Python with these arguments, with one thread, in the interpreter that runs now."""
    # `env` replaces itself by Python, so the process is Python's; only parallel/ reads the environment here
    command = ["env", "OMP_NUM_THREADS=1", sys.executable, *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def ended(arguments: Sequence[str]) -> Timed:
    """Run a command to its end. Refused when it fails."""
    begin = time.perf_counter()
    process = started(arguments)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Refused(f"`python {' '.join(arguments)}` ended with code {process.returncode}. Run it by hand to see why.")
    return Timed(cpu_s=usage.ru_utime + usage.ru_stime, wall_s=time.perf_counter() - begin)


def until(arguments: Sequence[str], ready: Callable[[], bool], folder: Path) -> Timed:
    """Run a command until `ready`, then end it. Refused when it ends before that, or takes too long."""
    log = folder / "output.txt"
    begin = time.perf_counter()
    with open(log, "wb") as output:
        process = started(arguments, output.fileno())
        try:
            while not ready():
                if process.poll() is not None or time.perf_counter() - begin > PATIENCE_S:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise Refused(f"`python {' '.join(arguments)}` made no step (code {process.poll()}). It said:\n{tail}")
                time.sleep(0.005)
            return Timed(cpu_s=cpu_of(process.pid), wall_s=time.perf_counter() - begin)
        finally:
            process.kill()
            process.wait()


def cpu_of(pid: int) -> float:
    """CPU seconds of a running process and of its ended children, by Linux's /proc (a resolution of 10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def imports_torch(arguments: Sequence[str]) -> bool:
    """Whether a command imports torch on its way."""
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    return any(line.rpartition("|")[2].strip() == "torch" for line in done.stderr.splitlines())
