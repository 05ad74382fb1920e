"""The command line: a verb each. Nothing heavy is imported before a verb runs, so that `--help` answers at once."""

import enum
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eyeline import __version__
from eyeline.core.errors import EXPECTED, Abandoned, ElsewhereFailed, NotFinite, OutOfMemory, Refused, StorageFailed, out_of_memory
from eyeline.core.log import keep_streams, refuse_lost_output, say, visible, warn

EXIT_CODES = (  # one line each: the terminal wraps them
    "Exit codes: 0 done · 1 a defect of Eyeline (with a traceback) · 2 refused: settings, files or arguments · 3 too many rejected "
    "samples · 4 too many non-finite steps · 5 storage failed · 6 the run folder is in use · 7 a step does not fit "
    "into memory · 8 partitions of a job were given up · 9 another rank was lost · 10 the teacher did not answer · 75 stopped "
    "by a signal, all saved: the same command resumes from there · 130 or 143 stopped by a second signal, without saving."
)
IMPORT_EXAMPLE = (
    "Example: eyeline import models/start --vision google/siglip2-base-patch16-224 --language Qwen/Qwen2.5-0.5B-Instruct   (or a whole "
    "model: --model Qwen/Qwen3-VL-2B-Instruct)"
)

app = typer.Typer(
    name="eyeline",
    help="Trains vision-language models in plain PyTorch. With --debug, an error prints its traceback.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _path(text: str) -> Path:
    """A path that was typed; the shell leaves ~ alone in `--out=~/x`."""
    return Path(text).expanduser()


Recipe = Annotated[str, typer.Argument(help="A shipped recipe's name, or the path of a .yaml file.", show_default=False)]
Workers = Annotated[int, typer.Option(min=0, help="Processes that do the work; 0: this one does, or with --ray one per CPU.")]
Shard = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Do the share I (0 to N-1) of N commands that share the folder, as in a Slurm array."),
]
Ray = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Work on a Ray cluster: its address, auto, or local for a new one on this machine."),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change: seed=1 stages.tune.steps=100")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", parser=_path, help="A run folder.", show_default=False)]
JsonFile = Annotated[Path | None, typer.Option(metavar="PATH", parser=_path, help="A JSON file to write.", show_default=False)]
Nproc = Annotated[int, typer.Option(min=1, help="Ranks (processes) to start on this machine, one per GPU.")]
ModelFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", parser=_path, help="A run folder, or a folder that export or import made.", show_default=False)
]


def _version(asked: bool) -> None:
    if asked:
        say(__version__)
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


class Which(enum.Enum):
    newest = "newest"
    best = "best"


class Form(enum.Enum):
    auto = "auto"
    parts = "parts"


class Dtype(enum.Enum):
    fp32 = "fp32"
    bf16 = "bf16"


@app.command(epilog="Example: eyeline train easyvqa-tiny out=runs/first seed=1")
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    nproc: Nproc = 1,
) -> None:
    """Train a recipe. Run the same command again to resume."""
    run = _read(recipe, overrides)
    if nproc > 1:
        sys.exit(_on_ranks(run, nproc))
    from eyeline.parallel.join import checked, started
    from eyeline.recipes.problems import refuse_problems
    from eyeline.study.report import write_report
    from eyeline.train.environment import process_started
    from eyeline.train.loop import run_folder
    from eyeline.train.loop import train as train_run

    world = started()
    first = world.first
    for line in refuse_problems(run, world.size) if first and not checked() else ():
        warn(line)
    train_run(run, process_started=process_started())
    if first:
        say(f"report: {write_report(run_folder(run))}")


