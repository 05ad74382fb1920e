"""`eyeline prepare --signals`: figures of every row of some sources, as columns, as jobs with a barrier between them.

    signals      each shard of the sources -> columns, and side files of hashes
    duplicates   each range of hashes -> pairs of rows that are equal, or alike
    similarity   each shard -> how well images and answers go together, where a model is named that says it (`similarity.py`)
    (then one pass over the shards, which adds the columns of the later jobs)

What comes of it is described, and read, in `data/signals/columns.py`. Both jobs are in `job/`; the same command resumes them.
"""

import hashlib
import json
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray

from eyeline import __version__
from eyeline.core.batch import EncodedImage, Sample
from eyeline.core.errors import BadSample
from eyeline.core.files import claimed, make_folder, storage_failed, write_atomically
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers.container import Place, persistent
from eyeline.data.images.decode import upright
from eyeline.data.images.image_files import frames_of, image_key, in_memory
from eyeline.data.plan.order import Hashes
from eyeline.data.reader import digest_of
from eyeline.data.report.duplicates import sample_key
from eyeline.data.signals import columns as columns_of
from eyeline.data.signals.columns import (
    COLUMNS,
    ID,
    MANIFEST,
    SCORE,
    USABLE,
    Stored,
    columns_key,
    from_bytes,
    key_of,
    to_bytes,
    write_manifest,
)
from eyeline.data.sources.sources import Rows
from eyeline.data.text.documents import require_answer, require_targets, tokenise
from eyeline.data.text.tokenizer import Encoder
from eyeline.offline.alike import EQUAL, LINKS, NEAR, WriteLinks, first_rows, ranges_of
from eyeline.offline.attempt import Done, Job, content_digest, is_whole
from eyeline.offline.hashes import ROW_BITS, equal_record, near_records, perceptual_hash, sorted_records
from eyeline.offline.local_jobs import folder_of, open_job, output_path, run_job
from eyeline.offline.manifests import Manifest, manifests
from eyeline.offline.measures import ImageSignals, answer_in_question, answers_of, image_signals, repetition_of, script_of, texts_of
from eyeline.offline.plan import Draft, Input, Partition, Plan
from eyeline.offline.run import Where
from eyeline.offline.similarity import Scores, Towers, known_scores, score, similarities

TABLE = "columns.npz"  # the output of a partition of the first job, next to the side files
DUPLICATES = ("duplicate", "near_duplicate")
OWN = [name for name in COLUMNS if name not in (*DUPLICATES, SCORE)]  # columns of the first job
CODE = {
    "eyeline": __version__,
    "signals version": columns_of.VERSION,
    "Pillow": PIL.__version__,
    "Unicode": unicodedata.unidata_version,
}


class Made(NamedTuple):
    """What a folder of signals holds."""

    rows: int
    usable: int
    duplicate: int
    near_duplicate: int


def write_signals(
    sources: Sequence[Rows], encoder: Encoder, rule: ImageRule | None, folder: Path, where: Where, towers: Towers | None = None
) -> Made | None:
    """Write the signals of all rows of some sources into a folder, the similarity of images and answers among them if `towers` are given.
    What is there of the same job already is kept, or repaired. Returns None where other jobs (`where`) have to do their share first."""
    make_folder(folder)
    work = WriteSignals(tuple(sources), encoder, rule)
    partitions = _shards(work)
    taken = None if rule is None else [rule.frames, rule.video is not None]
    names = [{str(rows.path): [rows.layout.identity, digest_of(rows)]} for rows in sources]
    identity = {"sources": names, "tokenizer": encoder.identity, "images": taken, "shards": len(partitions), "code": CODE}
    figures = open_job(folder, "signals", identity, lambda _: Draft(partitions), partitions)
    if not run_job(Job("signals", work), figures, where, folder, _damaged(figures, work, folder, where)):
        return None
    hashed = {"signals": figures.digest, "contents": content_digest(manifests(figures))}
    links = open_job(folder, "duplicates", hashed, lambda _: _ranges(figures))
    lost = {one.number for one in manifests(links) if where.has(one.number) and not _is_whole(links, one)}
    if not run_job(Job("duplicates", WriteLinks(figures, len(links))), links, where, folder, lost):
        return None
    scores = known_scores(folder) if towers is None else score(work.sources, towers, folder, identity, partitions, where)
    if towers is not None and scores is None:
        return None
    with claimed(folder / MANIFEST, wait=True):
        return _finished(work, figures, links, scores, folder, identity)


