"""Rejected samples: counted by cause, named by file, row and field, and capped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyeline.core.errors import BadSample, TooManyRejects
from eyeline.core.files import append_line, read_lines

CAUSES: dict[str, str] = {
    # the row
    "not_json": "the line is not JSON",
    "not_finite": "NaN or an infinity, which JSON does not have",
    "duplicate_key": "the same key twice in one object",
    "huge_number": "a number with more than 18 digits",
    "nesting": "brackets nested too deep",
    "line_too_long": "a line over the cap",
    "damaged_tar": "an archive that ends early or is damaged; what was behind is lost",
    "tar_member": "a link, device or path out of the archive, or a name that fits no picture",
    "tar_key": "a key of an archive that comes twice",
    "damaged_parquet": "a row group that cannot be decoded",
    "bad_unicode": "invalid UTF-8, or half of a surrogate pair",
    "wrong_type": "a field has another type than its layout wants",
    "role": "a role that is not known",
    "role_order": "turns that do not alternate, or do not end with an answer",
    "placeholder_count": "not as many <image> as pictures, or <video> as films",
    "image_in_answer": "a picture in what the model should write",
    "no_target": "nothing to learn: no answer, or an empty one",
    "tool_turn": "a turn or a call of a tool",
    "unsupported": "a kind of part that is not read yet",
    # the picture
    "remote_url": "a URL where a file is wanted",
    "bad_path": "a path that cannot name a file",
    "outside_root": "a path that leaves the folder of the images",
    "data_url": "a data: URL that is not a picture, or is too long",
    "missing_image": "the file does not exist",
    "not_a_file": "a folder, device or pipe",
    "file_too_large": "a file over the cap",
    "image_format": "not one of the accepted formats",
    "too_many_pixels": "more pixels than the cap",
    "empty_image": "no pixels",
    "broken_image": "truncated or damaged",
    "aspect_ratio": "one side over 200 times the other",
    "film": "a film that is not a list of frames with times that grow",
    "video_file": "a film in one file, where frames are wanted",
    "frame_size": "frames of one film that differ in size",
    "decoder_crashed": "a worker died of it, and another one alone with it",
    "decoder_hung": "its decoding did not end in time, even alone",
    "decoder_memory": "its decoding takes more memory than a decoder may have",
    "picture_without_tower": "the model reads text only",
    # the document
    "control_token": "text that the tokenizer would read as a control token",
    "too_long": "more tokens or patches than a batch holds, or more tokens than the model has positions",
}
LASTING = ("decoder_crashed", "decoder_hung")  # verdicts that are not found out again: each costs a worker
FIRST_VERDICT = 100  # samples before the rate means anything


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
    """Counts of one run. The rate is of visits: a sample that is met in three epochs counts three times on both sides."""

    def __init__(self, folder: Path | None, max_rate: float):
        """Lines go to `folder`/rejects.jsonl (None: nowhere), one for each sample and cause over the whole run."""
        self.path = folder / "rejects.jsonl" if folder else None
        self.max_rate = max_rate
        self.seen = 0
        self.counts: dict[str, int] = {}
        lines = [Reject(**line) for line in read_lines(self.path)] if self.path else []
        self._written = {(line.file, line.id, line.cause) for line in lines}
        self.verdicts = {(line.file, line.id): line for line in lines if line.cause in LASTING}  # of this run, and of it before

    @property
    def rejected(self) -> int:
        return sum(self.counts.values())

    def add(self, reject: Reject) -> None:
        """Count one. TooManyRejects once the rate is over the limit and enough has been seen."""
        assert reject.cause in CAUSES, f"{reject.cause} is not in CAUSES"
        self.counts[reject.cause] = self.counts.get(reject.cause, 0) + 1
        self.note(reject)

    def note(self, reject: Reject) -> None:
        """Write it down without counting it: for validation, which is met again and again."""
        if reject.cause in LASTING:
            self.verdicts.setdefault((reject.file, reject.id), reject)
        name = (reject.file, reject.id, reject.cause)
        if name not in self._written and self.path is not None:
            append_line(self.path, {k: _printable(v) for k, v in vars(reject).items()})
        self._written.add(name)

    def check(self, end: bool = False) -> None:
        """TooManyRejects, with the most frequent causes, when the rate is over the limit; at the `end` of an epoch even if
        little was seen."""
        if self.rejected > self.max_rate * self.seen and (end or self.seen >= FIRST_VERDICT):
            top = sorted(self.counts.items(), key=lambda item: -item[1])[:5]
            causes = "; ".join(f"{cause} {count}× ({CAUSES[cause]})" for cause, count in top)
            where = f" Each is named in {self.path}." if self.path else ""
            raise TooManyRejects(
                f"{self.rejected} of {self.seen} samples were rejected ({self.rejected / max(self.seen, 1):.1%}); max_reject_rate allows "
                f"{self.max_rate:.1%}. Causes: {causes}.{where} Mend the data, or raise data.max_reject_rate if this loss is meant"
            )

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen, "counts": dict(self.counts)}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen, self.counts = int(state["seen"]), {str(k): int(v) for k, v in state["counts"].items()}


def _printable(value: Any) -> Any:
    """Strings without lone surrogates, which no file could hold."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