@app.command(epilog="Example: eyeline check my-recipe.yaml")
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples to show.")] = 3,
    world_size: Annotated[int, typer.Option(min=1, help="Check for this many ranks; one process is enough to do so.")] = 1,
    size: Annotated[
        str | None,
        typer.Option(help="Mesh and memory alone, of a published model such as qwen3-vl-8b.", show_default=False),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Measure and compare the ranks that torchrun or --nproc has started: devices, network, files.")
    ] = False,
    nproc: Annotated[int, typer.Option(min=1, help="With --cluster: ranks (processes) to start on this machine, one per GPU.")] = 1,
) -> None:
    """Find every problem of a recipe's settings and data, without training, and show the first samples as the model sees them."""
    run = _read(recipe, overrides)
    if not cluster and nproc > 1:
        raise Refused(f"--nproc starts ranks for --cluster. One process checks a recipe for any number of them: --world-size {nproc}")
    if cluster and world_size > 1:
        raise Refused(f"--world-size checks for ranks that are not there, and --cluster checks those that are: --nproc {world_size}")
    if nproc > 1:
        sys.exit(_start_ranks(nproc))
    from eyeline.recipes.check import check as check_run
    from eyeline.recipes.check import check_size
    from eyeline.recipes.cluster import check_cluster

    if cluster and size is not None:
        raise Refused("--size checks a model that is not there, and --cluster the ranks that are. Leave one of them out")
    fits = (
        check_size(run, size, world_size)
        if size is not None
        else check_cluster(run, samples)
        if cluster
        else check_run(run, samples=samples, world_size=world_size)
    )
    if not fits:
        raise typer.Exit(2)
    refuse_lost_output()


@app.command(epilog="Example: eyeline recipe my-data > mine.yaml")
def recipe(name: Annotated[str | None, typer.Argument(help="A shipped recipe. [default: list them]", show_default=False)] = None) -> None:
    """Print a shipped recipe, to be changed and given to train; without a name, list them."""
    _calm()
    from eyeline.recipes.read import recipe_text, shipped_recipes, summary

    say(recipe_text(name) if name else "\n".join(f"{known}: {summary(known)}" for known in shipped_recipes()))
    refuse_lost_output()


@app.command(epilog="Example: eyeline prepare my-recipe.yaml --stage tune --out /data/tune-prepared")
def prepare(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(metavar="PATH", parser=_path, help="The folder to write.", show_default=False)],
    overrides: Overrides = None,
    stage: Annotated[
        str | None, typer.Option(help="The stage to prepare, by name or number; needed where the recipe has several.", show_default=False)
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="The number of epochs whose plan is stored; images and text are stored once.")] = 1,
    resize: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            metavar="QUALITY",
            help="Scale images down to the size that the model sees, and store them as JPEG of this quality.",
        ),
    ] = None,
    workers: Workers = 0,
    shard: Shard = None,
    signals: Annotated[
        bool, typer.Option("--signals", help="Write signals of every row instead: figures to choose rows by, with `where:` of a source.")
    ] = False,
    similarity: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=_path,
            help="With --signals: compare images and answers, too, by the SigLIP checkpoint in this folder.",
            show_default=False,
        ),
    ] = None,
    ray: Ray = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Only name and delete files of attempts that were lost: another attempt's are committed.")
    ] = False,
) -> None:
    """Pack a stage's data offline: index, plan, and archives that training reads from start to end; or, with --signals, compute what rows
    can be chosen by. Run it again to resume."""
    if clean:
        from eyeline.offline.report import clean_jobs

        say(clean_jobs(out))
        return
    run = _read(recipe, overrides)
    from eyeline.offline.run import where_of
    from eyeline.recipes.problems import refuse_problems
    from eyeline.train.prepare import prepare_stage, without_where, write_stage_signals

    if signals and (epochs > 1 or resize is not None):
        raise Refused(f"--{'epochs' if epochs > 1 else 'resize'} changes archives, and --signals writes none. Leave one of them out")
    if similarity is not None and not signals:
        raise Refused("--similarity is a signal, and signals are written with --signals. Give it, or leave --similarity out")
    run = without_where(run) if signals else run
    for line in refuse_problems(run):
        warn(line)
    where = where_of(workers, shard, ray)
    if signals:
        write_stage_signals(run, stage, out, where, similarity)
        return
    prepare_stage(run, stage, out, epochs=epochs, quality=resize, where=where)


