"""Case `pack_items`: one epoch over samples of very different lengths, packed (ours) against padded to the longest (Trainer)."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, Stopwatch, Timed, interleaved, needs_peers
from bench.work import Sized, documents, log_normal, made
from eyeline.core.batch import Budget, Document
from eyeline.core.errors import Refused
from eyeline.core.step import step_alone
from eyeline.data.fetch.batches import batch_of
from eyeline.data.plan.plan import Bins, pack_items
from eyeline.models import Config, Model
from eyeline.models.shape import shape
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train.optim import AdamW, make_optimizers, set_learning_rates
from eyeline.train.step import update

SIZED = Sized(image=32, width=64, layers=2, vocabulary=512)
SAMPLES, MEDIAN, P95, LONGEST, SHORTEST = 2000, 180, 1000, 2048, 32
ROWS = 8  # the peer's batch; our budget has about as many tokens as 8 samples have on average
BUDGET = Budget(tokens=2560, patches=1 << 20)
LR = 1e-3
TOLERANCE = 1e-5


def lengths(samples: int = SAMPLES) -> list[int]:
    """Log-normal lengths of the given median and 95th percentile, cut to what the model has positions for."""
    return log_normal("bench lengths", samples, MEDIAN, P95, SHORTEST, LONGEST)


def run(pairs: int = LEAST_PAIRS, samples: int = SAMPLES) -> Result:
    """Check that both sides have the same loss over the samples, then time an epoch of each in pairs."""
    needs_peers()
    from bench import peer

    conditions = Conditions()
    peer.quiet()
    with tempfile.TemporaryDirectory() as folder:
        bundle, model = made(SIZED, Path(folder) / "model")
        docs = documents(SIZED, bundle.encoder().image_token, lengths(samples))
        hf_model = peer.load(Path(folder) / "model")
    examples = [peer.example(d, SIZED) for d in docs]
    initial = {name: x.clone() for name, x in model.state_dict().items()}
    initial_weights = {name: x.clone() for name, x in hf_model.state_dict().items()}

    some = slice(0, 64)
    mine, peers = loss_of(model, docs[some]), peer.loss_of(hf_model, examples[some])
    if abs(mine - peers) > TOLERANCE:
        raise Refused(f"the losses of the two sides are {mine} and {peers} (at most {TOLERANCE} apart): they do not do the same work.")
    slots: list[int] = []

    def ours() -> Timed:
        model.load_state_dict(initial)
        timed, used = epoch(model, bundle.config, docs)
        slots[:] = [used]
        return timed

    def theirs() -> Timed:
        hf_model.load_state_dict(initial_weights)
        return peer.train(hf_model, examples, ROWS, first=0, lr=LR).timed()

    def grouped() -> Timed:
        hf_model.load_state_dict(initial_weights)
        return peer.train(hf_model, examples, ROWS, first=0, lr=LR, strategy="group_by_length").timed()

    times = interleaved({"ours": ours, "peer": theirs, "grouped": grouped}, pairs, "packed")
    real = sum(len(d.tokens_T) for d in docs)
    padded = sum(max(len(d.tokens_T) for d in docs[i : i + ROWS]) * len(docs[i : i + ROWS]) for i in range(0, len(docs), ROWS))
    padding, peer_padding = 1 - real / slots[0], 1 - real / padded
    parameters = sum(p.numel() for p in model.parameters())
    return Result(
        case="packed",
        command="python -m bench packed",
        work=f"one epoch over {samples:,} samples of log-normal length (median {MEDIAN}, 95th percentile {P95:,}, at most {LONGEST:,} "
        f"tokens), {real:,} real tokens, each with an image of {SIZED.visual} patches, half of the text supervised; a model of "
        f"{parameters:,} parameters in LLaVA's form, everything trained, fp32, AdamW. Ours packs into {BUDGET.tokens:,} tokens as it goes, "
        f"the planning inside the time; the peer pads {ROWS} samples to the longest of them, as they come, and once more with its sampler "
        "that groups samples by length, which gives up some randomness of the order.",
        agreement=f"the loss over the first {len(docs[some])} samples agrees within {abs(mine - peers):.1e}",
        comparisons=(
            Comparison(
                name="against padding", unit="real tokens", amount=real, ours=times["ours"], peer=times["peer"], limit=2.0, judged="rate"
            ),
            Comparison(
                name="against padding, grouped by length",
                unit="real tokens",
                amount=real,
                ours=times["ours"],
                peer=times["grouped"],
                limit=None,
                judged="rate",
            ),
        ),
        facts=(
            Fact(name="padding, ours", value=padding, limit="≤ 0.03", met=padding <= 0.03),
            Fact(name="padding, peer", value=peer_padding),
        ),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )


def epoch(model: Model, config: Config, docs: Sequence[Document]) -> tuple[Timed, int]:
    """Pack, lay out and train on every document once; the time, and the token slots used."""
    model.train()
    optimizers = make_optimizers(replace(shape(config), model=model), AdamW())
    set_learning_rates(optimizers, {"vision": LR, "projector": LR, "language": LR}, 1.0)
    watch = Stopwatch()
    slots = 0
    items = ((i, len(d.tokens_T), sum(image.grid.patches for image in d.images)) for i, d in enumerate(docs))
    bins: Bins = []
    for step, chosen in enumerate([*pack_items(items, bins, BUDGET), *(bin.items for bin in bins)]):
        batch = batch_of([docs[i] for i in chosen], BUDGET)
        slots += batch.counts.slots
        update(model, optimizers, step_alone([batch]), ONE_DEVICE, max_grad_norm=1.0, balance=None, seed=0, step=step)
    return watch.read(), slots


@torch.no_grad()
def loss_of(model: Model, docs: Sequence[Document]) -> float:
    """Nats per supervised token over all documents, packed."""
    batches = [batch_of(docs[i : i + 8], None) for i in range(0, len(docs), 8)]
    return sum(float(model(b).out) for b in batches) / sum(b.counts.supervised for b in batches)
