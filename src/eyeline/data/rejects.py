"""Rejected samples: counted by cause, named by file, row and field, and capped."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyeline.core.errors import BadSample, Refused, TooManyRejects
from eyeline.core.files import append_line, read_lines
from eyeline.core.words import counted, percent

CAUSES: dict[str, str] = {
    # the row
    "not_json": "the line is not JSON",
    "not_finite": "NaN or infinity, which JSON does not have",
    "duplicate_key": "the same key twice in one object",
    "huge_number": "a number with more than 40 digits",
    "nesting": "brackets nested too deeply",
    "line_too_long": "a line over the size limit",
    "damaged_tar": "an archive that ends early or is damaged; what followed is lost",
    "tar_member": "a link, a device, a path that leads out of the archive, or a name that matches no image",
    "tar_key": "a key that an archive has twice, or members that cannot be assigned to one sample",
    "damaged_parquet": "a row group or record batch that cannot be decoded",
    "table_row": "a row with more or fewer fields than the header, or a quote that is never closed",
    "bad_unicode": "invalid UTF-8, or half of a surrogate pair",
    "wrong_type": "a field has another type than its layout requires",
    "role": "an unknown role",
    "role_order": "turns that do not alternate, or do not end with an answer",
    "placeholder_count": "the number of <image> differs from the number of images, or of <video> from videos",
    "image_in_answer": "an image in an answer",
    "image_ignored": "an image, though the source has images: ignore",
    "no_target": "nothing to train on: no answer, an empty one, or every answer excluded from the loss",
    "tool_turn": "a turn or a call of a tool",
    "preference": "answers that are compared or rated, for preference training",
    "unsupported": "something that is not supported: audio, videos without a template for them, another trainer's placeholders for "
    "boxes, loss marks that are neither on nor off",
    "user_code": "a function of your own that failed, or returned no messages",
    # the image
    "remote_url": "a URL where a file is required",
    "bad_path": "a path that cannot name a file",
    "outside_root": "a path that leaves the folder of the images",
    "data_url": "a data: URL or base64 that is not an image, or is too long",
    "missing_image": "the file does not exist",
    "unreadable": "a file without permission to read it",
    "not_a_file": "a folder, device, pipe or special file",
    "file_too_large": "a file over the size limit",
    "image_format": "not an accepted format",
    "too_many_pixels": "more pixels than the limit",
    "empty_image": "no pixels",
    "broken_image": "truncated or damaged",
    "aspect_ratio": "one side over 200 times the other",
    "video_frames": "a video that is not a list of frames with increasing times",
    "video_file": "a video in one file, where a list of frames is required",
    "frame_size": "frames of one video that differ in size",
    "decoder_crashed": "a worker crashed while decoding it, and again while decoding it alone",
    "decoder_hung": "decoding did not finish in time, even alone",
    "decoder_memory": "decoding needs more memory than a decoder may use",
    "image_without_tower": "an image, and the model reads text only",
    # the document
    "control_token": "text that the tokenizer would read as a control token",
    "too_long": "more tokens or patches than a batch holds, or more tokens than the model has positions or data.max_length allows",
}
REMEDIES: dict[str, str] = {  # what to do, a sentence a cause; docs/your-data.md lists the same
    # the row
    "not_json": "Write one JSON value per line with a JSON library, and end lines with a newline only.",
    "not_finite": "Write null, or leave the field out: only Python's json writes NaN.",
    "duplicate_key": "Keep one of the two: it is ambiguous which one is right.",
    "huge_number": "Write long ids as text, in quotes.",
    "nesting": "Flatten the row: a conversation needs five levels.",
    "line_too_long": "Put images into files and name them by path, or use Parquet or WebDataset archives.",
    "damaged_tar": "Download or write the archive again, and compare its size with the original's.",
    "tar_member": "Write regular files only, and name images in the JSON as the archive does.",
    "tar_key": "Write the members of a sample one after another, and give each sample its own key, without dots.",
    "damaged_parquet": "Download or write the file again; a row group that cannot be decoded is lost.",
    "table_row": "Use a CSV writer: it quotes texts with commas, quotes or line breaks, and doubles their quotes.",
    "bad_unicode": "Write the file as UTF-8, and replace halves of surrogate pairs.",
    "wrong_type": "Look at the field that the message names, and write it as docs/your-data.md shows for its layout.",
    "role": "Rename the role to user, assistant or system (human and gpt in LLaVA's layout).",
    "role_order": "Let user and assistant take turns, the user first, and end with an answer.",
    "placeholder_count": "Write as many <image> (or <video>) as the row has images (or videos), or none where the layout allows it.",
    "image_in_answer": "Move the image to the turn before, or write \\<image> where it is text: models here do not generate images.",
    "image_ignored": "Set images: of the source to the folder of its images, or leave it out; ignore is for rows that are read as text.",
    "no_target": "Give the row a non-empty answer, or drop it.",
    "tool_turn": "Drop such conversations, or write calls and results as plain text.",
    "preference": "Keep the good answers only, as messages or prompt and completion.",
    "unsupported": "Drop it, or write what it says as text; videos need a template that supports them, such as qwen3.",
    "user_code": "Look at the line that the message names, and correct the function, or leave the row out.",
    # the image
    "remote_url": "Download the images first, and give the paths of the files: training never waits for the web.",
    "bad_path": "Write the path of a file, without control characters.",
    "outside_root": "Set images: of the source to a folder that holds all images, where paths start: / works for absolute ones.",
    "data_url": "Write data:image/png;base64, and the whole image, or put it into a file.",
    "missing_image": "Set images: of the source to the folder that paths start from, or download what is missing.",
    "unreadable": "Give the training user permission to read the file and the folders above it: chmod -R a+rX.",
    "not_a_file": "Name the image itself, not its folder.",
    "file_too_large": "Save the image smaller: the model sees it resized in any case.",
    "image_format": "Convert it to JPEG, PNG or WebP.",
    "too_many_pixels": "Resize it to at most 89 million pixels.",
    "empty_image": "Save the image again from its source.",
    "broken_image": "Download the file again, and compare its size with the original's.",
    "aspect_ratio": "Cut the image into pieces, or pad its short side.",
    "video_frames": "Give the frames as a list, and a time in seconds for each, increasing.",
    "video_file": "Extract the frames: ffmpeg -i clip.mp4 -vf fps=2 clip/%05d.jpg, and list them.",
    "frame_size": "Extract the frames again, all at one size.",
    "decoder_crashed": "Save the image again with another program, or drop it.",
    "decoder_hung": "Save the image again, or raise data.decode_timeout if it is just large.",
    "decoder_memory": "Save the image smaller, or without the other data in its file.",
    "image_without_tower": "Train a model with a vision tower, or drop rows with images.",
    # the document
    "control_token": "Remove the text; a tokenizer that reads it so cannot be configured otherwise.",
    "too_long": "Raise batch.max_tokens, batch.max_patches or data.max_length (up to the model's positions), or set "
    "data.overlong: drop_turns.",
}
LASTING = ("decoder_crashed", "decoder_hung")  # verdicts that are not found out again: each costs a worker
FIRST_VERDICT = 100  # rows before the rate means anything
EARLY = 2.0  # times what the limit allows of all rows, as far as can be told, end a run before it has met them all
LARGE = 1_000_000  # rows that data are taken to have at most when that is checked: a run on endless bad data must end


@dataclass(frozen=True)
class Reject:
    """One rejected sample, as a line of `rejects.jsonl`."""

    id: str
    file: str
    row: int
    field: str
    cause: str
    message: str

    @staticmethod
    def of(id: str, file: str, row: int, bad: BadSample) -> "Reject":
        return Reject(id, file, row, bad.field, bad.cause, bad.message)


class Rejects:
    """Counts of one stage. The rate is of different rows: each counts once, when its source is met for the first time, however often it
    comes again (`repeat`, epochs, `mix: interleave`)."""

    def __init__(self, folder: Path | None, max_rate: float, writes: bool = True):
        """Lines go to `folder`/rejects.jsonl (None: nowhere), one for each sample and cause over the whole run. Of several ranks, which
        all count the same, one writes."""
        self.writes = writes
        self.path = folder / "rejects.jsonl" if folder else None
        self.max_rate = max_rate
        self.seen = 0  # different rows
        self.counts: dict[str, int] = {}  # of these, those that cannot be used, by cause
        self.left_out = 0  # others, which `where` of their source leaves out: they are not failures, and not in the rate
        self.repeated: set[tuple[int, int, int]] = set()  # those of repeated sources that decoding has found: they come again in an epoch
        lines = [_read(line, number, self.path) for number, line in enumerate(read_lines(self.path), 1)] if self.path else []
        self._written = {(line.file, line.id, line.cause) for line in lines}
        self.verdicts = {(line.file, line.id): line for line in lines if line.cause in LASTING}  # of this run, and of it before

    @property
    def rejected(self) -> int:
        return sum(self.counts.values())

    def add(self, reject: Reject) -> None:
        """Count one."""
        assert reject.cause in CAUSES, f"{reject.cause} is not in CAUSES"
        self.counts[reject.cause] = self.counts.get(reject.cause, 0) + 1
        self.note(reject)

    def note(self, reject: Reject) -> None:
        """Write it down without counting it: of validation, or of a row that has come before."""
        if reject.cause in LASTING:
            self.verdicts.setdefault((reject.file, reject.id), reject)
        name = (reject.file, reject.id, reject.cause)
        if name not in self._written and self.path is not None and self.writes:
            append_line(self.path, {k: _printable(v) for k, v in vars(reject).items()})
        self._written.add(name)

    def check(self, over: bool, total: Callable[[], int]) -> None:
        """TooManyRejects, with the most frequent causes, when the rate is over the limit. Once all rows have been read (`over`) that is the
        rate of all of them. Before that, the first rows say little, since bad ones may be close together: too many are then more than the
        limit allows of all rows, about `total`."""
        if self._many() and (over or (self.seen >= FIRST_VERDICT and self.rejected > EARLY * self.max_rate * min(total(), LARGE))):
            raise self._too_many()

    def check_part(self, total: Callable[[], int]) -> None:
        """The check for a stage that ends before it has read all rows: too many are more than the limit allows of all, or a number that
        chance
        does not explain it. One bad row among the first ten does not say that one in ten is bad."""
        expected = self.max_rate * self.seen
        unlikely = expected + 4 * math.sqrt(expected) + 2  # four standard deviations, and a little where the numbers are small
        if self._many() and (self.rejected == self.seen or self.rejected > min(unlikely, self.max_rate * total())):
            raise self._too_many()

    def _many(self) -> bool:
        return self.rejected > self.max_rate * self.seen

    def _too_many(self) -> TooManyRejects:
        cause = max(self.counts, key=self.counts.__getitem__)
        where = f" Each is named in {self.path}." if self.path else ""
        return TooManyRejects(
            f"{self.rejected:,} of {counted(self.seen, 'sample')} were rejected ({percent(self.rejected / max(self.seen, 1))}); "
            f"max_reject_rate allows {percent(self.max_rate)}. Causes: {self.causes()}.{where} Against {cause}: {REMEDIES[cause]} Or raise "
            "data.max_reject_rate if dropping them is acceptable"
        )

    def summary(self) -> str:
        """The number of samples skipped so far, and the causes; and of those that `where` left out."""
        where = f". {self.path} names each" if self.path else ""
        skipped = f"{self.rejected:,} of {counted(self.seen, 'sample')} skipped: {self.causes()}{where}"
        left_out = f"where: left out {self.left_out:,} of {counted(self.seen + self.left_out, 'sample')}"
        return "; ".join([*([skipped] if self.rejected else []), *([left_out] if self.left_out else [])])

    def causes(self) -> str:
        """The most frequent ones in words."""
        top = sorted(self.counts.items(), key=lambda item: -item[1])[:5]
        return "; ".join(f"{cause} {count}× ({CAUSES[cause]})" for cause, count in top)

    def state(self) -> dict[str, Any]:
        again = {"repeated": sorted(map(list, self.repeated))} if self.repeated else {}
        left_out = {"where": self.left_out} if self.left_out else {}
        return {"seen": self.seen, "counts": dict(self.counts), **left_out, **again}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen, self.counts = int(state["seen"]), {str(k): int(v) for k, v in state["counts"].items()}
        self.left_out = int(state.get("where", 0))
        self.repeated = {(source, shard, number) for source, shard, number in state.get("repeated", ())}


def _read(line: dict[str, Any], number: int, path: Path) -> Reject:
    if line.keys() != Reject.__annotations__.keys():
        raise Refused(f"line {number} of {path} has {', '.join(line)}; wanted {', '.join(Reject.__annotations__)}. Delete that line")
    return Reject(**line)


def _printable(value: Any) -> Any:
    """Strings without lone surrogates, which no file could hold."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
