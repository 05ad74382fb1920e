"""Makes the traces in tests/study/traces of what only a GPU shows: `python -m tests.study.make_traces` writes them again, byte for byte.

Those that were recorded come from `record_traces.py`. What a folder holds is in tests/study/traces/README.md.
"""

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.study.made_gpu import Timeline
from tests.study.made_runs import A100, H100, L40S, Card, Moment, Rank, Training, files_of
from tests.study.made_steps import Net, run_step, seconds_of_steps

FOLDER = Path(__file__).parent / "traces"
WARM_UP, PROFILED = 3, 2
Files = dict[str, str]

RECIPE = """\
name: {name}
seed: 0
model: {{path: /models/{name}}}
precision: bf16
device: cuda
validation_steps: {validation}
save_minutes: 30.0
metrics_for_all_ranks: {ranks}
stages:
- name: adapt
  trains:
    projector: {{how: full, lr: 2.0e-05}}
    language: {{how: full, lr: 1.0e-05}}
  data:
    sources: [{{path: /data/mixture, layout: messages}}]
    workers: 4
  batch: {{max_tokens: {tokens}, max_patches: 32768, packs_per_step: {packs}}}
  steps: {steps}
"""


def recipe(name: str, steps: int, tokens: int, packs: int = 1, validation: str = "null", ranks: str = "false") -> str:
    return RECIPE.format(name=name, steps=steps, tokens=tokens, packs=packs, validation=validation, ranks=ranks)


@dataclass(frozen=True)
class Made:
    """A trace and the truth about it."""

    causes: tuple[str, ...]
    fault: str
    files: Callable[[], Files]
    ceiling: dict[str, float]  # by cause


# Profiles