@app.command(epilog="Example: eyeline distill my-recipe.yaml --dry 20   (then: --out /data/distilled)")
def distill(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="PATH", parser=_path, help="The folder to write.", show_default=False)] = None,
    dry: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ask for N samples, print answers and verdicts, and estimate tokens, time and cost of all."),
    ] = None,
    top_logprobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Store the K likeliest tokens at each token: distill.top_logprobs=K.", show_default=False),
    ] = None,
    workers: Workers = 0,
    shard: Shard = None,
    ray: Ray = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Only name and delete files of attempts that were lost: another attempt's are committed.")
    ] = False,
) -> None:
    """Ask a teacher for an answer with its reasoning to each sample of the recipe's distill section, and keep those that pass its filters
    as a source to train on. Run it again to resume."""
    if (out is None) == (dry is None):
        raise Refused("give --out with the folder to write, or --dry with a number of samples to try." if out is None else
                      "--dry writes nothing. Give it, or --out.")  # fmt: skip
    if clean and out is not None:
        from eyeline.offline.report import clean_jobs

        say(clean_jobs(out))
        return
    asked = [] if top_logprobs is None else [f"distill.top_logprobs={top_logprobs}"]
    run = _read(recipe, [*(overrides or []), *asked])
    from eyeline.offline.run import where_of
    from eyeline.train.distill import distill_recipe
    from eyeline.train.distill import dry as dry_run

    where = where_of(workers, shard, ray)
    if dry is not None:
        dry_run(run, dry, where)
        refuse_lost_output()
    elif out is not None:
        distill_recipe(run, out, where)


@app.command(epilog="Example: eyeline data my-recipe.yaml --out data.html")
def data(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(metavar="PATH", parser=_path, help="The page to write.")] = Path("data.html"),
    samples: Annotated[int, typer.Option(min=0, help="Samples to show, at least one per source.")] = 6,
    all: Annotated[
        bool, typer.Option("--all", help="Examine every sample, however long it takes. By default, large data are sampled.")
    ] = False,
) -> None:
    """Show a recipe's data: sizes, lengths, padding, rejects, duplicates, samples; in the terminal and as a page without script."""
    run = _read(recipe, overrides)
    from eyeline.data.report.report import THOROUGH, WHOLE
    from eyeline.recipes.check import look

    say(f"page: {look(run, out, samples, WHOLE if all else THOROUGH)}")


@app.command(name="eval", epilog="Example: eyeline eval runs/easyvqa-tiny --show 10")
def evaluate(
    run: RunFolder,
    show: Annotated[int, typer.Option(min=0, help="How many answers to print.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only the first LIMIT questions; eval.json is not changed.")] = None,
    checkpoint: Annotated[Which, typer.Option(help="Which checkpoint to evaluate; best has the lowest validation loss.")] = Which.newest,
    nproc: Nproc = 1,
    dp_shard: Annotated[
        int,
        typer.Option(min=-1, help="Ranks that share the weights. 1: each has all of them, which is fastest where they fit; -1: all ranks."),
    ] = -1,
) -> None:
    """Answer every question of the recipe's evaluation and write eval.json in the run folder."""
    _calm()
    from eyeline.study.evaluate import evaluate as evaluate_run
    from eyeline.study.evaluate import evaluated_run, sizes_for

    if nproc > 1:
        evaluated_run(run)
        sizes_for(dp_shard, nproc)
        sys.exit(_start_ranks(nproc))
    evaluate_run(run, show=show, limit=limit, checkpoint=checkpoint.value, shards=dp_shard)


@app.command(epilog='Example: eyeline chat runs/easyvqa-tiny --image photo.png   (or, once: --ask "what shape is it?")')
def chat(
    model: ModelFolder,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", parser=_path, help="An image of the first message; may be given several times.")
    ] = None,
    ask: Annotated[str | None, typer.Option(help="Ask this one question, print the answer, and exit.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum length of an answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that together have this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many of the likeliest tokens; 0 means all.")] = 0,
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.")] = 0,
    checkpoint: Annotated[Which, typer.Option(help="Which checkpoint of a run; best has the lowest validation loss.")] = Which.newest,
) -> None:
    """Chat with a model about images, in the terminal."""
    _calm()
    from eyeline.generate.chat import chat as chat_with
    from eyeline.generate.sampling import Sampling
    from eyeline.recipes.read import settings_of

    asked = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    sampling = settings_of(Sampling, asked, "the sampling asked for")
    chat_with(model, images=image or [], ask=ask, sampling=sampling, checkpoint=checkpoint.value)
    refuse_lost_output()


