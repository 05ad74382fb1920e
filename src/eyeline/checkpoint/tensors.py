"""Safetensors in and out, tensor by tensor, under the names of a Hugging Face checkpoint.

Reading never unpickles and never trusts a header; every difference between what a file holds and what was wanted is an
error that lists names. Writing goes through one tensor at a time on the host, and hashes what it writes.
"""

import functools
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyeline.core.errors import Refused, nearest
from eyeline.core.files import LARGEST_JSON, read_object, storage_failed, sync_folder, write_json
from eyeline.core.key_rules import KeyRule

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes that the safetensors library reads; it refuses longer ones by itself
SHARD_BYTES = 5 * 2**30  # what transformers writes by default

# In the order in which the safetensors library lays tensors out, so that our files equal its own byte for byte.
_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LAYOUT = {dtype: place for place, dtype in enumerate(_DTYPES)}
NAMED_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_FLOATS = {"F64", "F32", "BF16", "F16"}


@dataclass(frozen=True)
class Written:
    """The record of a file in a manifest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint folder, by its header alone."""

    file: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]


# ---- files


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a safetensors file of these tensors: length, names, dtypes, shapes, offsets."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in _order(tensors):
        x = tensors[name]
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, start + x.nbytes]}
        start += x.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """Write a new safetensors file, flushed to disk, from tensors on any device. Raises StorageFailed.

    Not `safetensors.torch.save_file`: that one gathers every tensor on the host first, refuses tensors that share memory,
    and would be read again for its digest.
    """
    header = header_of(tensors, metadata)
    digest = hashlib.sha256(header)
    try:
        with open(path, "xb") as file:
            file.write(header)
            for name in _order(tensors):
                piece = bytes_of(tensors[name])
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return Written(file.tell(), digest.hexdigest())
    except OSError as error:
        raise storage_failed("write", path, error, len(header) + sum(x.nbytes for x in tensors.values())) from error


def bytes_of(x: Tensor) -> memoryview:
    """The raw little-endian values of a tensor, row by row, on the host."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: (_LAYOUT[tensors[name].dtype], name))


def entries_of(file: Path) -> dict[str, Entry]:
    """Names, dtypes and shapes in a safetensors file, checked against its length. Raises Refused."""
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise Refused(f"{file} is a folder or a device; wanted a safetensors file. Download it again.")
    _no_repeated_names(file)
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            return {name: Entry(file, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except SafetensorError as error:
        raise Refused(f"{file} is not a complete safetensors file: {error}. Copy or download it again.") from error
    except OSError as error:
        raise storage_failed("read", file, error) from error


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a safetensors file."""
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def misfits(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtypes: Literal["exact", "any"]) -> list[str]:
    """In what stored tensors differ from those that are wanted, a line each: names, shapes, and dtypes where they must be equal. Both may
    be on the meta device."""
    found = [f"{name} is not in the checkpoint" for name in wanted if name not in stored]
    found += [f"{name} is not in the model" for name in stored if name not in wanted]
    for name in wanted.keys() & stored.keys():
        got, want = stored[name], wanted[name]
        if got.shape != want.shape or (dtypes == "exact" and got.dtype != want.dtype):
            found.append(f"{name} is {list(got.shape)} {got.dtype}, wanted {list(want.shape)} {want.dtype}")
    return sorted(found)


def refuse_misfits(where: str, found: Sequence[str]) -> None:
    """Raise Refused with the first differences, where there are any."""
    if found:
        more = f"\n  ... and {len(found) - 10} more" if len(found) > 10 else ""
        listed = "\n  ".join(found[:10])
        raise Refused(f"{where} does not fit this model:\n  {listed}{more}\nUse the recipe that the run was started with.")


def _no_repeated_names(file: Path) -> None:
    """The library lets the second of two equal names win; here both are refused. All else is left to the library."""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(length) if length <= min(file.stat().st_size, LARGEST_HEADER) else b""
    except OSError as error:
        raise storage_failed("read", file, error) from error
    try:
        json.loads(text or b"{}", object_pairs_hook=_unique)
    except _Repeated as error:
        raise Refused(f"{file} names {error} twice. Copy or download it again.") from error
    except (ValueError, RecursionError):
        pass  # not JSON: the library's own message is better