def _shards(work: "WriteSignals") -> list[Partition]:
    """A partition for each shard. Sources of one file, read in the same way, have the same columns."""
    found: dict[str, Partition] = {}
    for source, rows in enumerate(work.sources):
        for shard, about in enumerate(rows.shards):
            one = Partition(len(found), (Input(about.name, about.bytes, about.fingerprint),), None, [source, shard])
            found.setdefault(work.key(one), one)
    return list(found.values())


def _ranges(figures: Plan) -> Draft:
    return Draft([Partition(number, (), None) for number in range(ranges_of(figures))])


# The first job: one shard


@dataclass(frozen=True, eq=False)
class WriteSignals:
    """`write_signals(partition, folder)`: the work on a shard of the sources. Pickles. One image is in memory at a time, and the figures
    and hashes of one shard."""

    sources: tuple[Rows, ...]
    encoder: Encoder
    rule: ImageRule | None

    def key(self, partition: Partition) -> str:
        """The name of the columns."""
        source, shard = partition.work
        rows = self.sources[source]
        return key_of(rows.shards[shard], rows.layout.identity, rows.root, rows.path)

    def __call__(self, partition: Partition, folder: Path) -> Done:
        source, shard = partition.work
        rows = self.sources[source]
        seen = _Images(rows.retries)
        table: dict[str, list[Any]] = {name: [] for name in (ID, USABLE, *OWN)}
        equal: list[Hashes] = []
        near: list[Hashes] = []
        counts: dict[str, int] = {}
        for place, _, found in rows.rows_in(shard):
            figures: dict[str, Any] = {}
            try:
                if isinstance(found, BadSample):
                    raise found
                images = [[seen.of(image) for image in frames_of(item)] for item in found.media]
                figures = self._figures(found, [frames[0].signals for frames in images])
                row = partition.number << ROW_BITS | place.number
                equal.append(equal_record(sample_key(found, [one.content for frames in images for one in frames]), row))
                near.append(near_records(found, [frames[0].look for frames in images], row))
            except BadSample as bad:
                counts[bad.cause] = counts.get(bad.cause, 0) + 1
            for name, values in table.items():
                values.append(figures.get(name))
            table[ID][-1], table[USABLE][-1] = rows.id(place), bool(figures)
        try:
            (folder / TABLE).write_bytes(to_bytes({name: _array(name, values) for name, values in table.items()}))
            np.save(folder / EQUAL, sorted_records(equal))
            np.save(folder / NEAR, sorted_records(near))
        except OSError as error:
            raise storage_failed("write", folder, error) from error
        return Done({TABLE: len(table[ID]) - sum(counts.values())}, dict(sorted(counts.items())))

    def _figures(self, sample: Sample, images: Sequence[ImageSignals]) -> dict[str, Any]:
        """The columns of a row but those of duplicates. BadSample for one that cannot be trained on."""
        require_answer(sample)
        known = require_targets(tokenise(sample.messages, self.encoder, self.rule))
        text = texts_of(sample)
        figures: dict[str, Any] = {
            "images": len(images),
            "characters": len(text),
            "tokens": len(known.ids_U) - len(known.places_W),
            "answer_tokens": int(known.trained_U.sum()),
            "repetition": max(map(repetition_of, answers_of(sample))),
            "script": script_of(text),
            "answer_in_question": answer_in_question(sample),
        }
        for name in ImageSignals._fields if images else ():
            figures[name] = (max if name == "aspect" else min)(getattr(one, name) for one in images)
        return figures


def _array(name: str, values: list[Any]) -> NDArray[Any]:
    if name == USABLE or (name in COLUMNS and COLUMNS[name].kind == "flag"):
        return np.array([bool(value) for value in values], np.bool_)
    if name == ID or COLUMNS[name].kind == "text":
        return np.array([(value or "").encode("utf-8", "surrogatepass") for value in values], np.bytes_)
    return np.array([np.nan if value is None else value for value in values], np.float64)


class _Seen(NamedTuple):
    """What is known of one image."""

    signals: ImageSignals
    look: int  # its perceptual hash
    content: str  # equal for equal bytes


