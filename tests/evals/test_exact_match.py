"""Scores against hand counts, rounds against one question at a time, the text-only baseline against the counts of easy-VQA."""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from eyeline.core.batch import Budget, Document, EncodedImage, Message, Sample, Text
from eyeline.core.errors import Refused
from eyeline.core.plan import Spec
from eyeline.core.randomness import torch_rng_for
from eyeline.data.images.decode import decode
from eyeline.data.images.patches import image_patches
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.text.templates import template_named
from eyeline.data.text.tokenizer import Encoder, train_bpe
from eyeline.evals import exact_match as module
from eyeline.evals.exact_match import Prior, after_reasoning, exact_match, prior_of, rounds, thumbnail, usable
from eyeline.evals.metric import final_answer, metric_named, normalise_answer
from eyeline.evals.result import read_result, write_result
from eyeline.generate.generate import Answer
from eyeline.generate.prompts import Prompts
from eyeline.models import llava, qwen2, siglip2
from eyeline.models.shape import build

SHADES = ("red", "green", "blue", "black")
NOTHING = Prior({}, "")


def easy_vqa(folder: Path, rows: Sequence[tuple[str, str, int]], images: int = 4) -> Rows:
    """A folder in easy-VQA's layout."""
    (folder / "images").mkdir(parents=True)
    for n in range(images):
        Pillow.new("RGB", (16, 16), SHADES[n % 4]).save(folder / "images" / f"{n}.png")
    (folder / "questions.json").write_text(json.dumps(rows))
    (folder / "answers.txt").write_text("\n".join(sorted({answer for _, answer, _ in rows})))
    return open_source(Source(path=str(folder)))


def sample(id: str, question: str, answer: str, kind: str = "", *images: EncodedImage) -> Sample:
    return Sample(id, (Message("user", (*images, Text(question))), Message("assistant", (Text(answer),))), kind)


@pytest.fixture(scope="module")
def made() -> tuple[llava.Model, Spec, Encoder]:
    """A random model of 4 patches an image, and a tokenizer."""
    encoder = Encoder(
        train_bpe(["what colour is it?", "is it red?", "yes no circle red blue"], 300, template_named("plain")), template_named("plain")
    )
    config = llava.Config(
        vision=siglip2.Config(image_size=16, patch=8, hidden_size=16, layers=1, heads=2, intermediate_size=16),
        language=qwen2.Config(
            vocab_size=300, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=32, max_positions=64, tie_embeddings=False
        ),
    )
    model = build(config, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch_rng_for(0, "test", parameter.numel())) * 0.4)
    return model, llava.spec(config), encoder


def answering(encoder: Encoder, said: Mapping[str, str]) -> Callable[..., list[Answer]]:
    """Stands in for `generate`: answers a prompt by its id; "…" at the end of an answer cuts it."""

    def generate(model: llava.Model, _facts: Spec, prompts: Sequence[Document], *_: Any) -> list[Answer]:
        assert not model.training
        text = [said[prompt.id] for prompt in prompts]
        return [Answer(tuple(encoder.ids(t.removesuffix("…"))), "length" if t.endswith("…") else "stop") for t in text]

    return generate


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("Yes", " yes. ", True), ("a  red\ncircle", "A red circle!", True), ("yes", "yes no", False), ("2.5", "2 5", False), ("", ".", True)],
)
def test_what_counts_of_an_answer(one: str, other: str, equal: bool) -> None:
    assert (normalise_answer(one) == normalise_answer(other)) == equal