class _Repeated(Exception):
    """A JSON object has one key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Repeated(repr(key))
        found[key] = value
    return found


# ---- folders


ADAPTER = "adapter_config.json"
OTHERS = {  # what else checkpoints are stored as -> what it is, and what to do
    "*.gguf": "GGUF files, llama.cpp's, whose weights are mostly quantised. Take the safetensors checkpoint that they were made from (on "
    "the Hub mostly the same name without -GGUF)",
    "*.distcp": "a distributed checkpoint of PyTorch. Convert it with the program that trained it (its export, or "
    "torch.distributed.checkpoint.format_utils), and save it with transformers' save_pretrained",
    "global_step*": "a checkpoint of DeepSpeed. Convert it with its zero_to_fp32.py, and save it with transformers' save_pretrained",
    "model_index.json": "a pipeline of diffusers, which is not a vision-language model",
    "*.onnx": "ONNX files, which cannot be trained. Take the safetensors checkpoint that they were made from",
    "*.h5": "weights of TensorFlow. Take the checkpoint's safetensors revision",
    "*.msgpack": "weights of Flax. Take the checkpoint's safetensors revision",
}


def refuse_other_formats(folder: Path) -> None:
    """Raise Refused for a folder without weights in safetensors that holds something else by name: an adapter, GGUF files, ..."""
    if not folder.is_dir() or (folder / SINGLE).exists() or (folder / INDEX).exists():
        return
    if (folder / "base" / "config.json").exists() and (folder / "adapter" / ADAPTER).exists():
        raise Refused(
            f"{folder} is an export with an adapter. Give {folder / 'base'} for the model without it, or the run that it was exported from "
            "(or export that without --adapter, which merges it)."
        )
    if (folder / ADAPTER).exists():
        about = read_object(folder / ADAPTER)
        base = about.get("base_model_name_or_path") or "BASE"
        raise Refused(
            f"{folder} is an adapter ({about.get('peft_type', 'of PEFT')}) for the model {base}, not a model. Give that model's folder, "
            "and in a recipe this one as model.adapter. Or merge it into that one, and give OUT: "
            f"`PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {str(folder)!r}).merge_and_unload()"
            ".save_pretrained('OUT')` (AutoModelForImageTextToText for a vision-language model), with the base's tokenizer and processor "
            "files copied into OUT."
        )
    for pattern, what in OTHERS.items():
        there = sorted(path.name for path in folder.glob(pattern))
        if there:
            raise Refused(f"{folder} holds {what}. Found {', '.join(there[:3])}, and no {SINGLE}.")


def entries_in(folder: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint folder in Hugging Face's layout, or of one safetensors file, by headers alone.

    A folder has `model.safetensors`, or shards under `model.safetensors.index.json`. Raises Refused for anything else: pickled
    weights, an index that names files outside the folder, tensors that the index lacks or invents, a wrong total.
    """
    if folder.is_file():
        return entries_of(folder)
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise Refused(f"{folder} holds both {SINGLE} and {INDEX}: which one is meant? Delete the one that is stale.")
    if single.exists():
        return entries_of(single)
    if index.exists():
        return _entries_by_index(folder, index)
    refuse_other_formats(folder)
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern)) if folder.is_dir() else []
    if pickled:
        raise Refused(
            f"{folder} holds pickled weights ({', '.join(pickled[:3])}), which can run code when they are read; "
            f"Eyeline reads safetensors only. Take the checkpoint's safetensors revision, or convert it on a machine you trust: "
            f"`AutoModel.from_pretrained(folder).save_pretrained(out)`."
        )
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
    raise Refused(f"no weights in {folder}: looked for {SINGLE} and {INDEX}, found {found or 'nothing'}.")


