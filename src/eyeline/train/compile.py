"""Compiled blocks of a stage, made before its first step."""

from collections.abc import Iterator

from eyeline.core.batch import Batch, Budget
from eyeline.core.errors import Refused
from eyeline.core.log import say
from eyeline.core.plan import Plan
from eyeline.core.step import step_alone
from eyeline.core.words import counted, duration
from eyeline.data.fetch.full_batch import PHOTO, TEXT, full_batch
from eyeline.models import Model
from eyeline.models.compiled import attention_problem, compile_blocks, compiler_problem
from eyeline.parallel.launch import Machine
from eyeline.parallel.ranks import Ranks
from eyeline.train.metrics import Clock
from eyeline.train.run import COMPUTE, Run, Stage
from eyeline.train.step import add_gradients

SMALLER = (PHOTO, (64, 64), (16, 16))  # images, in pixels: the first of these that the budget has room for


def refuse_without_compiler(run: Run, here: Machine) -> None:
    """Raise Refused where blocks are to be compiled and nothing can be."""
    if run.compile == "blocks" and (problem := compiler_problem(here.device)):
        raise Refused(problem)


def refuse_attention(plan: Plan[Model], run: Run, here: Machine) -> None:
    """Raise Refused where blocks are to be compiled whose attention cannot be."""
    if run.compile == "blocks" and (problem := attention_problem(plan.model, here.capability, COMPUTE[run.precision])):
        raise Refused(problem)


def compile_first(plan: Plan[Model], run: Run, stage: Stage, ranks: Ranks, clock: Clock) -> None:
    """Have the blocks compiled by a forward and a backward pass over made-up batches of the stage's size, with images and without. Nothing
    of it stays but the graphs."""
    blocks, start = compile_blocks(plan, experts_apart=run.mesh.experts_apart), clock.now()
    for batch in made_up_batches(plan, stage.batch.budget):
        add_gradients(plan.model, step_alone([batch]), ranks, stage.experts, run.seed, 0)
    plan.model.zero_grad(set_to_none=True)
    say(f"compile: the graphs of {counted(len(blocks), 'block')} were made in {duration(clock.now() - start)}")


def made_up_batches(plan: Plan[Model], budget: Budget) -> Iterator[Batch]:
    """One with images, where the model has a tower and the budget room, and one of text alone."""
    image, words, text = plan.spec.image, plan.spec.vocab_size, max(1, min(TEXT, budget.tokens // 4))
    for photo in SMALLER if image is not None else ():
        batch = full_batch(image, words, budget, photo, text)
        if batch.has_images:
            yield batch
            break
    yield full_batch(None, words, budget, text=text)
