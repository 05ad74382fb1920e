"""Case `step`: one optimizer step of a tiny VLM, our model and update against transformers' under its Trainer."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, Stopwatch, Timed, interleaved, needs_peers
from bench.work import Sized, documents, made
from eyeline.core.batch import Document
from eyeline.core.errors import Refused
from eyeline.core.step import step_alone
from eyeline.data.fetch.batches import batch_of
from eyeline.models import Config, Model
from eyeline.models.shape import shape
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train.optim import AdamW, make_optimizers, set_learning_rates
from eyeline.train.step import update

SIZED = Sized(image=64, width=144, layers=4)  # 1.8M parameters
TOKENS, ROWS, STEPS, WARM_UP = 130, 4, 30, 2
LR = 1e-3
TOLERANCE = 1e-5


def run(pairs: int = LEAST_PAIRS) -> Result:
    """Check that both sides have the same losses, then time them in pairs."""
    needs_peers()
    from bench import peer

    conditions = Conditions()
    peer.quiet()
    with tempfile.TemporaryDirectory() as folder:
        bundle, model = made(SIZED, Path(folder) / "model")
        docs = documents(SIZED, bundle.encoder().image_token, [TOKENS] * (ROWS * (WARM_UP + STEPS)))
        hf_model = peer.load(Path(folder) / "model")
    examples = [peer.example(d, SIZED) for d in docs]
    initial = {name: x.clone() for name, x in model.state_dict().items()}
    initial_weights = {name: x.clone() for name, x in hf_model.state_dict().items()}
    config = bundle.config

    def ours() -> Timed:
        model.load_state_dict(initial)
        return train(model, config, docs)[0]

    def theirs() -> Timed:
        hf_model.load_state_dict(initial_weights)
        return peer.train(hf_model, examples, ROWS, first=WARM_UP, lr=LR).timed()

    losses = train(model, config, docs)[1]
    peers = peer.train(hf_model, examples, ROWS, first=WARM_UP, lr=LR, log=True).losses
    worst = max(abs(a - b) for a, b in zip(losses, peers, strict=True))
    if worst > TOLERANCE:
        raise Refused(f"the losses of the two sides differ by up to {worst:.2g} (at most {TOLERANCE}): they do not do the same work.")
    times = interleaved({"ours": ours, "peer": theirs}, pairs, "step")
    parameters = sum(p.numel() for p in model.parameters())
    return Result(
        case="step",
        command="python -m bench step",
        work=f"{STEPS} optimizer steps (after {WARM_UP} that are not timed) of a model of {parameters:,} parameters in LLaVA's form "
        f"(SigLIP tower, two-layer projector, Qwen2), everything trained; {ROWS} samples of {TOKENS} tokens per step, {SIZED.visual} "
        f"of them "
        "visual, a quarter supervised; fp32, AdamW, clipping; batches are laid out (ours) or collated (peer) inside the time.",
        agreement=f"the losses of all {len(losses)} steps of training agree within {worst:.1e}",
        comparisons=(
            Comparison(
                name="a step", unit="optimizer steps", amount=STEPS, ours=times["ours"], peer=times["peer"], limit=0.95, judged="time"
            ),
        ),
        facts=(Fact(name="largest difference of a step's loss", value=worst, limit=f"≤ {TOLERANCE}", met=True),),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )


def train(model: Model, config: Config, docs: Sequence[Document]) -> tuple[Timed, list[float]]:
    """All steps in order; the time of those after the warm-up, and every loss."""
    model.train()
    optimizers = make_optimizers(replace(shape(config), model=model), AdamW())
    set_learning_rates(optimizers, {"vision": LR, "projector": LR, "language": LR}, 1.0)
    losses: list[float] = []
    watch = Stopwatch()
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            watch = Stopwatch()
        batch = batch_of(docs[step * ROWS : (step + 1) * ROWS], None)
        loss = update(model, optimizers, step_alone([batch]), ONE_DEVICE, max_grad_norm=1.0, balance=None, seed=0, step=step).loss
        assert loss is not None, "every document here has labels"
        losses.append(loss)
    return watch.read(), losses