PROPERTIES: dict[str, Any] = {"maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536, "warpSize": 32}


def card_of(card: Card, processors: int) -> dict[str, Any]:
    """Kineto's `deviceProperties` of a card."""
    major, minor = card.capability
    known = {"name": card.hardware, "totalGlobalMem": card.memory, "computeMajor": major, "computeMinor": minor}
    return known | PROPERTIES | {"sharedMemPerBlock": 49152, "numSms": processors}


@dataclass(frozen=True)
class Profile:
    """What is profiled: a machine, a model, and what is wrong with them."""

    seed: int
    card: Card
    processors: int
    name: str
    net: Net
    op_us: float
    tokens: int
    flops: dict[str, int]
    ranks: int = 1

    def timeline(self) -> Timeline:
        gpu = Timeline(self.seed, card_of(self.card, self.processors), self.op_us, ranks=self.ranks)
        for number in range(PROFILED):
            run_step(gpu, WARM_UP + 1 + number, self.net)
        return gpu

    def step_s(self) -> float:
        found = seconds_of_steps(self.timeline())
        return sum(found) / len(found)

    def files(self) -> Files:
        gpu = self.timeline()
        times, wait_s = seconds_of_steps(gpu), self.net.wait_us / 1e6

        def moment(rng: random.Random, number: int) -> Moment:
            at = number - 1 - WARM_UP
            wall = times[at] if 0 <= at < len(times) else sum(times) / len(times) * (0.9 + 0.02 * rng.random())
            seconds = {"data_wait": wait_s, "compute": wall - wait_s - 0.0004, "communication": 0.00006, "other": 0.0003}
            first = {"startup": 52.3, "data_wait": 3.1, "compute": wall * 9} if number == 1 else {}
            return Moment(seconds | first, starved=0.00004, reserved=61_203_283_968, memory=48_318_382_080)

        steps = WARM_UP + 2 * PROFILED + 1
        text = recipe(self.name, steps, self.tokens * 9 // 8, self.ranks)
        slots = self.tokens * 9 // 8 * self.ranks
        training = Training(self.seed, self.card, self.ranks, self.name, steps, self.tokens * self.ranks, slots, self.flops, moment, text)
        trace = json.dumps(gpu.trace("trace.json"), separators=(",", ":"))
        run = files_of(training)
        return {"trace.json": trace, **{f"run/{name}": run[name] for name in ("metrics.jsonl", "recipe.yaml")}}

    def ceiling(self, **without: Any) -> float:
        """The share of the step's time that is won without the fault."""
        return round(1 - replace(self, net=replace(self.net, **without)).step_s() / self.step_s(), 4)


SMALL_KERNELS = Profile(
    seed=14,
    card=L40S,
    processors=142,
    name="so400m-qwen2.5-0.5b",
    net=Net(vision=2, language=4, product_us=13.0, pass_us=5.5, attention_us=16.0, plain=True, block_us=90.0, optimizer_us=260.0),
    op_us=9.0,
    tokens=1_024,
    flops={"vision": 41_000_000_000, "projector": 6_000_000_000, "language": 190_000_000_000, "head": 20_000_000_000},
)
PLAIN_NORMS = Profile(
    seed=15,
    card=H100,
    processors=132,
    name="qwen3-vl-8b",
    net=Net(vision=2, language=4, product_us=310.0, pass_us=112.0, attention_us=270.0, plain=True, trains_base=False),
    op_us=9.0,
    tokens=14_400,
    flops={"vision": 3_900_000_000_000, "projector": 190_000_000_000, "language": 15_200_000_000_000, "head": 1_200_000_000_000},
)
EXPERT_BY_EXPERT = Profile(
    seed=16,
    card=A100,
    processors=108,
    name="qwen3-vl-30b-a3b",
    net=Net(vision=1, language=6, product_us=96.0, pass_us=17.0, attention_us=140.0, reads=3, read_us=420.0, optimizer_us=500.0),
    op_us=11.0,
    tokens=7_200,
    flops={"vision": 900_000_000_000, "projector": 60_000_000_000, "language": 2_000_000_000_000, "head": 300_000_000_000},
)
EXPOSED_GATHERS = Profile(
    seed=18,
    card=H100,
    processors=132,
    name="qwen3-vl-32b",
    net=Net(vision=2, language=5, product_us=180.0, pass_us=30.0, attention_us=150.0, gather_us=3_900.0, optimizer_us=700.0),
    op_us=8.0,
    tokens=7_200,
    flops={"vision": 13_000_000_000_000, "projector": 1_600_000_000_000, "language": 139_000_000_000_000, "head": 6_400_000_000_000},
    ranks=8,
)
ONE_GPU = Profile(
    seed=24,
    card=H100,
    processors=132,
    name="qwen3-vl-2b",
    net=Net(vision=3, language=6, product_us=250.0, pass_us=52.0, attention_us=240.0, wait_us=2_600.0, block_us=70.0, reads=0),
    op_us=9.5,
    tokens=14_400,
    flops={"vision": 7_100_000_000_000, "projector": 420_000_000_000, "language": 21_900_000_000_000, "head": 3_500_000_000_000},
)

# Runs


def near(rng: random.Random, mean: float, share: float = 0.03) -> float:
    return mean * (1 + share * (rng.random() + rng.random() - 1))


def first_step(number: int) -> dict[str, float]:
    """What the first step of an attempt has in addition."""
    return {"startup": 61.2, "data_wait": 4.8} if number == 1 else {}


RETRIES = tuple(0 if n < 4 else (n * 7) % 5 for n in range(1, 41))  # of the allocator, in each step
RETRY_S = 0.42  # to give back what is in reserve, and to ask the driver for it again


def allocator_retries() -> Files:
    def moment(rng: random.Random, number: int) -> Moment:
        retries = RETRIES[number - 1]
        seconds = {"data_wait": near(rng, 0.006), "compute": near(rng, 1.74) + RETRY_S * retries, "communication": 0.00005, "other": 0.004}
        memory = min(63_400_000_000, 51_000_000_000 + 620_000_000 * number)
        reserved = min(83_730_000_000, 70_100_000_000 + 4_600_000_000 * number)
        return Moment(seconds | first_step(number), starved=0.002, memory=memory, reserved=reserved, retries=sum(RETRIES[:number]))

    flops = {"vision": 29_000_000_000_000, "projector": 1_800_000_000_000, "language": 190_000_000_000_000, "head": 6_000_000_000_000}
    text = recipe("qwen3-vl-8b", 40, 16_384)
    return files_of(Training(17, A100, 1, "qwen3-vl-8b", 40, 14_900, 16_384, flops, moment, text, again=58_000_000_000_000))


def retries_share() -> float:
    won = RETRY_S * sum(RETRIES[3:])
    return round(won / (won + 37 * 1.752), 4)


COSTS_SEED, COSTS_STEPS = 19, 30


def costs_of(step: int) -> list[float]:
    """The cost of the packs of each of 8 ranks in a step, over their mean: in each step one rank, not always the same, has a long one."""
    rng = random.Random(COSTS_SEED * 1000 + step)
    costs = [0.8 + 0.25 * rng.random() for _ in range(8)]
    costs[int(rng.random() * 8)] = 1.35 + 0.4 * rng.random()
    mean = sum(costs) / 8
    return [cost / mean for cost in costs]


def long_documents() -> Files:
    def moment(rng: random.Random, number: int) -> Moment:
        costs = costs_of(number)
        slowest = max(costs)
        seconds = {
            "data_wait": near(rng, 0.012),
            "compute": near(rng, 1.31, 0.01) * slowest,
            "communication": near(rng, 0.009),
            "other": 0.005,
        }
        ranks = [Rank(cost, near(rng, 0.39, 0.02) * cost, near(rng, 0.011)) for cost in costs]
        imbalance = {"language": slowest, "vision": near(rng, 1.09), "all": near(rng, slowest * 0.985, 0.01), "vision_before": 1.09}
        return Moment(seconds | first_step(number), ranks, 0.001, imbalance=imbalance)

    flops = {"vision": 400_000_000_000_000, "projector": 30_000_000_000_000, "language": 3_700_000_000_000_000, "head": 90_000_000_000_000}
    text = recipe("qwen3-vl-8b", COSTS_STEPS, 16_384, 8, ranks="true")
    return files_of(Training(19, H100, 8, "qwen3-vl-8b", COSTS_STEPS, 119_000, 131_072, flops, moment, text))


def imbalance_share() -> float:
    slowest = [max(costs_of(n)) for n in range(4, COSTS_STEPS + 1)]
    return round(1.31 * sum(one - 1 for one in slowest) / sum(1.31 * one + 0.027 for one in slowest), 4)


def eight_gpus() -> Files:
    def moment(rng: random.Random, number: int) -> Moment:
        costs = [0.96 + 0.08 * rng.random() for _ in range(8)]
        costs = [cost * 8 / sum(costs) for cost in costs]
        slowest = max(costs)
        seconds = {"data_wait": near(rng, 0.014, 0.5), "compute": near(rng, 0.93, 0.02) * slowest, "communication": near(rng, 0.011)}
        seconds |= {"other": 0.006, "validation": 0.31 if number == 15 else 0.0, "checkpoint": 0.42 if number == 24 else 0.0}
        ranks = [Rank(cost, near(rng, 0.28, 0.03) * cost, near(rng, 0.013)) for cost in costs]
        imbalance = {"language": slowest, "vision": near(rng, 1.06, 0.02), "all": near(rng, slowest, 0.01), "vision_before": 1.21}
        validated = 1.2431 if number == 15 else None
        first = first_step(number)
        return Moment(seconds | first, ranks, near(rng, 0.009), retries=2, imbalance=imbalance, validated=validated)

    flops = {"vision": 300_000_000_000_000, "projector": 21_000_000_000_000, "language": 2_900_000_000_000_000, "head": 90_000_000_000_000}
    text = recipe("qwen3-vl-4b", 28, 16_384, 8, validation="15", ranks="true")
    return files_of(Training(25, H100, 8, "qwen3-vl-4b", 28, 121_000, 131_072, flops, moment, text))


TRACES = {
    "14-small-kernels": Made(
        ("launch_gaps",),
        "a small model on a fast card: kernels of a few microseconds, each of which the host needs longer to ask for",
        SMALL_KERNELS.files,
        {"launch_gaps": 0.0},
    ),
    "15-plain-norms": Made(
        ("memory_bound",),
        "norms, rotary positions and SwiGLU are computed operator by operator, with casts to float32 and back, instead of by a kernel each",
        PLAIN_NORMS.files,
        {"memory_bound": 0.0},
    ),
    "16-expert-by-expert": Made(
        ("host_reads",),
        "the host reads numbers of tokens per expert from the GPU three times in every layer, and asks for nothing meanwhile",
        EXPERT_BY_EXPERT.files,
        {"host_reads": 0.0},
    ),
    "17-allocator-retries": Made(
        ("fragmentation",),
        "the allocator holds nearly all memory in pieces that do not fit, gives it back and asks again, several times per step",
        allocator_retries,
        {"fragmentation": 0.0},
    ),
    "18-exposed-gathers": Made(
        ("communication",),
        "a slow network: gathering the parameters of a block takes longer than computing the block before it",
        EXPOSED_GATHERS.files,
        {"communication": 0.0},
    ),
    "19-long-documents-on-one-rank": Made(
        ("imbalance",),
        "in each step one rank of eight, not always the same, has a pack of long documents, for which the others wait",
        long_documents,
        {"imbalance": 0.0},
    ),
    "24-one-gpu": Made(
        (), "nothing: the data of a step come a little late, and a sixth of the time is in norms and other passes", ONE_GPU.files, {}
    ),
    "25-eight-gpus": Made(
        (), "nothing: a slow first step, one validation, one checkpoint, and two retries of the allocator in the first step", eight_gpus, {}
    ),
}
CEILINGS: dict[str, Callable[[], float]] = {
    "14-small-kernels": lambda: launch_share(SMALL_KERNELS),
    "15-plain-norms": lambda: PLAIN_NORMS.ceiling(plain=False),
    "16-expert-by-expert": lambda: EXPERT_BY_EXPERT.ceiling(reads=0),
    "17-allocator-retries": retries_share,
    "18-exposed-gathers": lambda: EXPOSED_GATHERS.ceiling(gather_us=1.0),
    "19-long-documents-on-one-rank": imbalance_share,
}


def launch_share(profile: Profile) -> float:
    """The share of the profiled time in which no kernel runs: all of it could be won by a host that is never late."""
    gpu = profile.timeline()
    busy = sum(e["dur"] for e in gpu.events if e["ph"] == "X" and e["cat"] == "kernel")
    return round(1 - busy / 1e6 / sum(seconds_of_steps(gpu)), 4)


def truth_of(name: str) -> dict[str, Any]:
    made = TRACES[name]
    profile = name in ("14-small-kernels", "15-plain-norms", "16-expert-by-expert", "18-exposed-gathers", "24-one-gpu")
    of = "profiled steps" if profile else "steps from the fourth on"
    ceiling = {cause: CEILINGS[name]() for cause in made.causes}
    form = "profile" if profile else "run"
    return {"causes": list(made.causes), "fault": made.fault, "origin": "made", "form": form, "ceiling": ceiling, "ceiling_of": of}


def write(name: str, folder: Path) -> None:
    """Write one trace. Files that are large are compressed."""
    files = TRACES[name].files() | {"truth.json": json.dumps(truth_of(name), indent=1, ensure_ascii=False) + "\n"}
    for path, text in files.items():
        target = folder / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path == "trace.json":
            target.with_name("trace.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        else:
            target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in TRACES:
        write(each, FOLDER)
