"""One partition of samples -> the answers that are kept, those that are not, and counts.

    samples.jsonl   a row per answer that is kept, in the layout of messages
    rejected.jsonl  every other answer, and every sample that could not be asked, with the cause
    counts.json     answers by cause, and tokens

Images are written once for all partitions, into files named after their content: a file that is there is the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyeline.core.batch import EncodedImage, Message, Sample, Text, Video
from eyeline.core.files import make_folder, storage_failed, write_atomically
from eyeline.data.images.image_files import in_memory
from eyeline.data.layouts.likely import KEY, packed_likely
from eyeline.data.layouts.media import with_escapes
from eyeline.data.sources.sources import Place
from eyeline.distill.ask import Answered, Asker, Outcome, Row, answer_text, final_answer
from eyeline.distill.prompts import question_text, true_answer, with_question
from eyeline.offline.archives import EXTENSIONS
from eyeline.offline.attempt import Done
from eyeline.offline.plan import Partition

SAMPLES, REJECTED, COUNTS = "samples.jsonl", "rejected.jsonl", "counts.json"
IMAGES = "images"  # of a distilled folder


@dataclass(frozen=True, eq=False)
class WriteAnswers:
    """`write_answers(partition, folder)`: the work on a partition of samples. Pickles."""

    asker: Asker
    rows: Path  # an array of all samples in order: source, and a Place there. It is mapped
    images: Path  # the folder that images are written into
    thinks: bool  # whether the student's template trains on reasoning

    def __call__(self, partition: Partition, folder: Path) -> Done:
        start, end = partition.work
        rows = [Row(source, Place(*place)) for source, *place in np.load(self.rows, mmap_mode="r")[start:end].tolist()]
        outcomes = self.asker.outcomes(rows)
        kept = [self._row(one, answer) for one in outcomes for answer in one.kept]
        dropped = [line for one in outcomes for line in rejected_lines(one)]
        try:
            for name, lines in ((SAMPLES, kept), (REJECTED, dropped)):
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                (folder / name).write_bytes(text.encode("utf-8", "backslashreplace"))  # names of files may hold what is not UTF-8
            (folder / COUNTS).write_text(json.dumps(counts_of(outcomes)))
        except OSError as error:
            raise storage_failed("write", folder, error) from error
        causes = Counter(one.cause for one in outcomes if one.cause is not None)
        return Done({SAMPLES: len(outcomes) - causes.total()}, dict(sorted(causes.items())))

    def _row(self, outcome: Outcome, answer: Answered) -> dict[str, Any]:
        """An answer as a row of messages."""
        sample, found, settings = outcome.sample, answer.found, self.asker.settings
        assert sample is not None
        final = final_answer(outcome, answer, settings)
        shown = sample if found.question is None else with_question(sample, found.question)
        likely = answer.said.likely
        text = answer.said.text if likely is not None else answer_text(found.rationale, final, answer.marker, self.thinks)
        said = {"role": "assistant", "content": with_escapes(text)} | ({} if likely is None else {KEY: packed_likely(likely)})
        messages = [*(_turn(message) for message in shown.messages[:-1]), said]
        row: dict[str, Any] = {"id": f"{outcome.id}/{answer.prompt}/{answer.n}", "messages": messages}
        row |= {"kind": sample.kind} if sample.kind else {}
        row |= self._media(sample)
        row["distilled"] = {
            "sample": outcome.id,
            **_of_answer(answer),
            "rationale": found.rationale,
            "answer": found.answer,
            "teacher": self.asker.teacher.name,
            "settings": settings.model_dump(mode="json", include={"temperature", "top_p", "max_new_tokens"}),
        }
        return row

    def _media(self, sample: Sample) -> dict[str, Any]:
        """The columns of a sample's media, whose files are written."""
        images = [self._file(item) for item in sample.media if isinstance(item, EncodedImage)]
        videos = [item for item in sample.media if isinstance(item, Video)]
        columns: dict[str, Any] = {"images": images} if images else {}
        if videos:
            columns |= {
                "videos": [[self._file(frame) for frame in video.frames] for video in videos],
                "timestamps": [list(video.seconds) for video in videos],
            }
        return columns

    def _file(self, image: EncodedImage) -> str:
        """The path of an image from the distilled folder, where it is written now unless it is there."""
        read = in_memory(image)
        assert isinstance(read, EncodedImage) and isinstance(read.source, bytes)
        name = f"{hashlib.sha256(read.source).hexdigest()[:32]}.{EXTENSIONS.get(read.source[:2], 'jpg')}"
        path = self.images / name[:2] / name
        if not path.exists() or path.stat().st_size != len(read.source):
            make_folder(path.parent)
            write_atomically(path, read.source)
        return f"{IMAGES}/{name[:2]}/{name}"


def _turn(message: Message) -> dict[str, Any]:
    """A message in OpenAI's layout; images and videos are those of the row's columns, in order."""
    turn: dict[str, Any] = {"role": message.role}
    if all(isinstance(part, Text) for part in message.parts):
        turn["content"] = with_escapes("".join(part.text for part in message.parts if isinstance(part, Text)))
    else:
        turn["content"] = [_part(part) for part in message.parts]
    return turn if message.supervised else turn | {"loss": False}


def _part(part: Text | EncodedImage | Video) -> dict[str, str]:
    if isinstance(part, Text):
        return {"type": "text", "text": with_escapes(part.text)}
    return {"type": "image" if isinstance(part, EncodedImage) else "video"}


def _of_answer(answer: Answered) -> dict[str, Any]:
    """What is stored of every answer, kept or not."""
    said = answer.said
    return {
        "prompt": answer.prompt,
        "n": answer.n,
        "seed": answer.seed,
        "finish": said.finish,
        "tokens": {"prompt": said.prompt_tokens, "answer": said.answer_tokens},
    }


def rejected_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """The rows of an outcome that are not kept, as the file of rejects has them."""
    if outcome.bad is not None or outcome.sample is None:
        bad = outcome.bad
        return [{"sample": outcome.id, "cause": bad.cause, "why": str(bad)}] if bad is not None else []
    asked = {"question": question_text(outcome.sample), "true_answer": true_answer(outcome.sample)}
    lines: list[dict[str, Any]] = []
    for one in outcome.answers:
        if one.cause is not None:
            text = {"text": one.said.text} | ({"reasoning": one.said.reasoning} if one.said.reasoning else {})
            why = {"why": one.said.why} if one.said.why else {}
            lines.append({"sample": outcome.id, "cause": one.cause, **why, **_of_answer(one), **asked, "answer": one.found.answer, **text})
    return lines


def counts_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Answers by what became of them, and tokens, of some samples."""
    answers = [answer for one in outcomes for answer in one.answers]
    by_cause = Counter(one.cause or "kept" for one in answers)
    said = [one.said for one in answers]
    return {
        "answers": dict(sorted(by_cause.items())),
        "prompt_tokens": sum(one.prompt_tokens or 0 for one in said),
        "answer_tokens": sum(one.answer_tokens or 0 for one in said),
        "unmeasured": sum(one.finish != "failed" and None in (one.prompt_tokens, one.answer_tokens) for one in said),
    }
