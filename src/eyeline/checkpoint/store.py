"""Our own checkpoints: written whole or not at all, never over one another, and never loaded without a check of their digests.

    RUN/checkpoints/step-00000100-1f0c93aa/
        model.safetensors  optimizer.safetensors  ...   whatever the caller keeps; of several writers, one file each
        state.json                                      everything that is not a tensor
        manifest.json                                   written last: run, step, size and SHA-256 of every file

PyTorch's own formats detect no flipped bit, no swapped file and no mixture of two saves; so each save has a folder and an
id of its own, and its manifest, which has its own digest too, binds the files to that id. Nothing is ever unpickled.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from eyeline.checkpoint.pieces import Piece, TensorFiles, covers, offsets_of, reading
from eyeline.checkpoint.tensors import Written, header_of, write_file
from eyeline.core.errors import Refused
from eyeline.core.files import sha256_of, storage_failed, sync_folder
from eyeline.core.log import warn
from eyeline.core.shards import Box
from eyeline.core.world import ALONE, World

VERSION = 1
MANIFEST, STATE = "manifest.json", "state.json"
_FOLDER = re.compile(r"step-\d{8,}-[0-9a-f]{8}")
_SET = re.compile(r"(.+?)(?:-\d{5}-of-\d{5})?\.safetensors")  # a set of tensors, or one writer's share of it
_LEFTOVER = re.compile(r"\.step-\d{8,}-[0-9a-f]{8}\.(tmp|old)")


class Damaged(Exception):
    """A checkpoint folder is not what its save wrote. The message names the file."""


@dataclass(frozen=True)
class Manifest:
    version: int
    run: str
    step: int
    save: str  # the id of this save: 8 hex digits
    order: int  # 1, 2, ... in the order of saving: after a fall-back, a lower step can be the newer save
    best: bool  # the best so far when it was saved
    files: Mapping[str, Written]
    fixed: Mapping[str, str]  # file -> what it belongs to (a stage): equal as long as that is


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest
    state: dict[str, Any]
    held: BinaryIO | None = None  # as long as this is open, no other process deletes the checkpoint

    @property
    def step(self) -> int:
        return self.manifest.step

    def names(self) -> tuple[str, ...]:
        """The sets of tensors it holds: `load` and `reading` take these."""
        return tuple(dict.fromkeys(found.group(1) for name in self.manifest.files if (found := _SET.fullmatch(name))))

    @contextmanager
    def reading(self, *names: str) -> Iterator[TensorFiles]:
        """The tensors of these sets, read where they are asked for, as long as this lasts."""
        files = [file for file in self.manifest.files if (found := _SET.fullmatch(file)) and found.group(1) in names]
        with reading([self.folder / file for file in files]) as stored:
            yield stored

    def load(self, *names: str) -> dict[str, Tensor]:
        """All tensors of these sets, on the host."""
        with self.reading(*names) as stored:
            return {name: stored.read(name) for name in stored.meta}


# ---- saving


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written. No reader looks at it before `commit`."""

    folder: Path
    run: str
    step: int
    save: str
    earlier: Sequence[tuple[Path, Manifest]]
    words: Mapping[str, str]  # of its fixed sets

    @property
    def target(self) -> Path:
        return self.folder / f"step-{self.step:08d}-{self.save}"

    @property
    def staging(self) -> Path:
        return self.folder / f".{self.target.name}.tmp"


@dataclass(frozen=True)
class Share:
    """What one writer has written of a checkpoint."""

    files: Mapping[str, Written]
    fixed: Mapping[str, str]  # file -> its word
    boxes: Sequence[tuple[str, tuple[int, ...], torch.dtype, Box]]  # of each piece: its tensor, the tensor's shape, its dtype, and the part
    writers: int = 1  # as many shares make the checkpoint


def save(
    folder: Path,
    *,
    run: str,
    step: int,
    files: Mapping[str, Sequence[Piece]],
    state: dict[str, Any],
    save_total_limit: int,
    best: bool = False,
    fixed: Mapping[str, str] | None = None,
    world: World = ALONE,
    linked_from: Path | None = None,
) -> Path:
    """Write a new checkpoint next to the older ones in `folder`, then delete what `prune` allows. Returns its folder.

    `files` are named sets of tensors ("model", "optimizer", "frozen"), on any device; they are only read. `state` is plain
    JSON. `best` says that this is the best model so far. `fixed` names sets that cannot change while a word stays the same
    ({"frozen": "stage 1"}): such a set is written once and hard-linked by later saves; `linked_from` is another folder with checkpoints
    of the run that may have it.

    Ranks save together, each the pieces that it holds: rank 0 starts the draft, all write, and rank 0 commits what all have written.

    Raises StorageFailed, and leaves nothing of the attempt behind.
    """
    assert save_total_limit >= 1, "save_total_limit is at least 1"
    draft = begin(folder, run=run, step=step, files=files, fixed=fixed, world=world, linked_from=linked_from)
    return finish(draft, lambda: write(draft, files, world.rank, world.size), state, save_total_limit, best, world)