def test_the_scores_are_the_hand_counted_ones(
    tmp_path: Path, made: tuple[llava.Model, Spec, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        ("q", "red", 0),
        ("q", "green", 1),
        ("is it?", "yes", 0),
        ("is it?", "no", 1),
        ("shape?", "circle", 2),
        ("q", "blue", 9),
        ("q", "red", 3),
    ]
    model, spec, encoder = made
    said = dict(zip((f"questions.json#{i}" for i in range(7)), ("Red.", "red", "yes", "yes", "circl…", "", "red"), strict=True))
    monkeypatch.setattr(module, "generate", answering(encoder, said))
    prior = Prior({"q": "red", "is it?": "no"}, "circle")
    model.train()
    heard: list[int] = []
    source = easy_vqa(tmp_path / "test", rows)
    got = exact_match(model, spec, encoder, [source], prior, max_new_tokens=4, stamps={"step": 5}, progress=heard.append)
    assert model.training
    assert (got.overall.correct, got.questions, got.accuracy) == (3, 6, 0.5)  # rows 0, 2 and 6; row 5 has no image
    assert {kind: (s.correct, s.questions) for kind, s in got.by_kind.items()} == {"color": (2, 3), "shape": (0, 1), "yes/no": (1, 2)}
    assert (got.text_only.overall.correct, got.text_only.overall.accuracy) == (4, 4 / 6)  # rows 0, 3, 4 and 6
    assert {kind: s.correct for kind, s in got.text_only.by_kind.items()} == {"color": 2, "shape": 1, "yes/no": 1}
    assert (got.rejected, got.cut, got.max_new_tokens, got.stamps) == ({"missing_image": 1}, 1, 4, {"step": 5})
    assert heard == [1, 2, 3, 4, 5, 6]
    by_id = {s.id: s for s in got.samples}
    assert (by_id["questions.json#1"].answer, by_id["questions.json#1"].prediction, by_id["questions.json#1"].correct) == (
        "green",
        "red",
        False,
    )
    write_result(tmp_path / "eval.json", got)
    assert read_result(tmp_path / "eval.json") == got
    assert exact_match(model, spec, encoder, [source], prior, max_new_tokens=4, limit=2).questions == 2


def test_rounds_answer_as_one_by_one(tmp_path: Path, made: tuple[llava.Model, Spec, Encoder]) -> None:
    """The order of the images, the shared encodings and the neighbours change no answer."""
    model, spec, encoder = made
    rows = [(f"what is it{'?' * (n % 5)}", "x", n % 3) for n in range(12)]
    source = easy_vqa(tmp_path / "test", rows, images=3)
    sizes = {"all": Budget(10_000, 10_000), "few": Budget(90, 10_000), "images": Budget(10_000, 8), "one": Budget(1, 1)}
    found = {}
    for name, budget in sizes.items():
        got = exact_match(model, spec, encoder, [source], NOTHING, max_new_tokens=5, budget=budget)
        assert got.questions == 12
        found[name] = {s.id: s.prediction for s in got.samples}
    assert found["all"] == found["few"] == found["images"] == found["one"]
    assert len(set(found["all"].values())) > 3


def test_rounds_keep_to_their_budgets_and_use_them(tmp_path: Path, made: tuple[llava.Model, Spec, Encoder]) -> None:
    _, spec, encoder = made
    source = easy_vqa(tmp_path / "test", [("why" * (1 + n * 7 % 11 % 5), "x", n % 4) for n in range(60)])
    questions = list(usable([source], Counter()))

    def fits(round: Sequence[tuple[module.Question, Document]], budget: Budget) -> bool:
        images = {image.key for _, prompt in round for image in prompt.images}
        room = len(round) * (max(len(prompt.tokens_T) for _, prompt in round) + 5)
        return room <= budget.tokens and len(images) * 4 <= budget.patches

    for budget, count in ((Budget(120, 10_000), None), (Budget(10_000, 8), 2), (Budget(10_000, 10_000), 1)):
        cut = list(rounds(questions, Prompts(encoder, spec.image), 5, budget, 64, Counter()))
        assert sorted(q.sample.id for r in cut for q, _ in r) == sorted(q.sample.id for q in questions)
        assert all(fits(round, budget) for round in cut)
        assert not any(fits([*round, following[0]], budget) for round, following in pairwise(cut))
        assert count is None or len(cut) == count


def test_an_image_is_decoded_once_for_all_its_questions(
    tmp_path: Path, made: tuple[llava.Model, Spec, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, spec, encoder = made
    source = easy_vqa(tmp_path / "test", [("q", "x", n % 3) for n in range(30)])
    monkeypatch.setattr("eyeline.generate.prompts.KEPT", 1)  # only the last one is remembered, so they must follow one another
    opened: list[str] = []
    monkeypatch.setattr(
        "eyeline.generate.prompts.image_patches", lambda image, rule: opened.append(image.name) or image_patches(image, rule)
    )
    list(rounds(usable([source], Counter()), Prompts(encoder, spec.image), 5, Budget(200, 10_000), 64, Counter()))
    assert sorted(opened) == [f"images/{n}.png" for n in range(3)]


def test_unaskable_questions_are_counted_none_left_is_refused(tmp_path: Path, made: tuple[llava.Model, Spec, Encoder]) -> None:
    model, spec, encoder = made
    source = easy_vqa(tmp_path / "test", [("é" * 40, "x", 0), ("q", "x", 7), ("q", "x", 8)])
    with pytest.raises(Refused, match=r"{'missing_image': 2, 'too_long': 1}"):
        exact_match(model, spec, encoder, [source], NOTHING, max_new_tokens=5)


def test_the_prior_is_the_majority_and_ties_go_to_the_first_met() -> None:
    said = [("a?", "yes"), ("a?", "No"), ("a?", "no."), ("b?", "zebra"), ("b?", "ape"), ("c?", "yes"), ("d?", "Yes")]
    prior = prior_of(sample(str(n), q, a) for n, (q, a) in enumerate(said))
    assert prior.answers == {"a?": "no", "b?": "zebra", "c?": "yes", "d?": "yes"}
    assert prior.guess("unknown?") == "yes"
    assert prior_of([]).guess("q") == ""


def test_a_conversation_is_asked_its_last_question() -> None:
    turns = ("hello", "hi", "and now?", "Then.")
    messages = tuple(Message("user" if n % 2 == 0 else "assistant", (Text(t),)) for n, t in enumerate(turns))
    assert module.question_of(Sample("x", messages)) == "hello\nhi\nand now?"
    assert module.answer_of(Sample("x", messages)) == "Then."


def test_the_shown_samples_depend_neither_on_order_nor_on_answers() -> None:
    def shown(samples: Iterable[Sample], prediction: str) -> set[str]:
        tally = module.Tally()
        for one in samples:
            tally.add(module.Answered(one, prediction, False, float(prediction == "x"), 0))
        return {a.sample.id for a in tally.samples()}

    samples = [sample(f"s#{n}", "q", "x") for n in range(50)]
    first = shown(samples, "x")
    assert len(first) == module.SHOWN
    assert first == shown(reversed(samples), "y")


def test_wrong_answers_are_kept_apart_whatever_the_order() -> None:
    """However few they are among the rest."""
    samples = [sample(f"s#{n}", "q", "x") for n in range(400)]
    wrong = {f"s#{n}" for n in range(0, 400, 25)}  # 16

    def kept(samples: Iterable[Sample]) -> list[str]:
        tally = module.Tally()
        for one in samples:
            tally.add(module.Answered(one, "y", False, float(one.id not in wrong), 0))
        return [answered.sample.id for answered in tally.wrong()]

    first = kept(samples)
    assert len(first) == module.SHOWN and set(first) < wrong
    assert first == kept(reversed(samples))


@pytest.mark.parametrize(("size", "kind"), [((40, 20), "png"), ((900, 300), "jpeg")])
def test_thumbnails_are_small_and_those_of_small_images_exact(tmp_path: Path, size: tuple[int, int], kind: str) -> None:
    image = EncodedImage("p", tmp_path / "p.png")
    Pillow.effect_noise(size, 90).convert("RGB").save(tmp_path / "p.png")
    head, data = thumbnail(image).split(",")
    assert head == f"data:image/{kind};base64"
    again = decode(EncodedImage("again", base64.b64decode(data)))
    assert max(again.shape[:2]) <= module.THUMBNAIL
    assert abs(again.shape[1] / again.shape[0] - size[0] / size[1]) < 0.02
    if kind == "png":
        assert (again == decode(image)).all()


def test_a_reader_of_easy_vqa_who_never_looks_reaches_67_percent() -> None:
    """67.0 % by question, 37.3 % by always saying yes, over 9,673 questions, counted apart from this code."""
    pytest.importorskip("easy_vqa")
    train, test = (open_source(Source(path=f"package:easy_vqa/data/{split}")) for split in ("train", "test"))
    rejected: Counter[str] = Counter()
    prior = prior_of(question.sample for question in usable([train], rejected))
    asked = [question.sample for question in usable([test], rejected)]
    right = sum(prior.guess(module.question_of(s)) == normalise_answer(module.answer_of(s)) for s in asked)
    assert (len(asked), not rejected) == (9673, True)
    assert round(100 * right / 9673, 1) == 67.0
    assert round(100 * sum(module.answer_of(s) == prior.default for s in asked) / 9673, 1) == 37.3


@pytest.mark.parametrize(
    ("text", "final"),
    [("I count.\nAnswer: 3", "3"), ("Answer: 2? No. answer: 3", "3"), ("just 3", "just 3"), ("Answer:", "")],
)
def test_the_final_answer_follows_the_last_marker(text: str, final: str) -> None:
    assert final_answer(text) == final
    assert metric_named("final_answer").score(text, "3", dict) == (final == "3")


def test_reasoning_before_an_answer_is_left_out() -> None:
    encoder = SimpleNamespace(controls={"</think>": 7})
    assert after_reasoning((1, 7, 2, 7, 3, 4), encoder) == (3, 4)  # type: ignore[arg-type]
    assert after_reasoning((1, 2), encoder) == (1, 2)  # type: ignore[arg-type]
    assert after_reasoning((1, 7), SimpleNamespace(controls={})) == (1, 7)  # type: ignore[arg-type]