@dataclass(frozen=True, eq=False)
class _Images:
    """The images of a shard. Each is decoded once, since rows share them."""

    retries: int
    known: dict[str, _Seen | BadSample] = field(default_factory=dict)

    def of(self, image: EncodedImage) -> _Seen:
        """BadSample for one that cannot be read or decoded."""
        key = image_key(image)
        if key not in self.known:
            try:
                self.known[key] = self._looked_at(image)
            except BadSample as bad:
                self.known[key] = bad
        found = self.known[key]
        if isinstance(found, BadSample):
            raise found
        return found

    def _looked_at(self, image: EncodedImage) -> _Seen:
        read = persistent(partial(in_memory, image), self.retries)
        assert isinstance(read, EncodedImage)
        rgb = upright(read)
        gray = rgb.convert("L")
        return _Seen(image_signals(rgb, gray), perceptual_hash(gray), image_key(read))


# When both jobs are done


def _damaged(figures: Plan, work: WriteSignals, folder: Path, where: Where) -> set[int]:
    """Partitions of this share whose outputs are missing or damaged, and needed: once all is done, the final columns are enough."""
    whole = _whole_columns(folder)
    return {
        one.number
        for one in manifests(figures)
        if where.has(one.number) and work.key(figures.partition(one.number)) not in whole and not _is_whole(figures, one)
    }


def _is_whole(plan: Plan, manifest: Manifest) -> bool:
    return all(is_whole(output_path(plan, manifest, output.name), output) for output in manifest.outputs)


def _whole_columns(folder: Path) -> dict[str, Stored]:
    """The shards whose final columns are as signals.json has them."""
    shards = _described(folder).get("shards", {})
    return {key: Stored(*one) for key, one in shards.items() if _digest(folder / columns_key(key)) == one[0]}


def _described(folder: Path) -> dict[str, Any]:
    """What signals.json says, if it is there."""
    try:
        value = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def _finished(work: WriteSignals, figures: Plan, links: Plan, scores: Scores | None, folder: Path, identity: dict[str, Any]) -> Made:
    """Write the columns of every shard that is not there, with those of the later jobs, then signals.json. What only the jobs need goes."""
    whole, towers = _whole_columns(folder), None if scores is None else scores.towers
    same_scores = _described(folder).get("identity", {}).get(SCORE) == towers
    names = tuple(name for name in COLUMNS if scores is not None or name != SCORE)
    firsts = {}
    for name, side in zip(DUPLICATES, (EQUAL, NEAR), strict=True):
        firsts[name] = first_rows([np.load(output_path(links, one, LINKS[side])) for one in manifests(links)])
    work_of = [one.work for group in figures.groups for one in figures.partitions(group)]
    scored = repeat(None) if scores is None else similarities(scores)
    shards: dict[str, Stored] = {}
    usable = 0
    for one, similarity in zip(manifests(figures), scored, strict=scores is not None):
        partition = figures.partition(one.number)
        key = work.key(partition)
        usable += one.rows
        if key not in whole or not same_scores:
            path = folder / columns_key(key)
            table = from_bytes((path if key in whole else output_path(figures, one, TABLE)).read_bytes())
            if key not in whole:
                for name, (row_D, first_D) in firsts.items():
                    table[name] = _names_of_first(work, work_of, one.number, len(table[ID]), row_D, first_D)
            if similarity is not None:
                table[SCORE] = np.where(table[USABLE], similarity, np.nan)
            data = to_bytes({column: table[column] for column in (ID, USABLE, *names)})
            make_folder(path.parent)
            write_atomically(path, data)
            whole[key] = Stored(hashlib.sha256(data).hexdigest(), len(table[ID]), partition.inputs[0].name)
        shards[key] = whole[key]
    write_atomically(folder / MANIFEST, write_manifest(shards, identity if scores is None else {**identity, SCORE: towers}, names))
    shutil.rmtree(folder_of(figures) / "files", ignore_errors=True)
    return Made(sum(one.rows for one in shards.values()), usable, *(len(rows) for rows, _ in firsts.values()))


def _names_of_first(
    work: WriteSignals, work_of: Sequence[tuple[int, int]], partition: int, rows: int, row_D: Hashes, first_D: Hashes
) -> NDArray[np.bytes_]:
    """The column of a shard that names the first row of each that is like an earlier one; `work_of` is what each partition is."""
    start, end = np.searchsorted(row_D, np.array([partition, partition + 1], np.uint64) << np.uint64(ROW_BITS))
    names = [b""] * rows
    for row, first in zip(row_D[start:end].tolist(), first_D[start:end].tolist(), strict=True):
        source, shard = work_of[first >> ROW_BITS]
        number = first & (1 << ROW_BITS) - 1
        names[row & (1 << ROW_BITS) - 1] = work.sources[source].id(Place(shard, number, 0, 0)).encode("utf-8", "surrogatepass")
    return np.array(names, np.bytes_) if names else np.empty(0, "S1")