def _entries_by_index(folder: Path, index: Path) -> dict[str, Entry]:
    content = _read_index(index)
    where, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(where, dict) or not where or not all(isinstance(v, str) for v in where.values()):
        raise Refused(f"{index} has no `weight_map` from tensor names to file names. Download it again.")
    if metadata is not None and not isinstance(metadata, dict):
        raise Refused(f"{index} has metadata={metadata!r:.80}; wanted a JSON object, or none. Download it again.")

    shards = sorted(set(where.values()))
    for name in shards:
        if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors", name) is None:
            raise Refused(f"{index} names the file {name!r}: a shard is a .safetensors file in the folder of its index, never a path.")
    entries: dict[str, Entry] = {}
    for name in shards:
        if not (folder / name).is_file():
            raise Refused(f"{index} names {name}, which is not in {folder}. Download the missing file.")
        here = entries_of(folder / name)
        listed = {tensor for tensor, file in where.items() if file == name}
        if here.keys() != listed:
            lost, extra = sorted(listed - here.keys()), sorted(here.keys() - listed)
            raise Refused(f"{folder / name} and {INDEX} disagree: {_listing('missing in the file', lost)}{_listing('not listed', extra)}")
        entries |= here
    total = (metadata or {}).get("total_size")
    actual = sum(_bytes(e) for e in entries.values())
    if total is not None and total != actual:
        raise Refused(f"{index} says total_size {total}, but its tensors have {actual:,} bytes. Download the checkpoint again.")
    return entries


def _read_index(index: Path) -> dict[str, Any]:
    """The JSON object in an index, whose keys must differ. Raises Refused, and StorageFailed where it cannot be read."""
    try:
        if (size := index.stat().st_size) > LARGEST_JSON:
            raise Refused(f"{index} has {size:,} bytes; wanted at most {LARGEST_JSON:,}. Download it again.")
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except _Repeated as error:
        raise Refused(f"{index} lists {error} twice. Download it again.") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{index} is not JSON ({error}). Download it again.") from error
    except OSError as error:
        raise storage_failed("read", index, error) from error
    if not isinstance(content, dict):
        raise Refused(f"{index} holds a {type(content).__name__}, wanted a JSON object. Download it again.")
    return content


_BITS = {"64": 64, "32": 32, "16": 16, "8": 8, "6": 6, "4": 4}


def _bytes(entry: Entry) -> int:
    number = re.search(r"\d+", entry.dtype)
    bits = _BITS[number.group()] if number else 8  # BOOL
    return torch.Size(entry.shape).numel() * bits // 8


@contextmanager
def _reading(entries: Mapping[str, Entry]) -> Iterator[Callable[[str], Tensor]]:
    """A function that gives the tensor of a name. Every file is mapped, and read where it is touched."""
    with ExitStack() as stack:
        files = {file: stack.enter_context(safe_open(file, framework="pt")) for file in {e.file: None for e in entries.values()}}
        yield lambda name: files[entries[name].file].get_tensor(name)


def write_folder(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int = SHARD_BYTES, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a checkpoint in Hugging Face's layout into an existing folder that has none: one file, or shards and an index.

    `tensors` may be made on the fly: no more than one shard of them is held. Raises StorageFailed.
    """
    metadata = {"format": "pt"} if metadata is None else metadata
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total, room = 0, max_shard_bytes

    def flush() -> None:
        write_file(folder / f"shard-{len(shards)}.tmp", held, metadata)
        shards.append(list(held))
        held.clear()

    seen: set[str] = set()
    for name, x in tensors:
        assert name not in seen, f"{name} was given twice"
        seen.add(name)
        if held and x.nbytes > room:
            flush()
            room = max_shard_bytes
        held[name] = x
        total, room = total + x.nbytes, room - x.nbytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "shard-0.tmp", folder / SINGLE)
    else:
        where: dict[str, str] = {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            os.replace(folder / f"shard-{i}.tmp", folder / file)
            where |= dict.fromkeys(names, file)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    sync_folder(folder)


# ---- names


@dataclass(frozen=True)
class Key:
    """A rule at one place of a model: block numbers are filled in, those of stacked tensors (`{e}`) are not."""

    ours: tuple[str, ...]
    theirs: str
    rule: KeyRule

    @property
    def stacked(self) -> bool:
        return "{e}" in self.theirs

    def names(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Their names, in the order of stacking."""
        count = len(tensors[self.ours[0]]) if self.stacked else 1
        return [self.theirs.replace("{e}", str(e)) for e in range(count)]

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]:
        """Ours out of one tensor of theirs."""
        cut = self.rule.read(theirs) if self.rule.read else theirs
        return cut if isinstance(cut, tuple) else (cut,)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        """One tensor of theirs."""
        return self.rule.write(*ours) if self.rule.write else ours[0]


