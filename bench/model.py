"""Case `model`: forward and backward of each family against transformers' class of the same weights, on the same documents.

Twice: one document at a time, which is equal work to the last token; and a mix of lengths, packed (ours) against padded.
"""

import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow

from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, interleaved, timed
from bench.work import log_normal, random_model
from eyeline.bundle.exporting import weights
from eyeline.checkpoint.tensors import renamed, write_folder
from eyeline.core.batch import Budget, Document, EncodedImage, Message, Sample, Text
from eyeline.core.errors import Refused
from eyeline.core.files import write_json
from eyeline.core.image_rule import ImageRule
from eyeline.core.randomness import rng_for
from eyeline.data.fetch.batches import batch_of
from eyeline.data.images.patches import image_patches
from eyeline.data.plan.plan import pack_items
from eyeline.data.text.documents import document_of
from eyeline.data.text.templates import template_named
from eyeline.data.text.tokenizer import Encoder, train_bpe
from eyeline.models import Config, Model, llama, llava, qwen2, qwen3, qwen3_5, qwen3_5_vl, qwen3_vl, siglip2, spec, text
from eyeline.models.hf import mapping_of
from eyeline.models.hf.forms import MediaTokens
from eyeline.models.moe import Experts
from eyeline.models.qwen_vision import Config as QwenVision

VOCABULARY = 1024
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "layers": 4,
    "heads": 6,
    "kv_heads": 2,
    "max_positions": 4096,
    "tie_embeddings": True,
}
SPARSE = Experts(num_experts=8, experts_per_token=2, intermediate_size=192)
TOWER = QwenVision(
    patch=16,
    hidden_size=144,
    layers=4,
    heads=4,
    intermediate_size=576,
    position_grid=16,
    deepstack_layers=(0, 1),
    min_pixels=64**2,
    max_pixels=256**2,
)
PLAIN_TOWER = TOWER.model_copy(update={"deepstack_layers": ()})
DELTA = qwen3_5.Delta(key_heads=2, value_heads=4, key_dim=48, value_dim=48)
GATED = {**SHAPE, "head_dim": 32, "delta": DELTA, "partial_rotary_factor": 0.25, "mrope_section": (2, 1, 1)}
SIGLIP = siglip2.Config(image_size=96, patch=16, hidden_size=144, layers=4, heads=4, intermediate_size=576)
CONFIGS: dict[str, Config] = {
    "llava": llava.Config(vision=SIGLIP, language=qwen2.Config(**SHAPE, intermediate_size=512), feature_norm=False),
    "qwen3_vl": qwen3_vl.Config(vision=TOWER, language=qwen3.Config(**SHAPE, head_dim=32, intermediate_size=512, mrope_section=(6, 5, 5))),
    "qwen3_vl, experts": qwen3_vl.Config(
        vision=TOWER, language=qwen3.Config(**SHAPE, head_dim=32, intermediate_size=512, mrope_section=(6, 5, 5), experts=SPARSE)
    ),
    "qwen3_5_vl": qwen3_5_vl.Config(vision=PLAIN_TOWER, language=qwen3_5.Config(**GATED, intermediate_size=512)),
    "qwen3_5_vl, experts": qwen3_5_vl.Config(vision=PLAIN_TOWER, language=qwen3_5.Config(**GATED, experts=SPARSE, shared_expert_size=192)),
    "text, qwen3": text.Config(language=qwen3.Config(**SHAPE, head_dim=32, intermediate_size=512)),
    "text, llama": text.Config(language=llama.Config(**SHAPE, intermediate_size=512)),
}
ALONE, ALONE_TOKENS = 16, 256  # documents, and about how long: a pass of a second or more, so that noise does not decide
MIXED, MEDIAN, P95, ROWS = 32, 120, 600, 4  # documents; their lengths; the peer's batch
TOLERANCE = 1e-5  # of a loss
GRADIENTS = 1e-4  # of the norm of all gradients: a gated delta rule's, in float32, are good to four digits on either side