VisionEncoder = Annotated[str | None, typer.Option(help="A SigLIP or SigLIP 2 vision encoder to join with --language.", show_default=False)]
FeatureLayer = Annotated[int, typer.Option(help="Which hidden state of the vision encoder to use; -1 is the output of its last block.")]
Transplant = Annotated[
    bool,
    typer.Option("--transplant", help="Build a model with Qwen3-VL's architecture from the vision encoder and a Qwen3, with new mergers."),
]
Tiles = Annotated[
    int, typer.Option(help="Cut large images into tiles: the maximum number of tiles per image, counting the whole image (at most 5).")
]
MinPixels = Annotated[
    int | None,
    typer.Option(min=1, help="With --model, for models that take any image size: smaller images are enlarged to this many pixels."),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(min=1, help="With --model, for models that take any image size: larger images are reduced to this many pixels."),
]
TemplateName = Annotated[str | None, typer.Option(help="Name of the chat template. [default: the tokenizer's own, if it is a known one]")]


@app.command(name="import", epilog=IMPORT_EXAMPLE)
def import_model(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", parser=_path, help="The new model folder.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="A complete model: a folder, or its name on the Hub.", show_default=False)] = None,
    vision: VisionEncoder = None,
    language: Annotated[str | None, typer.Option(help="A language model to join with --vision.", show_default=False)] = None,
    projector: Annotated[str, typer.Option(help="Type of the projector: mlp or linear.")] = "mlp",
    projector_width: Annotated[int | None, typer.Option(help="Hidden size of an mlp projector. [default: the language model's]")] = None,
    shuffle: Annotated[int, typer.Option(help="Pixel shuffle: R×R patches become one token.")] = 1,
    norm: Annotated[bool, typer.Option(help="Put a LayerNorm before the projector.")] = False,
    feature_layer: FeatureLayer = -1,
    feature_norm: Annotated[bool, typer.Option(help="Apply the vision encoder's final norm.")] = True,
    transplant: Transplant = False,
    tiles: Tiles = 1,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    template: TemplateName = None,
    seed: Annotated[int, typer.Option(help="Random seed of the new projector or mergers.")] = 0,
    download_only: Annotated[bool, typer.Option("--download-only", help="Only download the models into FOLDER.")] = False,
) -> None:
    """Import a complete model, or join a vision encoder and a language model with a new projector. Folders or names on the Hub."""
    _calm()
    from eyeline.bundle.hub import download_only as fetch
    from eyeline.bundle.hub import local_folder
    from eyeline.bundle.importing import import_model as join
    from eyeline.bundle.importing import import_whole
    from eyeline.bundle.transplant import transplant as transplant_tower
    from eyeline.models.llava import ProjectorConfig
    from eyeline.recipes.read import settings_of

    if model is not None and (vision is not None or language is not None):
        raise Refused("--model takes a complete model; --vision and --language take the parts of a new one. Give one or the other.")
    if model is None and (min_pixels is not None or max_pixels is not None):
        raise Refused("--min-pixels and --max-pixels need --model: they set the image limits of a complete model. Leave them out.")
    _refuse_idle(context, whole=model is not None, transplant=transplant)
    if download_only:
        fetch([name for name in (model, vision, language) if name is not None], folder)
    elif model is not None:
        import_whole(local_folder(model), folder, min_pixels=min_pixels, max_pixels=max_pixels, template=template)
    elif vision is None or language is None:
        raise Refused("give --model with a complete model, or --vision and --language with the two parts of a new one.")
    elif transplant:
        transplant_tower(local_folder(vision), local_folder(language), folder, template=template, seed=seed)
    else:
        shape = {"kind": projector, "hidden_size": projector_width, "shuffle": shuffle, "norm": norm}
        join(
            local_folder(vision),
            local_folder(language),
            folder,
            projector=settings_of(ProjectorConfig, shape, "the projector asked for"),
            feature_layer=feature_layer,
            feature_norm=feature_norm,
            tiles=tiles,
            template=template,
            seed=seed,
        )