def key_of(ours: str, rules: Sequence[KeyRule]) -> Key:
    """The rule for a tensor of ours, at its block. A name of ours that has no rule, or two, is a defect."""
    hits = [
        (match, names, rule)
        for rule in rules
        for names in [(rule.ours,) if isinstance(rule.ours, str) else rule.ours]
        for name in names
        if (match := re.fullmatch(re.escape(name).replace(r"\{i\}", r"(\d+)"), ours))
    ]
    assert len(hits) == 1, f"{ours} has {len(hits)} key rules"
    match, names, rule = hits[0]
    assert (rule.read is None) == (rule.write is None), f"{rule.ours}: a rule turns both ways or neither"
    assert len(names) == 1 or rule.read, f"{rule.ours}: a rule of several tensors says how they are cut"
    i = match.group(1) if match.groups() else ""
    return Key(tuple(name.replace("{i}", i) for name in names), rule.theirs.replace("{i}", i), rule)


def renamed(tensors: Iterable[tuple[str, Tensor]], rules: Sequence[KeyRule]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors as the checkpoint names and shapes them; those that are fused there are held until they are all there.

    `model.named_parameters()` gives tied ones once, as families write them.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for ours, x in tensors:
        key = key_of(ours, rules)
        together = held.setdefault(key.theirs, {})
        together[ours] = x
        if len(together) < len(key.ours):
            continue
        del held[key.theirs]
        pieces = [together[name] for name in key.ours]
        for e, theirs in enumerate(key.names(together)):
            yield theirs, key.write([x[e] for x in pieces] if key.stacked else pieces)
    assert not held, f"only parts of {', '.join(held)} were given: {', '.join(name for together in held.values() for name in together)}"


def stream(
    tensors: Mapping[str, Tensor],
    folder: Path,
    rules: Sequence[KeyRule],
    dropped: Sequence[str] = (),
    only: Callable[[str], bool] = lambda _: True,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint folder under our names and in our layout, one at a time, in the dtypes they are stored in.
    They come in our order, those of one fused tensor together.

    `tensors` says which are wanted, by shape alone (the meta device will do). One tensor under several names
    (`named_parameters(remove_duplicate=False)`) is a tied weight: it must be there under at least one of its names, equal
    under all that are there, and it comes once, under its first. `dropped` are patterns of names that the checkpoint may
    hold and that are not wanted (see `_covers`). Of the others, `only` says which are read, by our names.

    Raises Refused before the first tensor when a name is missing or unknown, or a shape or dtype is wrong; and at a tensor
    that has a value which is not finite.
    """
    entries = entries_in(folder)
    first: dict[int, str] = {}
    for ours, x in tensors.items():
        first.setdefault(id(x), ours)
    wanted: dict[tuple[str, ...], dict[str, Key]] = {}  # ours -> the keys that they may have there
    for ours in tensors:
        key = key_of(ours, rules)
        wanted.setdefault(tuple(first[id(tensors[name])] for name in key.ours), {})[key.theirs] = key
    there = _refuse_differences(folder, tensors, wanted, entries, dropped)
    there = {ours: keys for ours, keys in there.items() if any(map(only, ours))}

    with _reading({name: entries[name] for keys in there.values() for key in keys for name in key.names(tensors)}) as read:
        for names, keys in there.items():
            values = _values(keys[0], tensors, entries, read)
            for other in keys[1:]:
                if not all(map(torch.equal, values, _values(other, tensors, entries, read))):
                    raise Refused(
                        f"{folder} holds {keys[0].theirs} and {other.theirs} with different values, but its config.json ties them. Set "
                        f"tie_word_embeddings to false there, or delete the stale one."
                    )
            yield from zip(names, values, strict=True)


def _values(key: Key, tensors: Mapping[str, Tensor], entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> tuple[Tensor, ...]:
    """The tensors of one key, in our layout. Stacked ones are read one after another into their place."""
    if not key.stacked:
        return key.read(_finite(key.theirs, entries, read))
    names = key.names(tensors)
    dtype = functools.reduce(torch.promote_types, (NAMED_DTYPES[entries[name].dtype] for name in names))
    stacks = tuple(torch.empty(tensors[name].shape, dtype=dtype) for name in key.ours)
    for e, name in enumerate(names):
        for stack, piece in zip(stacks, key.read(_finite(name, entries, read)), strict=True):
            stack[e] = piece
    return stacks


def _finite(name: str, entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> Tensor:
    value = read(name)
    if not value.isfinite().all():
        bad = int((~value.isfinite()).sum())
        raise Refused(
            f"{name} in {entries[name].file} has {bad:,} of {value.numel():,} values that are NaN or infinite. "
            f"The checkpoint is broken; take an earlier one."
        )
    return value


def _refuse_differences(
    folder: Path,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[tuple[str, ...], Mapping[str, Key]],
    entries: Mapping[str, Entry],
    dropped: Sequence[str],
) -> dict[tuple[str, ...], list[Key]]:
    """The wanted keys that a folder has. Raises Refused with everything in which its headers differ from that."""
    there: dict[tuple[str, ...], list[Key]] = {}
    missing: list[str] = []
    wrong: list[str] = []
    known: set[str] = set()
    for ours, keys in wanted.items():
        names = {key: key.names(tensors) for key in keys.values()}
        there[ours] = [key for key in names if any(name in entries for name in names[key])]
        for key in there[ours] or list(names)[:1]:
            missing += [name for name in names[key] if name not in entries]
        for key in there[ours]:
            want = _their_shape(key, tensors)
            for name in names[key]:
                if name not in entries:
                    continue
                known.add(name)
                if entries[name].shape != want:
                    wrong.append(f"{name} is {list(entries[name].shape)}, wanted {list(want)}")
                elif entries[name].dtype not in _FLOATS:
                    wrong.append(f"{name} is {entries[name].dtype}: quantised or integer weights are not supported")
    unknown = [name for name in sorted(entries) if name not in known and not any(_covers(p, name) for p in dropped)]
    if missing or unknown or wrong:
        near = "".join(nearest(name, unknown) for name in missing[:1])
        raise Refused(
            f"the weights in {folder} do not fit the model: {_listing('missing', missing)}{_listing('unknown', unknown)}"
            f"{_listing('of another shape or dtype', wrong)}{near} Does config.json belong to these weights?"
        )
    return there


def _their_shape(key: Key, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    shapes = [tensors[name].shape[1:] if key.stacked else tensors[name].shape for name in key.ours]
    return tuple(key.write([torch.empty(shape, device="meta") for shape in shapes]).shape)


COMPUTED = ("inv_freq", "position_ids")  # buffers in older files that are computed, not learned


def unread_tensors(names: Iterable[str], dropped: Sequence[str]) -> str:
    """The tensors of a checkpoint that are learned and not read, as a phrase with their numbers: `mtp.* (15), logit_scale`."""
    found = [name for name in names if any(_covers(p, name) for p in dropped) and not name.endswith(COMPUTED)]
    groups = Counter(f"{first}.*" if rest else first for first, _, rest in (name.partition(".") for name in found))
    return ", ".join(f"{group} ({count})" if count > 1 else group for group, count in groups.items())


def _covers(pattern: str, name: str) -> bool:
    """`*` stands for one piece of a name between dots, `**` for any number of them."""
    return re.fullmatch(re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+"), name) is not None


def _listing(what: str, names: Sequence[str], most: int = 6) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{what}: {', '.join(names[:most])}{rest}. "
