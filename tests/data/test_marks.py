"""A turn that is excluded from the loss is: in every layout, under every trainer's name for the mark, from the row to the batch,
the prepared data, the pages and the evaluation. What cannot be obeyed is rejected by name."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as pq
import pytest

from eyeline.core.batch import IGNORE, Budget, Message, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.core.image_rule import ImageRule
from eyeline.data.images.patches import grey_images
from eyeline.data.layouts.marks import ROW_MARKS, sense_of
from eyeline.data.plan.index import Index
from eyeline.data.prepared.folder import packed_row, packed_sample
from eyeline.data.reader import reader_of
from eyeline.data.report.preview import sample_previews
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.documents import document_of, fit_to_limits, measure, require_answer
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder
from eyeline.evals.exact_match import answer_of, prior_of, question_of, usable
from tests.data.short_samples import DOT, said, sample
from tests.data.small_training import causes, draw, encoder, one, small

WANTED = [["user: [red]What?", "assistant: WRONG", "user: Sure?", "assistant: «right»"]]


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Any], Path]:
    draw(tmp_path / "red.png")

    def write(*rows: Any) -> Path:
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        return tmp_path / "rows.json"

    return write


def talk(mark: dict[str, Any], other: dict[str, Any] | None = None, role: str = "role", text: str = "content") -> list[dict[str, Any]]:
    """Two exchanges, the first answer marked."""
    user, assistant = ("user", "assistant") if role == "role" else ("human", "gpt")
    return [
        {role: user, text: "<image>What?"},
        {role: assistant, text: "WRONG", **mark},
        {role: user, text: "Sure?"},
        {role: assistant, text: "right", **(other or {})},
    ]


LAYOUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "openai": lambda mark: {"images": ["red.png"], "messages": talk(mark)},
    "llava": lambda mark: {"image": "red.png", "conversations": talk(mark, role="from", text="value")},
    "cauldron": lambda mark: {
        "images": ["red.png"],
        "texts": [{"user": "What?", "assistant": "WRONG", **mark}, {"user": "Sure?", "assistant": "right"}],
    },
    "pairs of ms-swift": lambda mark: {
        "images": ["red.png"],
        "conversation": [{"human": "<image>What?", "assistant": "WRONG", **mark}, {"human": "Sure?", "assistant": "right"}],
    },
    "messages under another name": lambda mark: {"images": ["red.png"], "conversation": talk(mark)},
    "TRL": lambda mark: {"images": ["red.png"], "prompt": talk(mark)[:3], "completion": talk(mark)[3:]},
    "turns as JSON text": lambda mark: {"images": ["red.png"], "messages": json.dumps(talk(mark))},
}
MARKS: dict[str, dict[str, Any]] = {
    "OpenAI": {"weight": 0},
    "axolotl": {"train": False},
    "ms-swift": {"loss": False},
    "ms-swift's scale": {"loss_scale": 0.0},
    "LLaMA-Factory": {"loss_weight": 0.0},
    "NeMo": {"loss_mask": 0},
    "torchtune": {"masked": True},
    "axolotl's older name": {"training": False},
    "trainable": {"trainable": 0},
    "train_on_turn": {"train_on_turn": False},
    "in JavaScript's spelling": {"trainOnTurn": False},
    "with a null": {"weight": 0, "loss": None, "train_detail": None},
    "two that agree": {"weight": 0, "loss": False, "masked": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_with_turns_leaves_a_marked_answer_out(written, layout: str) -> None:
    assert one(written(LAYOUTS[layout]({"loss": False}))) == WANTED


@pytest.mark.parametrize("name", MARKS)
def test_every_trainers_mark_is_obeyed(written, name: str) -> None:
    assert one(written(LAYOUTS["openai"](MARKS[name]))) == WANTED


def test_answer_marked_as_in_the_loss_is_in_it(written) -> None:
    on = [{"weight": 1}, {"loss": True}, {"loss_weight": 1.0}, {"masked": False}, {"weight": None}, {"weight": ""}]
    wanted = ["user: [red]What?", "assistant: «WRONG»", "user: Sure?", "assistant: «right»"]
    assert one(written(*map(LAYOUTS["llava"], on))) == [wanted] * len(on)


TALK, TURNS = talk({}), talk({}, role="from", text="value")
ROWS: dict[str, dict[str, Any]] = {
    "a loss mask for each turn": {"messages": TALK, "loss_mask": [0, 0, 0, 1]},
    "a weight for each turn": {"conversations": TURNS, "weights": [0.0, 0.0, 0.0, 1.0]},
    "one for each answer": {"messages": TALK, "loss": [False, True]},
    "one for each answer, others not marked": {"messages": TALK, "loss": [False, None]},
    "as JSON text": {"messages": TALK, "loss_mask": "[0, 0, 0, 1]"},
    "masked": {"messages": TALK, "masked": [1, 0]},
    "of exchanges": {
        "texts": [{"user": "<image>What?", "assistant": "WRONG"}, {"user": "Sure?", "assistant": "right"}],
        "loss_weights": [0, 1],
    },
    "with a history": {"query": "Sure?", "response": "right", "history": [["<image>What?", "WRONG"]], "loss_mask": [0, 1]},
    "NeMo's mask of who asks": {"conversations": talk({"weight": 0}, role="from", text="value"), "mask": "User"},
    "words that are no marks here": {
        "messages": talk({"weight": 0}),
        **{"mask": "masks/1.png", "train": "train", "weight": "3 kg", "loss": None},
    },
    "figures of a filter": {
        "messages": talk({"weight": 0}),
        **{"loss": 0.73, "weight": 72, "train": 3},
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_may_mark_its_turns(written, name: str) -> None:
    assert one(written(ROWS[name] | {"images": ["red.png"]})) == WANTED


def test_parquet_reads_the_marks_of_turns_and_rows(tmp_path: Path) -> None:
    draw(tmp_path / "red.png")
    rows = [
        {"messages": talk({"weight": 0.0}), "images": ["red.png"], "loss_mask": None, "mask": b"an image"},
        {"messages": TALK, "images": ["red.png"], "loss_mask": [0, 0, 0, 1], "mask": b"an image"},
    ]
    pq.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert one(tmp_path / "rows.parquet") == WANTED * 2


def test_columns_say_what_a_mark_is_called(written) -> None:
    row = {"images": ["red.png"], "messages": talk({"keep_it": 0}, {"keep_it": 1})}
    assert one(written(row), columns={"loss": "keep_it"}) == WANTED
    row = {"image": "red.png", "conversations": talk({"bad": True}, role="from", text="value")}
    assert one(written(row), columns={"masked": "bad"}) == WANTED


def marked(**mark: Any) -> dict[str, Any]:
    return {"messages": talk(mark), "images": ["red.png"]}


REJECTED: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "a fraction": (marked(weight=0.5), ("unsupported", "messages[1].weight")),
    "two": (marked(loss_weight=2), ("unsupported", "messages[1].loss_weight")),
    "a negative weight": (marked(weight=-1), ("unsupported", "messages[1].weight")),
    "text": (marked(loss="false"), ("unsupported", "messages[1].loss")),
    "a list": (marked(loss=[0, 1]), ("unsupported", "messages[1].loss")),
    "a mark that is read both ways": (marked(mask=True), ("unsupported", "messages[1].mask")),
    "a mark of words": (marked(train_detail=[{"begin_offset": 0, "train": False}]), ("unsupported", "messages[1].train_detail")),
    "a mark that is not known": (marked(sft_mask=1), ("unsupported", "messages[1].sft_mask")),
    "two that disagree": (marked(weight=0, loss=True), ("unsupported", "messages[1].loss")),
    "a question in the loss": (
        {"messages": [{"role": "user", "content": "a", "train": True}, {"role": "assistant", "content": "b"}]},
        ("unsupported", "messages[0].train"),
    ),
    "a mark of a part": (
        {"messages": [*talk({})[2:3], {"role": "assistant", "content": [{"type": "text", "text": "b", "loss": False}]}]},
        ("unsupported", "messages[1].content[0].loss"),
    ),
    "all of the turns": ({"messages": talk({"weight": 0}, {"weight": 0}), "images": ["red.png"]}, ("no_target", "messages[3].weight")),
    "all of the row": ({"messages": TALK, "images": ["red.png"], "train": False}, ("no_target", "train")),
    "a row of one answer": ({"query": "a", "response": "b", "trainable": 0}, ("no_target", "trainable")),
    "a question with its answer": ({"question": "a", "answer": "b", "loss_mask": [0]}, ("no_target", "loss_mask[0]")),
    "a caption": ({"image": "red.png", "caption": "b", "loss": "0"}, ("no_target", "loss")),
    "a weight of the row": ({"messages": TALK, "images": ["red.png"], "weight": 0.3}, ("unsupported", "weight")),
    "a list of other length": ({"messages": TALK, "images": ["red.png"], "loss_mask": [0, 1, 1]}, ("unsupported", "loss_mask")),
    "a fraction in a list": ({"messages": TALK, "images": ["red.png"], "weights": [0.5, 1]}, ("unsupported", "weights[0]")),
    "a list that is read both ways": ({"messages": TALK, "images": ["red.png"], "mask": [0, 0, 0, 1]}, ("unsupported", "mask")),
    "a mask of the answers": ({"messages": TALK, "images": ["red.png"], "mask": "Assistant"}, ("unsupported", "mask")),
    "a question in a list": ({"messages": TALK, "images": ["red.png"], "loss_mask": [1, 0, 0, 1]}, ("unsupported", "loss_mask[0]")),
}


@pytest.mark.parametrize("name", REJECTED)
def test_marks_that_cannot_be_obeyed_are_rejected_by_name(written, name: str) -> None:
    row, wanted = REJECTED[name]
    path = written(row)
    assert causes(path) == [wanted]


def test_ordinary_keys_of_turns_are_no_marks() -> None:
    keys = ("role", "content", "from", "value", "name", "id", "images", "text", "user", "assistant", "human", "timestamp", "label")
    assert [key for key in keys if sense_of(key) is not None] == []


def test_check_lists_a_column_that_marks_nothing_as_not_read(written) -> None:
    path = written({"messages": talk({}), "images": ["red.png"], "mask": "masks/1.png", "loss_mask": [0, 0, 0, 1]})
    assert open_source(Source(path=str(path))).layout.why == "JSON list; row 0 has messages; not read: mask"
    assert "mask" in ROW_MARKS


# From the sample to the batch


ASKED = sample((DOT, "what?"), "\n\nWRONG", "sure?", "\nright", "and now?", "left")  # a newline might join what the template writes


def masked(conversation: Sample, *answers: int) -> Sample:
    messages = [Message(m.role, m.parts, n not in answers) for n, m in enumerate(conversation.messages)]
    return Sample(conversation.id, tuple(messages), conversation.kind)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_masked_answer_changes_labels_alone(name: str, tokenizers: dict[str, Any], rule: ImageRule) -> None:
    encoder = Encoder(tokenizers[name], TEMPLATES[name])
    whole, part = (document_of(s, encoder, rule, [grey_images(rule)]) for s in (ASKED, masked(ASKED, 1, 3)))
    assert whole.tokens_T.tolist() == part.tokens_T.tolist()
    assert whole.visual_M.tolist() == part.visual_M.tolist()
    kept = part.labels_T != IGNORE
    assert kept.any() and (whole.labels_T[kept] == part.labels_T[kept]).all()
    alone = document_of(sample("x", "left"), encoder, rule, [])  # an answer by itself has as many labels as it has among others
    assert kept.sum() == (alone.labels_T != IGNORE).sum()
    if TEMPLATES[name].learns == "every answer":
        assert (whole.labels_T != IGNORE).sum() > kept.sum()
    assert measure(masked(ASKED, 1, 3), [(8, 8)], encoder, rule).supervised == kept.sum()


def test_a_sample_without_an_answer_in_the_loss_is_rejected(plain: Encoder, tokenizers: dict[str, Any], rule: ImageRule) -> None:
    with pytest.raises(BadSample, match="every answer is excluded"):
        require_answer(masked(ASKED, 1, 3, 5))
    thinking = Encoder(tokenizers["qwen3-thinking"], TEMPLATES["qwen3-thinking"])
    with pytest.raises(BadSample, match="trains on the last answer alone"):
        measure(masked(ASKED, 5), [(8, 8)], thinking, rule)
    assert measure(masked(ASKED, 5), [(8, 8)], plain, rule).supervised > 0
    empty = masked(sample("what?", "", "again?", "right"), 1)
    assert measure(empty, [], plain, rule).supervised == len(plain.ids("right")) + 1


def test_a_shrunk_conversation_ends_with_an_answer_in_the_loss(plain: Encoder) -> None:
    long = sample("a?", "b", "c?", "d", "e?", "f", "g?", "h " * 300)
    fits = measure(Sample("", long.messages[:6]), [], plain, None).tokens
    assert len(fit_to_limits(long, [], fits, 0, "drop_turns", plain, None)[0].messages) == 6
    kept, size = fit_to_limits(masked(long, 3, 5), [], fits, 0, "drop_turns", plain, None)
    assert (len(kept.messages), size.supervised) == (2, len(plain.ids("b")) + 1)
    with pytest.raises(BadSample, match="of the exchanges that fit"):
        fit_to_limits(masked(long, 1, 3, 5), [], fits, 0, "drop_turns", plain, None)


def test_an_archive_of_prepared_data_keeps_the_mark() -> None:
    texts = masked(sample("a?", "b", "c?", "d"), 1)
    row = json.loads(json.dumps(packed_row(texts, [])))
    assert packed_sample(row, texts.id, Path()) == texts
    assert [message.get("loss") for message in row["messages"]] == [None, False, None, None]


def test_an_index_and_the_shown_samples_have_the_mask(written) -> None:
    path = written(LAYOUTS["openai"]({"weight": 0}))
    _, spec, _ = small()
    rows = open_source(Source(path=str(path)))
    index = Index((rows,), encoder(), spec.image, None).shard(0, 0)
    known = index.tokenised(0)
    assert encoder().decode(known.ids_U[known.trained_U].tolist(), special=True) == "right<|im_end|>"
    reader = reader_of(Data(sources=(Source(path=str(path)),)), encoder(), spec.image, seed=0, longest=spec.max_positions)
    [shown] = sample_previews(reader, Budget(tokens=1024, patches=256), 1, thumbnails=False)
    assert [piece.text for piece in shown.pieces if piece.trained] == ["right<|im_end|>"]


def test_index_rejects_a_row_without_trained_answers(written, tokenizers: dict[str, Any]) -> None:
    rows = open_source(Source(path=str(written(LAYOUTS["openai"]({}) | {"loss_mask": [0, 1, 0, 0]}))))
    thinking = Encoder(tokenizers["qwen3-thinking"], TEMPLATES["qwen3-thinking"])
    index = Index((rows,), thinking, small()[1].image, None).shard(0, 0)
    assert index.rejects[0][:2] == ("no_target", "messages")


# Evaluations


def test_an_evaluation_asks_for_the_last_answer_in_the_loss(written) -> None:
    path = written({"images": ["red.png"], "messages": talk({}, {"weight": 0})}, {"images": ["red.png"], "messages": talk({"weight": 0})})
    first, second = (question.sample for question in usable([open_source(Source(path=str(path)))], rejected=Counter()))
    assert (question_of(first), answer_of(first)) == ("What?", "WRONG")
    assert (question_of(second), answer_of(second)) == ("What?\nWRONG\nSure?", "right")
    prior = prior_of([Sample("", tuple(Message(m.role, m.parts, n != 3) for n, m in enumerate(said("What?", "a", "Sure?", "b"))))])
    assert prior.answers == {"What?": "a"}
    assert [isinstance(part, Text) for part in second.messages[-1].parts] == [True]