def run(pairs: int = LEAST_PAIRS, names: Sequence[str] = tuple(CONFIGS), alone: int = ALONE, mixed: int = MIXED) -> Result:
    """Check that both sides have the same losses and gradients, then time them in pairs, family by family."""
    from bench import peer

    conditions = Conditions()
    peer.quiet()
    encoder = Encoder(train_bpe(["what is in the image?"], 300, template_named("qwen3")), template_named("qwen3"))
    comparisons: list[Comparison] = []
    agreed: list[float] = []
    found: list[Fact] = []
    for name in names:
        c = CONFIGS[name]
        rule = spec(c).image
        with tempfile.TemporaryDirectory() as folder:
            model = made(c, encoder, Path(folder))
            hf_model = peer.hf_model(Path(folder))
        equal = [document(encoder, rule, ALONE_TOKENS, n) for n in range(alone)]
        mix = [document(encoder, rule, tokens, alone + n) for n, tokens in enumerate(lengths(mixed))]
        budget = Budget(max(ROWS * sum(len(d.tokens_T) for d in mix) // len(mix), *(len(d.tokens_T) for d in mix)), 1 << 20)

        sides = {
            "alone": (one_by_one(model, equal), peer.one_by_one(hf_model, equal, rule)),
            "mixed": (in_packs(model, mix, budget), peer.in_rows(hf_model, mix, rule, ROWS)),
        }
        for what, (ours, theirs) in sides.items():
            agreed += [agreement(f"{name}, {what}", (ours(), gradient_norm(model)), (theirs(), gradient_norm(hf_model)))]
        for what, (ours, theirs) in sides.items():
            times = interleaved({"ours": timed(ours), "peer": timed(theirs)}, pairs, f"{name}, {what}")
            single = what == "alone"
            comparisons.append(
                Comparison(
                    name=f"{name}, one document at a time" if single else f"{name}, mixed lengths, packed against padded",
                    unit="real tokens",
                    amount=sum(len(d.tokens_T) for d in (equal if single else mix)),
                    ours=times["ours"],
                    peer=times["peer"],
                    limit=1.0 if single else None,
                    judged="time" if single else "rate",
                )
            )
        found.append(Fact(name=f"parameters of {name}", value=float(sum(p.numel() for p in model.parameters()))))
    return Result(
        case="model",
        command="python -m bench model",
        work=f"Forward and backward, everything trained, fp32, SDPA. One at a time: {alone} documents of about {ALONE_TOKENS} tokens, one "
        f"image of a native size in each. Mixed: {mixed} documents of log-normal length (median {MEDIAN}, 95th percentile {P95}); ours "
        f"in packs, laid out inside the time, the peer's in batches of {ROWS} that are padded beforehand.",
        agreement=f"losses agree within {max(agreed):.1e} of their size, norms of all gradients within {GRADIENTS}",
        comparisons=tuple(comparisons),
        facts=tuple(found),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )


def made(c: Config, encoder: Encoder, folder: Path) -> Model:
    """A model with random weights, also as a folder that transformers loads. No weight is zero: zeros would hide a difference."""
    model = random_model(c)
    mapping = mapping_of(c)
    form = mapping.form(c)
    write_folder(folder, renamed(weights(model, with_updates=True, dtype=torch.float32), mapping.keys(c, form)))
    controls = encoder.controls
    tokens = MediaTokens(
        encoder.image_token, encoder.template.image, controls["<|video_pad|>"], controls["<|vision_start|>"], controls["<|vision_end|>"]
    )
    write_json(folder / "config.json", dict(mapping.to_hf(c, form, tokens)["config.json"]))
    return model


def lengths(documents: int) -> list[int]:
    """Log-normal lengths of the given median and 95th percentile."""
    return log_normal("bench mix", documents, MEDIAN, P95, 64, 1024)


def document(encoder: Encoder, rule: ImageRule | None, tokens: int, number: int) -> Document:
    """About `tokens` tokens: an image where the model sees, a question, and a random answer that fills up."""
    rng = rng_for(0, "bench document", number)
    parts: list[Text | EncodedImage] = [Text("what is in the image?")]
    media, visual = [], 0
    if rule is not None:
        file = io.BytesIO()
        Pillow.fromarray(rng.integers(0, 256, (64 + 32 * (number % 3), 96, 3), np.uint8)).save(file, "PNG")
        encoded = EncodedImage(f"image {number}", file.getvalue())
        media, parts = [image_patches(encoded, rule)], [encoded, *parts]
        visual = sum(image.tokens for image in media[0])
    answer = "".join(map(chr, rng.integers(97, 123, max(8, tokens - visual - 40))))
    sample = Sample(f"document {number}", (Message("user", tuple(parts)), Message("assistant", (Text(answer),))))
    return document_of(sample, encoder, rule, media)


Side = Callable[[], list[float]]  # forward and backward of everything; losses in nats per supervised token, one a document or for all


def one_by_one(model: Model, documents: Sequence[Document]) -> Side:
    def once() -> list[float]:
        model.zero_grad(set_to_none=True)
        losses = []
        for d in documents:
            batch = batch_of([d], None)
            loss = model(batch).out / batch.counts.supervised
            loss.backward()
            losses.append(float(loss.detach()))
        return losses

    return once


def in_packs(model: Model, documents: Sequence[Document], budget: Budget) -> Side:
    """Summed over all, divided once."""

    def once() -> list[float]:
        model.zero_grad(set_to_none=True)
        items = ((d, len(d.tokens_T), sum(image.grid.patches for image in d.images)) for d in documents)
        labels = sum(int((d.labels_T >= 0).sum()) for d in documents)
        bins: list = []
        total = 0.0
        for pack in [*pack_items(items, bins, budget), *(bin.items for bin in bins)]:
            loss = model(batch_of(pack, None)).out / labels
            loss.backward()
            total += float(loss.detach())
        return [total]

    return once


def gradient_norm(model: torch.nn.Module) -> float:
    """The norm of all gradients together, which does not depend on how weights are cut or named."""
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def agreement(name: str, ours: tuple[list[float], float], theirs: tuple[list[float], float]) -> float:
    """The largest relative difference of a loss. Refused when the sides do not do the same work."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True))
    norm = abs(ours[1] - theirs[1]) / theirs[1]
    if worst > TOLERANCE or norm > GRADIENTS:
        raise Refused(
            f"{name}: of the two sides, losses differ by {worst:.2g} of their size (at most {TOLERANCE}) and the norm of all gradients by "
            f"{norm:.2g} (at most {GRADIENTS})."
        )
    return worst
