"""`eyeline bench roofline`: the step of a recipe on a named GPU, modelled: where its time would go, and what a compiler would save."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from eyeline.core.errors import Refused, nearest
from eyeline.core.files import write_json
from eyeline.core.log import say
from eyeline.core.words import percent
from eyeline.models import Config
from eyeline.study.roofline import gpus
from eyeline.study.roofline.gpus import GPU, GPUS
from eyeline.study.roofline.price import Line, fused, priced
from eyeline.study.roofline.record import Kind
from eyeline.study.roofline.sizes import config_of
from eyeline.study.roofline.step import Recording, record_step
from eyeline.train.optim import AdamW, AdamW8bit
from eyeline.train.run import Run, Stage
from eyeline.train.start import description


@dataclass(frozen=True)
class Total:
    """The sum over some lines."""

    ms: float
    flops: int
    bytes: int
    launches: int


@dataclass(frozen=True)
class Way:
    """A step as PyTorch runs it, or as a compiler would."""

    step_ms: float
    mfu: float  # of the arithmetic that the model needs
    device_ms: float
    host_ms: float  # until the host has asked for everything: the step takes as long, if that is longer
    launches: int
    host_reads: int
    kinds: dict[str, Total]
    operators: dict[str, Total]  # those that take longest


LONGEST = 20  # operators that are listed


def roofline(
    run: Run,
    gpu_name: str,
    *,
    stage: str | None,
    size: str | None,
    tokens: int | None,
    patches: int | None,
    packs: int | None,
    out: Path | None,
) -> None:
    """Print the roofline of a stage's step, and write it to `out`."""
    gpu = _gpu(gpu_name)
    index = stage_index(run, stage)
    _refuse_unmodelled(run, run.stages[index])
    batch = resized(run, index, tokens, patches, packs).stages[index].batch
    recording = record_step(run, index, config_for(run, size), batch.budget, batch.packs_per_step)
    ways = {"eager": way(priced(recording.operators, gpu), recording, gpu), "fused": way(fused(recording.operators, gpu), recording, gpu)}
    about = _about(run, index, gpu, size, recording)
    for line in (*one_device_lines(run), *_head(about, gpu), *table(ways)):
        say(line)
    if out is not None:
        write_json(out, {"format": 1, "modelled": True, **about, "gpu": asdict(gpu), **{name: asdict(one) for name, one in ways.items()}})


def _refuse_unmodelled(run: Run, stage: Stage) -> None:
    """Raise Refused for settings that change what a step costs, and not what is counted here."""
    if run.precision != "bf16":
        raise Refused(f"precision is {run.precision}, and a roofline is of bf16, which GPUs are made for. Set precision=bf16")
    if run.float8 != "none":
        raise Refused(f"float8 is {run.float8}, and a roofline has no prices for products in FP8. Set float8=none")
    if run.cuda_graph:
        raise Refused("cuda_graph saves launches, and a roofline prices the launches of a step without it. Set cuda_graph=false")
    optimizer, here = stage.optimizer, f"stages.{stage.name}.optimizer"
    if isinstance(optimizer, AdamW8bit) or (isinstance(optimizer, AdamW) and optimizer.small):
        raise Refused(
            f"{here} is AdamW in 8 bits, or with state_dtype, offload or in_backward, and a roofline has prices for torch's fused AdamW "
            f"and Muon. Set {here}={{kind: adamw}}"
        )


def way(lines: Sequence[Line], recording: Recording, gpu: GPU) -> Way:
    """Sum up. A step takes as long as its kernels, or as the host takes to ask for them, and for each wait of the host on top."""
    launches, reads = sum(line.launches for line in lines), len(recording.host_reads) + sum(line.host_reads for line in lines)
    device_s, host_s = sum(line.seconds for line in lines), launches * gpus.LAUNCH_S
    step_s = max(device_s, host_s) + reads * gpus.READ_S
    kinds = {kind: _total(line for line in lines if line.kind == kind) for kind in get_args(Kind)}
    by_name: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_name[line.name].append(line)
    longest = sorted(((name, _total(group)) for name, group in by_name.items()), key=lambda pair: -pair[1].ms)[:LONGEST]
    return Way(
        step_ms=step_s * 1e3,
        mfu=recording.needed.total / (step_s * gpu.bf16),
        device_ms=device_s * 1e3,
        host_ms=host_s * 1e3,
        launches=launches,
        host_reads=reads,
        kinds={kind: total for kind, total in kinds.items() if total.launches},
        operators=dict(longest),
    )


def _total(lines: Iterable[Line]) -> Total:
    group = list(lines)
    return Total(
        sum(line.seconds for line in group) * 1e3,
        sum(line.flops for line in group),
        sum(line.bytes for line in group),
        sum(line.launches for line in group),
    )