def _refuse_idle(context: typer.Context, whole: bool, transplant: bool) -> None:
    """Refuse options of `import` that would change nothing."""
    if not (whole or transplant):
        return
    idle = [
        "projector",
        "projector_width",
        "shuffle",
        "norm",
        "feature_layer",
        "feature_norm",
        "tiles",
        *(["transplant", "seed"] if whole else []),
    ]
    given = [name for name in idle if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        taken = "a whole model is taken as it is" if whole else "--transplant makes a model of Qwen3-VL's shape"
        raise Refused(f"{taken}, and {names} would change nothing. Leave it out.")


@app.command(epilog="Example: eyeline export runs/easyvqa-tiny exported")
def export(
    model: ModelFolder,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", parser=_path, help="The new folder.", show_default=False)],
    form: Annotated[
        Form, typer.Option(help="parts: one folder per component, even where one class could load the complete model.")
    ] = Form.auto,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write a PEFT adapter, and the base model next to it.")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="fp32 is exact, bf16 is half the size. [default: the dtype of the folder]")] = None,
    checkpoint: Annotated[Which, typer.Option(help="Which checkpoint of a run; best has the lowest validation loss.")] = Which.newest,
) -> None:
    """Write a folder that transformers loads with its own classes and that gives the same logits."""
    _calm()
    from eyeline.bundle.bundle import open_bundle
    from eyeline.bundle.exporting import DTYPES
    from eyeline.bundle.exporting import export as write
    from eyeline.bundle.fill import load

    found = open_bundle(model, checkpoint.value)
    stored = "bf16" if found.in_bf16() else "fp32"
    write(
        found.bundle,
        load(found, "cpu", dtype=DTYPES[stored], keep_adapters=True).model,
        folder,
        form=form.value,
        adapter=adapter,
        dtype=stored if dtype is None else dtype.value,
        trained=found.trained(),
        saved=found.saved_modules(),
    )


@app.command(epilog="Example: eyeline report runs/first   (several: eyeline report runs/first runs/second; prepared: eyeline report /data)")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", parser=_path, help="A run folder, or several.", show_default=False)],
    different: Annotated[
        bool, typer.Option("--different", help="Compare runs although they were measured with other versions or machines.")
    ] = False,
) -> None:
    """Write report.html in a run folder: curves, and samples with images and answers, in one file without script; and print where the
    time went. Of several runs, print their numbers side by side. Of a folder that `prepare` writes, print what is done, how fast, what was
    dropped, and which partitions were slow; of signals, how each is spread."""
    from eyeline.offline.report import JOBS, report_jobs
    from eyeline.offline.signals_report import report_signals
    from eyeline.study.ledger import show_ledger
    from eyeline.study.report import write_report

    run = runs[0]
    if len(runs) > 1:
        from eyeline.study.side_by_side import side_by_side

        side_by_side(runs, different)
        refuse_lost_output()
        return
    if different:
        raise Refused("--different is for several runs, and one is given. Leave it out, or give another run")
    figures = report_signals(run)
    jobs = report_jobs(run) if (run / JOBS).is_dir() else None
    if figures is not None or jobs is not None:
        say("\n".join(text for text in (figures, jobs) if text is not None))
        refuse_lost_output()
        return

    written = write_report(run)
    show_ledger(run)
    say(f"report: {written}")


@app.command(epilog="Example: eyeline compare easyvqa-tiny stages.shapes.steps=20 stages.all.steps=20 --vary threads=1,2 --repeats 5")
def compare(
    recipe: Recipe,
    overrides: Overrides = None,
    vary: Annotated[
        str, typer.Option(metavar="KEY=A,B", help="A setting, and the values to compare; the first is the baseline.", show_default=False)
    ] = "",
    repeats: Annotated[int, typer.Option(min=2, help="Launches of each value. Fewer than 5 see large differences only.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", parser=_path, help="Where the runs go. [default: runs/compare-NAME]", show_default=False),
    ] = None,
) -> None:
    """Train a recipe with each value of a setting, in turns and on equal work, and say which is faster, how sure that is, and the smallest
    difference that could have been seen. Run the same command again to resume."""
    run = _read(recipe, overrides)
    from eyeline.recipes.problems import refuse_problems
    from eyeline.recipes.read import read_recipe
    from eyeline.study.compare import compare as compare_runs
    from eyeline.study.compare import varied

    def run_of(more: Sequence[str]) -> Any:
        found = read_recipe(recipe, more)
        refuse_problems(found)
        return found

    compare_runs(run_of, recipe, overrides or [], varied(vary), repeats, out or Path(f"runs/compare-{run.name}"))
    refuse_lost_output()