def finish(
    draft: Draft, written: Callable[[], Share], state: dict[str, Any], save_total_limit: int, best: bool = False, world: World = ALONE
) -> Path:
    """Commit a draft once every rank has its share `written`, then delete what `prune` allows. Returns the checkpoint's folder."""
    try:
        share = world.by_each(written)
        shares = world.gather_patiently(share)
        world.by_first(lambda: commit(draft, shares, state, best))
    finally:
        if world.first:
            shutil.rmtree(draft.staging, ignore_errors=True)  # gone already, unless something above failed
    world.by_first(lambda: prune(draft.folder, draft.run, save_total_limit, known_good=draft.target))
    return draft.target


def begin(
    folder: Path,
    *,
    run: str,
    step: int,
    files: Mapping[str, Sequence[Piece]],
    fixed: Mapping[str, str] | None = None,
    world: World = ALONE,
    linked_from: Path | None = None,
) -> Draft:
    """Start a draft that all ranks write into, once the disk has room for what they write together. See `save`. Raises StorageFailed."""
    draft = world.by_first(lambda: start_draft(folder, run, step, fixed, linked_from))
    needed = sum(world.gather_patiently(bytes_to_write(draft, files, world.rank, world.size)))
    try:
        world.by_first(lambda: _refuse_if_full(draft.folder, needed))
    except BaseException:
        if world.first:
            shutil.rmtree(draft.staging, ignore_errors=True)
        raise
    return draft


def start_draft(folder: Path, run: str, step: int, fixed: Mapping[str, str] | None = None, linked_from: Path | None = None) -> Draft:
    """Make the folder of a new checkpoint. See `save`. Raises StorageFailed."""
    earlier = _manifests(folder, run) + (_manifests(linked_from, run) if linked_from is not None else [])
    draft = Draft(folder, run, step, uuid.uuid4().hex[:8], earlier, dict(fixed or {}))
    try:
        folder.mkdir(exist_ok=True)  # not the run's folder above it: without the rest of a run, what is saved is of no use
        draft.staging.mkdir()
    except OSError as error:
        raise storage_failed("create", draft.staging, error) from error
    return draft


def write(draft: Draft, files: Mapping[str, Sequence[Piece]], writer: int = 0, writers: int = 1) -> Share:
    """Write what one of several writers holds of each set, flushed to disk, in files of its own. Raises StorageFailed."""
    assert draft.words.keys() <= files.keys(), f"fixed sets {sorted(draft.words)} are not all among {sorted(files)}"
    links, named = {}, {file_name(name, writer, writers): (name, _tensors(pieces), offsets_of(pieces)) for name, pieces in files.items()}
    for file, (name, tensors, offsets) in named.items():
        if name in draft.words:
            source = _same_file(file, draft.words[name], header_of(tensors, offsets), draft.earlier)
            links |= {} if source is None else {file: source}
    written = {
        file: _link(links[file], draft.staging / file) if file in links else write_file(draft.staging / file, tensors, offsets)
        for file, (_, tensors, offsets) in named.items()
    }
    boxes = [(piece.name, piece.shape, piece.local.dtype, piece.box) for pieces in files.values() for piece in pieces]
    return Share(written, _words(draft, files, writer, writers), boxes, writers)


def file_name(name: str, writer: int, writers: int) -> str:
    """The file in which one of several writers keeps its share of a set."""
    return f"{name}.safetensors" if writers == 1 else f"{name}-{writer + 1:05d}-of-{writers:05d}.safetensors"


def sizes_of(files: Mapping[str, Sequence[Piece]], writer: int = 0, writers: int = 1) -> dict[str, int]:
    """The files that a writer keeps these sets in, with the bytes of each. The tensors may be on the meta device."""
    return {
        file_name(name, writer, writers): len(header_of(_tensors(pieces), offsets_of(pieces))) + sum(piece.local.nbytes for piece in pieces)
        for name, pieces in files.items()
    }