def table(ways: dict[str, Way]) -> list[str]:
    """A row per kind of operator, and the totals; then the operators that take longest."""
    eager, compiled = ways["eager"], ways["fused"]
    rows: list[tuple[str, ...]] = [("", "ms", "TFLOP", "GB", "launches", "fused: ms", "GB", "launches")]
    for kind in eager.kinds:
        one, other = eager.kinds[kind], compiled.kinds.get(kind, Total(0, 0, 0, 0))
        rows.append((kind, *_figures(one, True), *_figures(other, False)))
    lines = _aligned(rows)
    for name, one in ways.items():
        bound = "" if one.device_ms >= one.host_ms else f" (the host takes longer to ask for it all: {one.host_ms:,.0f} ms)"
        lines.append(
            f"{name}: step {one.step_ms:,.0f} ms, MFU {percent(one.mfu)}, both modelled; kernels {one.device_ms:,.0f} ms in "
            f"{one.launches:,} launches{bound}; the host waits for the GPU {one.host_reads} times"
        )
    rows = [("longest, eager", "ms", "TFLOP", "GB", "launches"), *((name, *_figures(one, True)) for name, one in eager.operators.items())]
    return [*lines, "", *_aligned(rows[: 1 + LONGEST // 2])]


def _figures(one: Total, with_flops: bool) -> tuple[str, ...]:
    return (f"{one.ms:,.1f}", *((f"{one.flops / 1e12:,.1f}",) if with_flops else ()), f"{one.bytes / 1e9:,.1f}", f"{one.launches:,}")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]


def _about(run: Run, index: int, gpu: GPU, size: str | None, recording: Recording) -> dict[str, Any]:
    return {
        "recipe": run.name,
        "stage": run.stages[index].name,
        "model": size or run.model.path or run.name,
        "device": gpu.name,
        "packs": recording.packs,
        "micro_batch": asdict(recording.batch.counts),
        "needed_flops": {**recording.needed.by_part, "recomputed": recording.needed.again},
        "waits": sorted(set(recording.host_reads)),
    }


def _head(about: dict[str, Any], gpu: GPU) -> list[str]:
    counts, needed = about["micro_batch"], sum(x for name, x in about["needed_flops"].items() if name != "recomputed")
    return [
        f"{about['model']}, stage {about['stage']} of {about['recipe']}, on {gpu.name}: a model of a step, not a measurement",
        f"{about['packs']} micro-batch{'es' * (about['packs'] > 1)} of {counts['slots']:,} tokens ({counts['visual']:,} visual, "
        f"{counts['supervised']:,} supervised, {counts['documents']} documents), {counts['patches']:,} patches; the model needs "
        f"{needed / 1e12:,.1f} TFLOP, and recomputes {about['needed_flops']['recomputed'] / 1e12:,.1f}",
        "",
    ]


def _gpu(name: str) -> GPU:
    if name not in GPUS:
        longer = [known for known in GPUS if known.startswith(name)]
        meant = f" Did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(name, list(GPUS))
        raise Refused(f"--gpu {name!r} is not known.{meant} Known: {', '.join(GPUS)}")
    return GPUS[name]


def resized(run: Run, index: int, tokens: int | None, patches: int | None, packs: int | None) -> Run:
    """The recipe with the stage's micro-batches of these sizes, where they are given."""
    stage, asked = run.stages[index], {"max_tokens": tokens, "max_patches": patches, "packs_per_step": packs}
    if not stage.batch.chosen and (tokens is None or patches is None):
        raise Refused("the recipe has batch: auto, and a step here is of packs of one size. Give --tokens and --patches")
    batch = stage.batch.model_copy(update={name: number for name, number in asked.items() if number is not None})
    stages = (*run.stages[:index], stage.model_copy(update={"batch": batch}), *run.stages[index + 1 :])
    return run.model_copy(update={"stages": stages})


def one_device_lines(run: Run) -> Iterator[str]:
    """Say that a recipe's mesh is not in figures of one device, where it has one."""
    if mesh := run.mesh.model_dump(exclude_defaults=True):
        asked = ", ".join(f"{name}: {value}" for name, value in mesh.items())
        yield (
            f"one device computes the whole step here: the recipe's mesh ({asked}) and its collectives are left out. --packs gives the "
            "packs of one rank; `eyeline check --world-size N` counts its memory"
        )


def stage_index(run: Run, stage: str | None) -> int:
    """The place of a stage by its name; the last one where none is named."""
    names = [one.name for one in run.stages]
    if stage is None:
        return len(names) - 1
    if stage not in names:
        raise Refused(f"no stage {stage!r}.{nearest(stage, names)} Stages: {', '.join(names)}")
    return names.index(stage)


def config_for(run: Run, size: str | None) -> Config:
    """The config of a published size, or else that of the recipe's model."""
    if size is not None:
        return config_of(size)
    if run.model.config is not None:
        return run.model.config
    if run.model.path is not None and not Path(run.model.path).exists():
        raise Refused(f"{run.model.path} does not exist. Import the model, or give a published size, such as --size qwen3-vl-2b")
    return description(run).config