@app.command(epilog="Example: eyeline profile easyvqa-tiny --steps 3 --out profile-of-tiny")
def profile(
    recipe: Recipe,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(help="The stage, by name. [default: the last]", show_default=False)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile, and as many without the profiler to check them against.")] = 3,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before that.")] = 5,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", parser=_path, help="A new folder. [default: runs/profile-NAME]", show_default=False)
    ] = None,
) -> None:
    """Profile some steps of a recipe: a trace for a browser, time by part of the model and class of operators, memory over time."""
    run = _read(recipe, overrides)
    from eyeline.recipes.problems import refuse_problems
    from eyeline.study.profile import profile_recipe

    for line in refuse_problems(run):
        warn(line)
    profile_recipe(run, stage, warm_up, steps, out or Path(f"runs/profile-{run.name}"))
    refuse_lost_output()


@app.command(epilog="Example: eyeline watch runs/first runs/second")
def watch(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", parser=_path, help="Run folders, or a folder that has some.", show_default=False)
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0: any that is free.")] = 8765,
) -> None:
    """Serve a live page of runs on this machine alone: curves, throughput, where the time went, answers. It writes nothing."""
    from eyeline.study.watch import watch as serve

    serve(runs, port)


@app.command(
    epilog="Example: eyeline explain runs/mine   (a profile: eyeline explain runs/profile-mine; a hang: eyeline explain --hang runs/mine)"
)
def explain(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|TRACE", parser=_path, help="A run folder; or what `profile` wrote: its folder or trace.", show_default=False
        ),
    ],
    hang: Annotated[bool, typer.Option("--hang", help="What the ranks did when the run hung, or lost one of them.")] = False,
    out: JsonFile = None,
) -> None:
    """Name the causes of lost time, the largest first: evidence, the most that could be won, and what to try; or say that nothing stands
    out. With --hang: which rank of a run that hung or crashed issued other collectives."""
    if hang:
        from eyeline.study.hang import explain_hang

        if out is not None:
            raise Refused("--hang writes no JSON. Leave --out out")
        for line in explain_hang(path):
            say(line)
        refuse_lost_output()
        return
    from eyeline.study.explain.explain import as_json, lines
    from eyeline.study.explain.explain import explain as explain_time

    found = explain_time(path)
    for line in lines(found):
        say(line)
    if out is not None:
        from eyeline.core.files import write_json

        write_json(out, as_json(found))
        say(f"written: {out}")
    refuse_lost_output()


@app.command(epilog="Example: eyeline replay runs/mine/evidence/step-00000012")
def replay(
    step: Annotated[
        Path, typer.Argument(metavar="STEP", parser=_path, help="A folder in RUN/evidence: a step that a run has kept.", show_default=False)
    ],
) -> None:
    """Run a step again, on one device, that was not finite or had a loss spike, and say where the first number that is not finite comes
    from. Exit code 4 if there is one."""
    _calm()
    from eyeline.study.replay import replay as replay_step

    found = replay_step(step)
    refuse_lost_output()
    if found:
        raise typer.Exit(NotFinite.code)


@app.command(epilog="Example: eyeline env")
def env() -> None:
    """Print versions and hardware, as every run stamps them."""
    _calm()
    import json

    from eyeline.parallel.launch import machine
    from eyeline.train.environment import environment

    say(json.dumps(environment(machine()), indent=1, ensure_ascii=False))
    refuse_lost_output()


bench = typer.Typer(
    name="bench",
    help="Measure this machine or a training step on it, or model a step on a GPU that is not here.",
    epilog="Example: eyeline bench machine runs/easyvqa-tiny",
    no_args_is_help=True,
)
app.add_typer(bench)


@bench.command(name="machine", epilog="Example: eyeline bench machine runs/easyvqa-tiny")
def bench_machine(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", parser=_path, help="A run folder.", show_default=False)] = None,
) -> None:
    """Measure this machine's matrix products and, given a run, print its throughput and its MFU against them."""
    _calm()
    from eyeline.study.bench import bench as measure

    measure(run)
    refuse_lost_output()