def _tensors(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    tensors = {piece.name: piece.local for piece in pieces}
    assert len(tensors) == len(pieces), "one writer holds one piece of a tensor"
    return tensors


def bytes_to_write(draft: Draft, files: Mapping[str, Sequence[Piece]], writer: int = 0, writers: int = 1) -> int:
    """The bytes that `write` writes: without those of fixed sets that an earlier checkpoint has."""
    have = {file for file, word in _words(draft, files, writer, writers).items() for _, one in draft.earlier if one.fixed.get(file) == word}
    return sum(size for file, size in sizes_of(files, writer, writers).items() if file not in have)


def _words(draft: Draft, files: Mapping[str, Sequence[Piece]], writer: int, writers: int) -> dict[str, str]:
    return {file_name(name, writer, writers): draft.words[name] for name in files if name in draft.words}


def commit(draft: Draft, shares: Sequence[Share], state: dict[str, Any], best: bool = False) -> None:
    """Bind what all writers have written to one checkpoint. Raises StorageFailed."""
    boxes: dict[str, list[Box]] = {}
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    assert {share.writers for share in shares} == {len(shares)}, f"{len(shares)} shares, which are not those of all writers"
    for name, shape, dtype, box in (one for share in shares for one in share.boxes):
        assert kinds.setdefault(name, (shape, dtype)) == (shape, dtype), f"{name} has two shapes or dtypes"
        boxes.setdefault(name, []).append(box)
    for name, (shape, _) in kinds.items():
        assert covers(shape, boxes[name]), f"{name}: not every number of it is in exactly one of {len(boxes[name])} pieces"
    state_text = json.dumps(state, allow_nan=False, indent=1) + "\n"
    assert json.loads(state_text) == state, "state must be plain JSON: string keys, lists and no tuples"
    written = {file: one for share in shares for file, one in share.files.items()}
    written[STATE] = _write_text(draft.staging / STATE, state_text)
    order = 1 + max((manifest.order for _, manifest in draft.earlier), default=0)
    words = {file: word for share in shares for file, word in share.fixed.items()}
    _write_text(draft.staging / MANIFEST, _render(Manifest(VERSION, draft.run, draft.step, draft.save, order, best, written, words)))
    try:
        sync_folder(draft.staging)
        os.rename(draft.staging, draft.target)
        sync_folder(draft.folder)
    except OSError as error:
        raise storage_failed("commit", draft.target, error) from error


def _same_file(file: str, word: str, header: bytes, earlier: Sequence[tuple[Path, Manifest]]) -> tuple[Path, Written] | None:
    """An undamaged file that holds this fixed set already. A damaged one must not spread into the new checkpoint."""
    for folder, manifest in earlier:
        if manifest.fixed.get(file) != word:
            continue
        try:
            intact = sha256_of(folder / file) == manifest.files[file].sha256
            with open(folder / file, "rb") as opened:
                alike = opened.read(len(header)) == header
        except OSError:
            intact = alike = False
        if intact and alike:
            return folder / file, manifest.files[file]
        if not intact:
            warn(f"{folder / file} is damaged or cannot be read; it is written again.")
        else:  # several writers may share out the same set in another way
            assert "-of-" in file, f"{file} is fixed for {word!r}, but its names or shapes changed"
    return None


def _link(source: tuple[Path, Written], target: Path) -> Written:
    path, written = source
    try:
        os.link(path, target)
    except OSError:  # a file system without hard links, or too many of them
        try:
            shutil.copyfile(path, target)
            with open(target, "rb+") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_failed("write", target, error, written.size) from error
    return written


def _write_text(path: Path, text: str) -> Written:
    data = text.encode()
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_failed("write", path, error, len(data)) from error
    return Written(len(data), hashlib.sha256(data).hexdigest())


def _refuse_if_full(folder: Path, needed: int) -> None:
    """Better nothing than most of a checkpoint. A quota shows only while writing, which is handled there."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise storage_failed("write a checkpoint into", folder / "step", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed)


def _render(manifest: Manifest) -> str:
    """The manifest as text, its own digest included. A manifest that reads otherwise than this is damaged."""
    body = json.dumps(asdict(manifest), indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "manifest":\n{body}\n}}\n'


# ---- reading


def newest(folder: Path, run: str | None = None, *, hold: bool = False, world: World = ALONE) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if none was ever saved. `run=None` takes any run's.

    `hold` is for a reader that does not own the run: the run may continue saving and deleting, but keeps what is found here as long as
    the result lives. Every damaged one is named on standard error. Raises Refused when there are checkpoints and none can be used, rather
    than let a run start afresh over them.

    Ranks find the same one: each file is verified by one of them, and a fault that one finds counts for all.
    """
    return _first_whole(folder, run, best_only=False, hold=hold, world=world)


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The state of the newest checkpoint whose state.json is what was saved, without reading its tensors; None if there is none."""
    found = sorted(((path, manifest) for path in _folders(folder) if (manifest := _readable(path))), key=lambda one: -one[1].order)
    for path, manifest in found:
        with suppress(OSError, ValueError):
            if sha256_of(path / STATE) == manifest.files[STATE].sha256:
                return json.loads((path / STATE).read_text(encoding="utf-8"))
    return None


def _readable(path: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where it is damaged."""
    try:
        return _manifest_of(path)
    except Damaged:
        return None


def best(folder: Path, run: str | None = None, *, hold: bool = False, world: World = ALONE) -> Checkpoint | None:
    """The checkpoint that was the best when it was saved, none having been better since; None if none was marked."""
    return _first_whole(folder, run, best_only=True, hold=hold, world=world)


def _first_whole(folder: Path, run: str | None, best_only: bool, hold: bool, world: World) -> Checkpoint | None:
    while True:
        seen, names = world.by_first(lambda: _candidates(folder, run, best_only, hold))
        gone = False
        for path in (folder / name for name in names):
            found = _verify_together(path, run, hold, world)
            if isinstance(found, Checkpoint):
                return found
            gone = world.by_first(lambda path=path: hold and not path.exists())  # its run has deleted it, and has saved a newer one
            if gone:
                break
            if world.first:
                warn(f"checkpoint {path} cannot be used: {found}. Looking for the one before.")
        if not gone:
            break
    if seen and not best_only:
        raise Refused(f"none of the {seen} checkpoints in {folder} can be used (see above). Restore one, or move them away to start again.")
    return None


def _candidates(folder: Path, run: str | None, best_only: bool, hold: bool) -> tuple[int, list[str]]:
    """The number of checkpoints, and the names of those that may be used, the newest first."""
    seen = 0
    candidates: list[tuple[Path, Manifest]] = []
    for path in _folders(folder):
        seen += 1
        try:
            manifest = _manifest_of(path)
            if run is not None and manifest.run != run:
                raise Damaged(f"it belongs to run {manifest.run}, not to {run}")
        except Damaged as damage:
            if hold and not path.exists():  # its run has deleted it, and has saved a newer one
                return _candidates(folder, run, best_only, hold)
            warn(f"checkpoint {path} cannot be used: {damage}.")
            continue
        candidates.append((path, manifest))
    marked = [c for c in candidates if c[1].best] if best_only else candidates
    return seen, [path.name for path, _ in sorted(marked, key=lambda c: -c[1].order)]


def _verify_together(path: Path, run: str | None, hold: bool, world: World) -> Checkpoint | str:
    """The checkpoint on every rank, or on every rank what is wrong with it. Each rank reads some of the files."""

    def own_share() -> Checkpoint | str:
        try:
            held = _open_locked(path, fcntl.LOCK_SH) if hold else None
            return replace(verify(path, run, world.rank, world.size), held=held)
        except (Damaged, FileNotFoundError) as damage:
            return str(damage)

    found = world.by_each(own_share)
    faults = [one for one in world.gather_patiently(found if isinstance(found, str) else None) if one is not None]
    if isinstance(found, Checkpoint) and faults and found.held is not None:
        found.held.close()
    return faults[0] if faults else found


def _open_locked(path: Path, how: int) -> BinaryIO | None:
    """The manifest, open and locked: shared while someone reads the checkpoint, alone while it is deleted.

    None where the file system has no locks. Raises BlockingIOError when another process has it; FileNotFoundError.
    """
    file = open(path / MANIFEST, "rb")  # noqa: SIM115 - the lock lives as long as the file is open
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        file.close()
        return None
    return file


def verify(path: Path, run: str | None = None, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Check every byte of a checkpoint folder against its manifest, or the share of one of several ranks. Raises Damaged, naming the file
    and the fault."""
    manifest = _manifest_of(path)
    if run is not None and manifest.run != run:
        raise Damaged(f"it belongs to run {manifest.run}, not to {run}")
    _refuse_wrong_sizes(path, manifest)
    for name in _share_of({name: file.size for name, file in manifest.files.items()}, rank, ranks):
        want = manifest.files[name]
        try:
            got = sha256_of(path / name)
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        except OSError as error:
            raise storage_failed("read", path / name, error) from error
        if got != want.sha256:
            raise Damaged(f"{name} is not what was saved (SHA-256 {got[:12]}..., wanted {want.sha256[:12]}...)")
    return Checkpoint(path, manifest, json.loads((path / STATE).read_text(encoding="utf-8")))


def _share_of(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The files that one of several ranks reads: each file is one rank's, the largest go first, to the rank with the least to read. All
    read the state, which all need."""
    load, own = [0] * ranks, list[str]()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        reader = load.index(min(load))
        load[reader] += sizes[name]
        if reader == rank or name == STATE:
            own.append(name)
    return own


def _refuse_wrong_sizes(path: Path, manifest: Manifest) -> None:
    for name, want in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        except OSError as error:
            raise storage_failed("read", path / name, error) from error
        if size != want.size:
            raise Damaged(f"{name} has {size:,} bytes, wanted {want.size:,}")


def _manifest_of(path: Path) -> Manifest:
    """The manifest in a checkpoint folder. Raises Damaged; Refused if it is whole but of a version to come."""
    try:
        text = (path / MANIFEST).read_bytes().decode()
        content = json.loads(text)
        fields = content["manifest"]
        if content["sha256"] != hashlib.sha256(text.split("\n", 1)[1].removesuffix("\n}\n").encode()).hexdigest():
            raise Damaged(f"{MANIFEST} does not agree with its own digest")
        if fields["version"] != VERSION:
            raise Refused(f"{path} has format version {fields['version']}; this Eyeline reads {VERSION}. Use the Eyeline that wrote it.")
        manifest = Manifest(**(fields | {"files": {name: Written(**entry) for name, entry in fields["files"].items()}}))
    except FileNotFoundError as error:
        raise Damaged(f"{MANIFEST} is missing: the save was not finished, or the file was deleted") from error
    except OSError as error:
        raise storage_failed("read", path / MANIFEST, error) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error})") from error
    if text != _render(manifest):
        raise Damaged(f"{MANIFEST} is not what was saved")
    if path.name != f"step-{manifest.step:08d}-{manifest.save}":
        raise Damaged(f"{MANIFEST} belongs to another save, step-{manifest.step:08d}-{manifest.save}")
    return manifest


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if _FOLDER.fullmatch(p.name) and p.is_dir() and not p.is_symlink())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_failed("read", folder / "step", error) from error


