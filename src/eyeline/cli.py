"""The command line: a verb each. Nothing heavy is imported before a verb runs, so that `--help` answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from eyeline.core import errors
from eyeline.core.log import say

EXIT_CODES = """
Exit codes: 0 done · 1 a defect of Eyeline (with a traceback) · 2 refused: settings, files or arguments · 3 too many rejected
samples · 4 too many steps that are not finite · 5 storage failed · 6 the run folder is in use · 75 stopped by a signal, all
saved: the same command goes on from there.
"""

app = typer.Typer(
    name="eyeline",
    help="Trains vision-language models in plain PyTorch.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Recipe = Annotated[str, typer.Argument(help="A shipped recipe's name, or the path of a .yaml file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change: seed=1 stages.tune.steps=100")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder, or a folder that export or import made.", show_default=False)]


@app.command(epilog="Example: eyeline train easyvqa-tiny out=runs/first seed=1")
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a recipe. The same command again goes on where the run stopped."""
    run = _read(recipe, overrides)
    from eyeline.recipes.check import refuse_problems
    from eyeline.study.report import write_report
    from eyeline.train.loop import run_folder
    from eyeline.train.loop import train as train_run

    refuse_problems(run)
    train_run(run)
    say(f"report: {write_report(run_folder(run))}")


@app.command(epilog="Example: eyeline check my-recipe.yaml")
def check(recipe: Recipe, overrides: Overrides = None, samples: Annotated[int, typer.Option(help="Samples to show.")] = 3) -> None:
    """Find every problem of a recipe's settings and data, without training, and show the first samples as the model sees them."""
    run = _read(recipe, overrides)
    from eyeline.recipes.check import check as check_run

    if not check_run(run, samples=samples):
        raise typer.Exit(2)


@app.command(name="eval", epilog="Example: eyeline eval runs/easyvqa-tiny --show 10")
def evaluate(
    run: RunFolder,
    show: Annotated[int, typer.Option(help="Answers to print.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Ask only the first questions.")] = None,
    checkpoint: Annotated[str, typer.Option(help="newest, or best (by validation loss).")] = "newest",
) -> None:
    """Answer every question of the recipe's evaluation and write eval.json in the run folder."""
    from eyeline.study.evaluate import evaluate as evaluate_run

    evaluate_run(run, show=show, limit=limit, checkpoint=checkpoint)


@app.command(epilog='Example: eyeline chat runs/easyvqa-tiny --image picture.png   (or, once: --ask "what shape is it?")')
def chat(
    model: ModelFolder,
    image: Annotated[list[Path] | None, typer.Option(help="A picture of the first message; may be given several times.")] = None,
    ask: Annotated[str | None, typer.Option(help="Ask this, print the answer, and end.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0: from all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> None:
    """Talk to a model about pictures, in the terminal."""
    _calm()
    from eyeline.generate.chat import chat as chat_with
    from eyeline.generate.generate import Sampling

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    chat_with(model, images=image or [], ask=ask, sampling=sampling)


def main() -> None:
    """Run the command line; every expected error is one message and its exit code."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except tuple(kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")) as error:
        if debug:
            raise
        print(f"eyeline: {error}", file=sys.stderr)  # noqa: T201 - the program's last word
        sys.exit(error.code)


def _read(recipe: str, overrides: list[str] | None):  # noqa: ANN202 - Run is not imported before a verb runs
    _calm()
    from eyeline.recipes.read import read_recipe

    return read_recipe(recipe, overrides or [])


def _calm() -> None:
    from eyeline.parallel.threads import calm_threads

    calm_threads()