BenchStage = Annotated[str | None, typer.Option("--stage", help="The stage, by name. [default: the last]", show_default=False)]
Size = Annotated[str | None, typer.Option(help="A published model in place of the recipe's, such as qwen3-vl-8b.", show_default=False)]
Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a micro-batch. [default: the recipe's]", show_default=False)]
Patches = Annotated[int | None, typer.Option(min=0, help="Patches of a micro-batch. [default: the recipe's]", show_default=False)]
Packs = Annotated[int | None, typer.Option(min=1, help="Micro-batches of a step. [default: the recipe's]", show_default=False)]


@bench.command(name="step", epilog="Example: eyeline bench step qwen3-vl-lora --size qwen3-vl-2b compile=blocks")
def bench_step(
    recipe: Recipe,
    overrides: Overrides = None,
    stage: BenchStage = None,
    size: Size = None,
    tokens: Tokens = None,
    patches: Patches = None,
    packs: Packs = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 10,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before that.")] = 3,
    out: JsonFile = None,
) -> None:
    """Time real steps of a recipe on this machine, with made-up weights and data: what it will reach, before anything is downloaded."""
    _calm()
    run = _read(recipe, overrides)
    from eyeline.study.timed_steps import bench_steps

    bench_steps(run, stage=stage, size=size, tokens=tokens, patches=patches, packs=packs, steps=steps, warm_up=warm_up, out=out)
    refuse_lost_output()


@bench.command(name="roofline", epilog="Example: eyeline bench roofline qwen3-vl-lora --gpu h100-80 --size qwen3-vl-8b")
def bench_roofline(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="The GPU, such as h100-80, a100-80, l40s or rtx-4090.")] = "h100-80",
    stage: BenchStage = None,
    size: Size = None,
    tokens: Tokens = None,
    patches: Patches = None,
    packs: Packs = None,
    out: JsonFile = None,
) -> None:
    """Model a step on a named GPU: FLOPs, bytes, launches and waits of every operator, without a GPU, data or weights."""
    run = _read(recipe, overrides)
    from eyeline.study.roofline.roofline import roofline

    roofline(run, gpu, stage=stage, size=size, tokens=tokens, patches=patches, packs=packs, out=out)
    refuse_lost_output()


def main() -> None:
    """Run the command line; every expected error is one message and its exit code."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    keep_streams()
    try:
        app()
    except ElsewhereFailed as error:
        sys.exit(error.code)
    except (*EXPECTED, Abandoned) as error:
        if debug:
            raise
        _end(str(error), error.code)
    except (MemoryError, RuntimeError) as error:
        said = out_of_memory(error)
        if debug or said is None:
            raise
        _end(f"this does not fit into memory ({said}). Use a machine with more memory, or a smaller model", OutOfMemory.code)
    except PermissionError as error:  # of a path that was given, by whatever looks at it first
        if debug:
            raise
        _end(
            f"{error.filename}: {error.strerror}. Give the user who runs this permission to use it, or give another path",
            StorageFailed.code,
        )


def _end(message: str, code: int) -> None:
    print(f"eyeline: {visible(message)}", file=sys.stderr)  # noqa: T201 - the program's last word
    sys.exit(code)


def _on_ranks(run: Any, nproc: int) -> int:
    """This command once for each rank; what does not fit that number or the recipe is refused once, here."""
    from eyeline.recipes.problems import refuse_problems

    for line in refuse_problems(run, nproc):
        warn(line)
    return _start_ranks(nproc)


def _start_ranks(nproc: int) -> int:
    """This command once for each rank, without --nproc: the exit code."""
    from eyeline.parallel.spawn import run_ranks

    arguments = sys.argv[1:]
    while at := next((n for n, word in enumerate(arguments) if word.split("=")[0] == "--nproc"), None):
        del arguments[at : at + (1 if "=" in arguments[at] else 2)]
    return run_ranks(nproc, arguments)


def _read(recipe: str, overrides: list[str] | None):
    _calm()
    from eyeline.recipes.read import read_recipe

    return read_recipe(recipe, overrides or [])


def _calm() -> None:
    from eyeline.parallel.threads import calm_threads, expandable_segments

    calm_threads()
    expandable_segments()