def _manifests(folder: Path, run: str) -> list[tuple[Path, Manifest]]:
    """The readable manifests of this run, newest first. Damaged ones are skipped: loading names them."""
    found: list[tuple[Path, Manifest]] = []
    for path in _folders(folder):
        manifest = _readable(path)
        if manifest is not None and manifest.run == run:
            found.append((path, manifest))
    return sorted(found, key=lambda c: -c[1].order)


# ---- deleting


def prune(folder: Path, run: str, save_total_limit: int, known_good: Path | None = None) -> None:
    """Delete old checkpoints of this run, all but the newest `save_total_limit` and the newest that is marked best.

    Nothing is deleted unless one of those that stay has been verified, or is `known_good` (just written and flushed); if none of them
    is whole, the newest older one that is stays too.
    """
    have = [(path, manifest) for path, manifest in _manifests(folder, run) if _complete(path, manifest)]
    stay = [path for path, _ in have[:save_total_limit]]
    stay += [path for path, manifest in have if manifest.best][:1]
    going = [path for path, _ in have if path not in stay]
    if not going:
        return
    if known_good not in stay:
        for path in [path for path, _ in have]:
            try:
                verify(path, run)
            except Damaged as damage:
                warn(f"checkpoint {path} is damaged: {damage}.")
                continue
            going = [other for other in going if other != path]
            break
        else:
            return
    for path in going:
        # Renamed first: a kill in the middle must not leave a checkpoint that looks damaged.
        doomed = path.with_name(f".{path.name}.old")
        try:
            held = _open_locked(path, fcntl.LOCK_EX)
            os.rename(path, doomed)
        except BlockingIOError:  # an export, say, is reading it: the prune after the next save will find it again
            continue
        except OSError as error:
            raise storage_failed("delete", path, error) from error
        if held is not None:
            held.close()
        shutil.rmtree(doomed, ignore_errors=True)


def _complete(path: Path, manifest: Manifest) -> bool:
    try:
        _refuse_wrong_sizes(path, manifest)
    except Damaged:
        return False
    return True


def remove_leftovers(folder: Path) -> None:
    """Delete what killed saves and prunes left behind. The caller must hold the run's lock."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
