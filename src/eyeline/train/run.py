"""`Run`: a whole recipe as one frozen record, joined from the settings that each pillar declares.

Nothing here is derived or looked up: `recipes/read.py` makes a Run, `recipes/problems.py` examines it, `loop.py` obeys it.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused, nearest
from eyeline.core.files import make_folder, write_atomically
from eyeline.core.plan import PARTS, Part
from eyeline.core.problems import lines_of
from eyeline.core.settings import NotNegative, NotNegativeFloat, PathText, Positive, PositiveFloat, Settings
from eyeline.core.user_code import anchored, content_of, digest_of, files_of, is_code, with_files
from eyeline.core.words import percent
from eyeline.core.yaml_text import read_yaml, write_yaml
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.distill.settings import Distill
from eyeline.evals.metric import FINAL_ANSWER
from eyeline.models import Config
from eyeline.models.lora import LoRA
from eyeline.models.moe import Balance
from eyeline.parallel.mesh import MeshSizes
from eyeline.train.optim import AdamW, Optimizer
from eyeline.train.schedule import WSD, Cosine, Schedule
from eyeline.train.trackers.tracker import ONLINE, Name

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # precision -> dtype of activations and products


class Full(Settings):
    """Train every parameter of the part."""

    how: Literal["full"] = "full"
    lr: PositiveFloat
    freeze_layers: NotNegative = 0  # the first blocks of the part, and the embedding before them, stay as they are


class Adapted(LoRA):
    """Train LoRA adapters on some linear layers of the part; its own weights stay as they are."""

    how: Literal["lora"] = "lora"
    lr: PositiveFloat
    modules_to_save: tuple[str, ...] = ()  # modules of the part that train in full: embed_tokens, lm_head, norm


Trained = Annotated[Full | Adapted, Field(discriminator="how")]


class Checkpointing(Settings):
    """Which activations are recomputed in the backward pass in place of keeping them."""

    parts: Annotated[tuple[Part, ...], Field(min_length=1)] | None = None  # null: all that have blocks
    every: Positive = 1  # every n-th block, from the first on
    policy: Literal["full", "selective"] = "full"  # selective: what matrix products and attention gave is kept
    offload: bool = False  # the inputs of recomputed blocks are kept on the host
    memory_gb: PositiveFloat | None = None  # GB (10⁹ bytes) of a device: as few blocks as make the stage fit, and not every n-th

    @model_validator(mode="after")
    def _one_choice(self) -> "Checkpointing":
        if self.memory_gb is not None and self.every > 1:
            raise ValueError("memory_gb chooses the blocks that are recomputed, and so does every. Leave one of them out")
        if self.offload and self.policy == "selective":
            raise ValueError(
                "offload moves the inputs of blocks to the host, and with policy: selective most of what is kept is what products gave, "
                "which stays on the device. Leave one of them out"
            )
        return self


class Batching(Settings):
    """The size of a step: `packs_per_step` packs (micro-batches), each filled up to `max_tokens` and `max_patches`."""

    max_tokens: Positive | None = None
    max_patches: NotNegative | None = None
    packs_per_step: Positive = 1  # over all devices; on one device it is what is called gradient accumulation steps elsewhere
    auto: bool = False  # both are chosen before the first step; where they are given they were: a run's recipe.yaml has them
    memory_gb: PositiveFloat | None = None  # with auto: GB (10⁹ bytes) of a device that the stage may take; null: nine tenths of a GPU's

    @model_validator(mode="after")
    def _given_or_chosen(self) -> "Batching":
        missing = [name for name in ("max_tokens", "max_patches") if getattr(self, name) is None]
        if missing and not self.auto:
            raise ValueError(f"{' and '.join(missing)} must be given, as whole numbers; or write batch: auto, which chooses both")
        if len(missing) == 1:
            raise ValueError(f"auto chooses max_tokens and max_patches together, and {missing[0]} is not given. Give both, or neither")
        if self.memory_gb is not None and not self.auto:
            raise ValueError("memory_gb is for auto: true, which chooses max_tokens and max_patches: they are given. Leave it or them out")
        return self

    @property
    def chosen(self) -> bool:
        """Return whether the sizes are known: not those of `auto` before a run has chosen them."""
        return self.max_tokens is not None

    @property
    def budget(self) -> Budget:
        assert self.max_tokens is not None and self.max_patches is not None, "batch: auto is chosen first"
        return Budget(self.max_tokens, self.max_patches)


class Distillation(Settings):
    """Learning from the probabilities that a teacher gave its own answers."""

    kl: PositiveFloat  # weight of the divergence from the teacher, next to the cross-entropy's 1
    temperature: PositiveFloat = 1.0  # of both distributions


class Stage(Settings):
    """One phase of training: what learns, how fast, from what, for how long. Parts that `trains` does not name are frozen."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$",
            description="lowercase letters, digits, - and _, at most 40 of them, a letter or digit first",
        ),
    ]
    trains: Annotated[dict[Part, Trained], Field(min_length=1)]
    data: Data
    steps: Positive | None = None
    epochs: Positive | None = None
    batch: Batching
    optimizer: Optimizer = AdamW()
    schedule: Schedule = Cosine()
    max_grad_norm: NotNegativeFloat | None = 1.0  # the norm that gradients are clipped to; null or 0: never
    distill: Distillation | None = None  # learn from the token probabilities of `eyeline distill --top-logprobs`, too
    experts: Balance | None = None  # how experts are balanced; null: not at all
    # recompute the blocks' activations in the backward pass in place of keeping them: true, false, the parts where to, or settings
    gradient_checkpointing: bool | tuple[Part, ...] | Checkpointing = False

    @field_validator("batch", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _one_choice_of_memory(self) -> "Stage":
        if self.batch.auto and self.data.prepared is not None:
            raise ValueError(
                "batch: auto chooses the size of packs, and data.prepared has packs already. Write the max_tokens and max_patches that "
                "they were prepared with"
            )
        if self.batch.auto and isinstance(self.gradient_checkpointing, Checkpointing) and self.gradient_checkpointing.memory_gb is not None:
            raise ValueError(
                "batch: auto chooses packs for the blocks that are recomputed, and gradient_checkpointing.memory_gb chooses blocks for "
                "packs. Leave one of them out: gradient_checkpointing: true goes with batch: auto"
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> "Stage":
        if (self.steps is None) == (self.epochs is None):
            name = f"stages.{self.name}"
            if self.steps is None:
                raise ValueError(f"neither steps nor epochs is given. Give one of them, such as {name}.steps=1000")
            raise ValueError(f"both steps and epochs are given. Remove one: {name}.steps=null or {name}.epochs=null")
        if self.epochs is not None and self.data.mix == "interleave":
            raise ValueError("with mix: interleave each source has its own epochs, so epochs has no meaning for the stage. Give steps")
        warmup, decay = self.schedule.warmup_steps, self.schedule.decay_ratio if isinstance(self.schedule, WSD) else 0.0
        if self.steps is not None and warmup is not None and warmup + round(decay * self.steps) > self.steps:
            after = f" and a decay over {percent(decay)} of the steps" if decay else ""
            raise ValueError(f"schedule: {warmup:,} steps of warm-up{after} do not fit the stage's steps={self.steps}. Lower warmup_steps")
        return self


class Model(Settings):
    """The model to start from: a folder that `eyeline import` or `export` made, a run, or one of the given shape."""

    path: PathText | None = None
    adapter: PathText | None = None  # folder of an adapter of peft's, which the model in path starts with
    fresh: tuple[Part, ...] = ()  # parts of the model in path that start from random weights instead of its own
    config: Config | None = None
    weights: dict[Part, PathText] = Field(
        default_factory=dict
    )  # with config: part -> the model folder or run that it starts from; others are random
    template: str | None = None  # chat template of a model of the given shape; a folder (path, or weights.language) brings its own
    add_tokens: tuple[str, ...] = ()  # new tokens; their rows start at the mean of the others, and train wherever the language model does
    tokenizer: PathText | None = None  # folder of its tokenizer; without one, weights.language's, or a BPE trained on the recipe's texts

    @field_validator("fresh")
    @classmethod
    def _in_order(cls, value: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(part for part in PARTS if part in value)  # a set: the recipe is the same in any order

    @field_validator("add_tokens")
    @classmethod
    def _each_token_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [token for token in value if not token or token != token.strip()]:
            raise ValueError(f"{wrong[0]!r} is empty, or starts or ends with a space; a token is found in text as it is written here")
        if wrong := [token for token in value if value.count(token) > 1]:
            raise ValueError(f"{wrong[0]!r} is named twice. Name each token once")
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> "Model":
        if (self.path is None) == (self.config is None):
            if self.path is None:
                raise ValueError("neither path (a model folder) nor config (a new model) is given. Give one of them")
            raise ValueError(
                "both path (a model folder) and config (a new model) are given. Remove one: model.path=null or model.config=null"
            )
        if self.path is not None and (self.template is not None or self.tokenizer is not None):
            raise ValueError("template and tokenizer belong to a new model; the folder in path has its own. Leave them out")
        if self.config is not None and self.template is None and "language" not in self.weights:
            raise ValueError("a new model needs a chat template: template: plain, or template: qwen2.5")
        if self.adapter is not None and self.path is None:
            raise ValueError("adapter is of the model in path, and there is no path. Give the folder of the model that it was trained on")
        if self.fresh and self.path is None:
            raise ValueError("fresh names parts of the model in path, and there is no path. Remove it: parts that weights lacks are random")
        if self.weights and self.config is None:
            raise ValueError("weights belongs to a new model (config); the folder in path has weights for every part. Leave it out")
        return self


EXACT_MATCH = "exact_match"
METRICS = (EXACT_MATCH, FINAL_ANSWER)
CODE = "code"  # of a run folder: copies of the files of code that its recipe names


def _known_metric(metric: str) -> str:
    if metric not in METRICS and not is_code(metric):
        function = f" Name its function, too: {metric}:score." if metric.endswith(".py") else nearest(metric, METRICS)
        raise ValueError(f"got {metric!r}, wanted {', '.join(METRICS)}, or a function of your own as FILE.py:FUNCTION.{function}")
    return metric


class Evaluation(Settings):
    """The evaluation of `eyeline eval`: every question of `sources`, answered greedily and compared word for word, or by a metric of the
    user's."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    metric: Annotated[str, AfterValidator(_known_metric)] = EXACT_MATCH  # or final_answer, or FILE.py:FUNCTION, a function of your own
    max_new_tokens: Positive = 32  # of an answer, which is cut there

    @model_validator(mode="after")
    def _once(self) -> "Evaluation":
        if any(source.repeat > 1 for source in self.sources):
            raise ValueError("repeat sets how often an epoch visits a source, and an evaluation asks each question once. Leave it out")
        if any(source.weight != 1 for source in self.sources):
            raise ValueError("weight is a share of what is trained on, and an evaluation asks each question once. Leave it out")
        return self


class Run(Settings):
    """A recipe."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,79}$",
            description="letters, digits, ., - and _, at most 80 of them, a letter or digit first",
        ),
    ]
    out: PathText | None = None  # the run folder; runs/<name> when not given
    seed: NotNegative = 0
    model: Model
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    evaluation: Evaluation | None = None
    distill: Distill | None = None  # what `eyeline distill` asks a teacher
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of activations and products; what trains is kept in fp32 in any case
    float8: Literal["none", "tensorwise", "rowwise"] = "none"  # how FP8 is scaled, in the linear layers of the language model
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["none", "blocks"] = "none"  # blocks: PyTorch's compiler makes a graph of each kind of block, before the first step
    cuda_graph: bool = False  # the update as CUDA graphs, captured before the first step: for small micro-batches on one GPU, in bf16
    deterministic: bool = False  # only algorithms that give the same bits every time; on a GPU others are faster
    threads: Positive | None = None  # CPU threads per process; torch's own choice when not given, or a rank's share of the cores
    mesh: MeshSizes = MeshSizes()  # of several ranks (torchrun, or --nproc): what they share out
    logging_steps: Positive = 10  # steps between lines where the screen is not a terminal
    validation_steps: Positive | None = None  # steps; also at the end of a stage. None: never
    top_k_probabilities: NotNegative = 0  # of so many of the most likely tokens, the mean probability on steps that are logged
    validation_samples: NotNegative = 0  # validation questions to answer at each validation; they are kept in the run folder
    report_to: tuple[Name, ...] = ()  # experiment trackers
    report_online: bool = False  # wandb and mlflow send what they are told; otherwise it stays in the run folder
    save_steps: Positive | None = None  # steps; a checkpoint at the end of every stage is always written
    save_minutes: PositiveFloat | None = 30.0  # minutes between checkpoints, by the clock; null: by steps alone
    async_save: bool = False  # a thread writes checkpoints while training continues; the host needs memory for a copy of them
    save_total_limit: Positive = 2  # checkpoints to keep, in addition to the best one
    max_nonfinite_steps: NotNegative = 5  # steps that may be dropped because a loss or gradient is not finite
    max_spike_steps: NotNegative = 0  # steps that may be skipped because their loss is a spike; 0: they are applied
    metrics_for_all_ranks: bool = False  # each rank writes what is its own of each step into metrics-ranks/ of the run folder
    keep_bad_steps: NotNegative = 2  # steps that are not finite or have a loss spike of which batches and weights are kept for `replay`

    @property
    def packs_per_step(self) -> int:
        """The fewest of any stage: as many ranks have something to compute in each step."""
        return min(stage.batch.packs_per_step for stage in self.stages)

    @field_validator("out")
    @classmethod
    def _somewhere(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError(f"got {value!r}, which names no folder. Leave it out for runs/NAME, or write a path")
        return value

    @model_validator(mode="after")
    def _stages_differ(self) -> "Run":
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages need distinct names, got {names}")
        if self.validation_steps and not any(s.data.validation_fraction or s.data.validation for s in self.stages):
            raise ValueError("validation_steps is set, but no stage has data.validation_fraction or data.validation to validate on")
        return self

    @field_validator("report_to", mode="before")
    @classmethod
    def _list_of_trackers(cls, value: Any) -> Any:
        if isinstance(value, str):
            known = value in get_args(Name)
            raise ValueError(f"got {value!r}, wanted a list of {', '.join(get_args(Name))}" + (f", such as [{value}]" if known else ""))
        return value

    @model_validator(mode="after")
    def _trackers_once(self) -> "Run":
        if len(set(self.report_to)) < len(self.report_to):
            raise ValueError(f"report_to names a tracker twice: {', '.join(self.report_to)}")
        if self.report_online and not set(self.report_to) & set(ONLINE):
            raise ValueError(f"report_online is for {' and '.join(ONLINE)}, and report_to has none of them. Leave it out")
        return self

    @model_validator(mode="after")
    def _compiles_what_it_keeps(self) -> "Run":
        for stage in self.stages:
            how = stage.gradient_checkpointing
            if self.compile == "blocks" and isinstance(how, Checkpointing) and how.offload:
                raise ValueError(
                    f"compile: blocks keeps the inputs of blocks inside its graphs, and stages.{stage.name}.gradient_checkpointing.offload "
                    "moves them to the host. Leave one of them out"
                )
            packed = [part for part, one in stage.trains.items() if isinstance(one, Adapted) and one.quantize != "none"]
            if self.compile == "blocks" and packed:
                raise ValueError(
                    f"compile: blocks with stages.{stage.name}.trains.{packed[0]}.quantize is not there yet. Leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _float8_goes_with_the_rest(self) -> "Run":
        if self.float8 == "none":
            return self
        found = [] if self.precision == "bf16" else [f"precision: {self.precision}; what is not in FP8 is in bf16: set precision: bf16"]
        found += [] if self.compile == "none" else [f"compile: {self.compile}; products in FP8 are not compiled yet"]
        cut = [axis for axis in ("tp", "cp", "ep", "pp") if getattr(self.mesh, axis) > 1]
        found += [f"mesh.{axis}; products in FP8 of a part of a layer or of a pack are not there yet" for axis in cut]
        for stage in self.stages:
            one, place = stage.trains.get("language"), f"stages.{stage.name}.trains.language"
            if isinstance(one, Adapted) and one.quantize != "none":
                found.append(f"{place}.quantize: {one.quantize}; its weights are multiplied in {self.precision}")
            if isinstance(one, Adapted) and one.dora:
                found.append(f"{place}.dora; it scales rows of products, which are not in FP8 there yet")
        if found:
            raise ValueError(f"float8: {self.float8} does not go with " + ". Nor with ".join(found))
        return self

    @model_validator(mode="after")
    def _code_has_names(self) -> "Run":
        files = list(files_of(self.model_dump(mode="json")))
        for file in files:
            others = [other for other in files if other != file and Path(other).name == Path(file).name]
            if others:
                raise ValueError(
                    f"{file} and {others[0]} are two code files with the same name, and a run keeps copies of them by name. Rename one"
                )
        return self


def to_yaml(run: Run) -> str:
    """A Run as YAML that `from_yaml` reads back to the same Run: the resolved recipe of a run folder."""
    return write_yaml(run.model_dump(mode="json"))


def write_recipe(folder: Path, run: Run) -> list[str]:
    """Write recipe.yaml of a run folder, and copies of the code that it names, so that the folder can be moved. A copy that changes is
    kept as NAME-DIGEST.py. Names of those that changed."""
    settings, changed = run.model_dump(mode="json"), list[str]()
    for file in files_of(settings):
        copy = folder / CODE / Path(file).name
        content, before = content_of(file), copy.read_bytes() if copy.is_file() else None
        if before is not None and content != before:
            write_atomically(copy.with_name(f"{copy.stem}-{digest_of(before)}.py"), before)
            changed.append(copy.name)
        if content != before:
            make_folder(copy.parent)
            write_atomically(copy, content)
    text = write_yaml(with_files(settings, lambda file: f"{CODE}/{Path(file).name}"))
    write_atomically(folder / "recipe.yaml", text)  # last: a folder with a recipe is complete
    return changed


def from_yaml(text: str, folder: Path = Path()) -> Run:
    """The Run that `to_yaml` or `write_recipe` wrote in a folder. ValueError if it is not one."""
    try:
        value = anchored(read_yaml(text, "the file"), folder)
        return Run.model_validate(value)
    except Refused as error:
        raise ValueError(str(error)) from error
    except ValidationError as error:
        raise ValueError("; ".join(lines_of(Run, value, error))) from error


# Settings that a run may be resumed with, changed: they steer how it is watched and stored, what memory it takes, or how long it goes
# on, and change no number of what was planned. Steps and
# epochs are of stages that have not ended; the schedule of the rest follows the new length. Data may be elsewhere: a reader refuses
# others than those that it stands in. `*` stands for a number.
MAY_CHANGE = (
    "out",
    "device",
    "compile",
    "cuda_graph",
    "deterministic",
    "threads",
    "mesh",
    "logging_steps",
    "validation_steps",
    "top_k_probabilities",
    "validation_samples",
    "report_to",
    "report_online",
    "save_steps",
    "save_minutes",
    "async_save",
    "save_total_limit",
    "max_nonfinite_steps",
    "max_spike_steps",
    "metrics_for_all_ranks",
    "keep_bad_steps",
    "evaluation",
    "distill",
    "stages.*.steps",
    "stages.*.epochs",
    "stages.*.gradient_checkpointing",
    "stages.*.optimizer.offload",
    "stages.*.optimizer.in_backward",
    *(f"stages.*.data.{name}" for name in ("workers", "read_ahead", "decode_timeout", "read_timeout", "read_retries")),
    "stages.*.data.cache",
    "stages.*.data.prepared",
    "stages.*.data.max_reject_rate",
    *(f"stages.*.data.{side}.*.{name}" for side in ("sources", "validation") for name in ("path", "images", "signals")),
)


def differences(old: Run, new: Run, may: bool = False) -> list[str]:
    """`path: old → new` of every setting that differs and may not (see MAY_CHANGE), or of those that may. Code is known by its file's
    name: the run folder has a copy, and what a layout's file says is in the identity of the data."""
    before, after = (leaves(with_files(run.model_dump(mode="json"), lambda file: Path(file).name)) for run in (old, new))
    gone = object()

    def allowed(path: str) -> bool:
        general = ".".join("*" if piece.isdigit() else piece for piece in path.split("."))
        return any(general == name or general.startswith(name + ".") for name in MAY_CHANGE)

    return [
        f"{_named_path(path, new)}: {_value_text(before.get(path, gone), gone)} → {_value_text(after.get(path, gone), gone)}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path, gone) != after.get(path, gone) and allowed(path) == may
    ]


def _named_path(path: str, run: Run) -> str:
    """A setting's path with its stage by name."""
    first, *rest = path.split(".")
    if first == "stages" and rest and rest[0].isdigit() and int(rest[0]) < len(run.stages):
        rest[0] = run.stages[int(rest[0])].name
    return ".".join([first, *rest])


def _value_text(value: Any, gone: object) -> str:
    return "absent" if value is gone else repr(value)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested dicts and lists by its dotted path. Empty containers are leaves."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if children is None or not value:
        return {path: value}
    out: dict[str, Any] = {}
    for key, child in children:
        out |= leaves(child, f"{path}.{key}" if path else str(key))
    return out
