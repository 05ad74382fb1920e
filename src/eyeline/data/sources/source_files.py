"""Find the files of a source in a folder. Each kind of folder is a function, tried in order; none opens the data."""

import json
import re
from typing import Any, NamedTuple

from eyeline.core.errors import Refused
from eyeline.core.locations import Location, below
from eyeline.core.words import counted
from eyeline.data.containers.container import File
from eyeline.data.containers.energon import energon_columns, energon_shards
from eyeline.data.containers.keys import IMAGE_SUFFIXES
from eyeline.data.sources.folders import common_folder, listed_below


class SourceFiles(NamedTuple):
    """The files of a source, in order, and what its folder states about them."""

    path: Location  # its name in messages
    folder: Location  # paths of images are relative to it
    files: list[Location]
    texts: list[Location | None] | None = None  # where the files are images: their sidecar texts
    columns: dict[str, str] | None = None  # as a source declares them, where the folder does
    note: str = ""  # what it states that is ignored
    features: Any = None  # of a saved data set: what it states of its columns
    indexes: dict[Location, Location] | None = None  # of files, where the folder has them
    skipped: str = ""  # what was left out of the folder


def source_files_in(path: Location, retries: int) -> SourceFiles:
    """The data in a folder. Refused, with what is there, when it is not a data set, or is several."""
    there = listed_below(path, retries)
    known = {below(path, file): file for file in there.files}
    for kind in (_distilled, _easy_vqa, _saved_dataset, _energon_folder, _with_table, _of_one_kind, _json, _sidecars):
        found = kind(path, known, retries)
        if found is not None:
            return found._replace(skipped=there.skipped)
    skipped = f" Skipped: {there.skipped}." if there.skipped else ""
    images = sum(_is_image(name) for name in known)
    if images:
        remedy = "Put a metadata.csv with the columns file_name and caption there, or a .txt of the same name next to each image"
        raise Refused(f"{path} is a folder with {counted(images, 'image')}, and no file that describes them.{skipped} {remedy}")
    raise Refused(
        f"{path} is a folder without known data: none of its {len(known):,} files is .json, .jsonl, .csv, .parquet, .arrow or "
        f".tar.{skipped} Name another"
    )


FilesByName = dict[str, Location]  # all files of a folder, by their names from there on


def _is_image(name: str) -> bool:
    return name.rpartition(".")[2].lower() in IMAGE_SUFFIXES


def _easy_vqa(path: Location, known: FilesByName, retries: int) -> SourceFiles | None:  # noqa: ARG001
    questions = known.get("questions.json")
    return SourceFiles(questions, path, [questions]) if questions is not None else None


DISTILLED = "distilled.json"  # that names the files of a folder of `eyeline distill`, once it is complete


def _distilled(path: Location, known: FilesByName, retries: int) -> SourceFiles | None:
    """What `eyeline distill` kept."""
    if DISTILLED not in known:
        if "job/distill/plan.json" in known:
            raise Refused(f"{path} is a folder of `eyeline distill` that is not complete. Run the same command again: it resumes")
        return None
    said = _object(known[DISTILLED], retries).get("files")
    names = [str(item.get("name")) for item in said if isinstance(item, dict)] if isinstance(said, list) else []
    if not names:
        raise Refused(f"{path} holds no answer that was kept; {path / 'rejected'} says why")
    absent = [name for name in names if name not in known]
    if absent:
        raise Refused(f"{path / DISTILLED} names {absent[0]}, and it does not exist. Run `eyeline distill` again: it writes the file again")
    return SourceFiles(path, path, [known[name] for name in names])


def _energon_folder(path: Location, known: FilesByName, retries: int) -> SourceFiles | None:
    """The training archives of a folder that Megatron-Energon has prepared."""
    files = energon_shards(path, list(known.values()), retries)
    if files is None:
        return None
    about = known.get(".nv-meta/dataset.yaml")
    columns, note = energon_columns(about, retries) if about is not None else ({}, "")
    indexes = {file: known[name] for file in files if (name := f"{below(path, file)}.idx") in known}
    return SourceFiles(path, path, files, columns=columns, note=note, indexes=indexes)


def _saved_dataset(path: Location, known: FilesByName, retries: int) -> SourceFiles | None:
    """The folder that `datasets.save_to_disk` wrote: one set, or several splits of which one must be named."""
    if "dataset_dict.json" in known:
        said = _object(known["dataset_dict.json"], retries).get("splits")
        splits = [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
        if len(splits) != 1:
            one = "train" if "train" in splits else next(iter(splits), "train")
            raise Refused(f"{path} holds the splits {', '.join(splits)}. Name one of them, such as {path}/{one}")
        inner = {name.removeprefix(f"{splits[0]}/"): file for name, file in known.items() if name.startswith(f"{splits[0]}/")}
        if "state.json" not in inner:
            raise Refused(f"{path / 'dataset_dict.json'} names {splits[0]}, and its state.json does not exist. Write the folder again")
        return _saved_dataset(path / splits[0], inner, retries)
    if not {"state.json", "dataset_info.json"} <= known.keys():
        return None
    state = _object(known["state.json"], retries)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise Refused(
            f"{path} is a selection of rows, which is not supported. Write it again: datasets.load_from_disk(...).flatten_indices()"
        )
    names = [str(item.get("filename")) for item in state.get("_data_files") or () if isinstance(item, dict)]
    absent = [name for name in names if name not in known]
    if absent or not names:
        raise Refused(f"{path / 'state.json'} names {absent[0] if absent else 'no files'}, and it does not exist. Write the folder again")
    return SourceFiles(path, path, [known[name] for name in names], features=_object(known["dataset_info.json"], retries).get("features"))


def _with_table(path: Location, known: FilesByName, retries: int) -> SourceFiles | None:  # noqa: ARG001
    """Images and a table of them, as Hugging Face's `imagefolder` has it."""
    tables = [name for name in known if name.rpartition("/")[2] in ("metadata.csv", "metadata.jsonl", "metadata.parquet")]
    if not tables:
        return None
    outer = [name for name in tables if "/" not in name] or tables
    if len(outer) > 1:
        raise Refused(f"{path} holds {', '.join(outer[:10])}. Name one of them, such as {path}/{outer[0]}")
    return SourceFiles(known[outer[0]], known[outer[0]].parent, [known[outer[0]]])


ENDS = {"tar": ("tar",), "parquet": ("parquet",), "arrow": ("arrow",), "jsonl": ("jsonl", "ndjson"), "csv": ("csv", "tsv")}


def _of_one_kind(path: Location, known: FilesByName, retries: int) -> SourceFiles | None:  # noqa: ARG001
    """Files that are one set together, wherever they are stored."""
    found = {kind: [name for name in known if name.rpartition(".")[2].lower() in ends] for kind, ends in ENDS.items()}
    kinds = [kind for kind, names in found.items() if names]
    if not kinds:
        return None
    if len(kinds) > 1:
        several = " and ".join(f".{kind}" for kind in kinds)
        raise Refused(f"{path} holds both {several} files. Name one kind by a pattern, such as {path}/*.{kinds[0]}")
    [kind], [names] = kinds, [found[kinds[0]]]
    splits = {word for name in names for word in _SPLIT.findall(name.lower())}
    if len(splits) > 1:
        raise Refused(
            f"{path} holds files of {', '.join(sorted(splits))}, and all would be used. Name one of them by a pattern, such as "
            f"{path}/**/*{min(splits, key=lambda word: (word != 'train', word))}*.{kind}"
        )
    files = [known[name] for name in names]
    return SourceFiles(path, common_folder(files) if kind in ("jsonl", "csv") else path, files)


_SPLIT = re.compile(r"(?:^|[/._-])(train|test|valid|validation|val|dev|eval)(?=[/._-])")
ABOUT = ("dataset_info.json", "dataset_infos.json", "config.json")  # say something of a set, and hold none


def _json(path: Location, known: FilesByName, retries: int) -> SourceFiles | None:  # noqa: ARG001
    """The one JSON file of a folder."""
    names = [name for name in known if name.endswith(".json") and "/" not in name and name not in ABOUT]
    if len(names) > 1:
        raise Refused(f"{path} holds several .json files. Give one of its files: {', '.join(names[:10])}")
    return SourceFiles(known[names[0]], path, [known[names[0]]]) if names else None


def _sidecars(path: Location, known: FilesByName, retries: int) -> SourceFiles | None:  # noqa: ARG001
    """Images, each with a text of the same name."""
    images = [name for name in known if _is_image(name)]
    texts = [known.get(f"{name.rpartition('.')[0]}.txt") for name in images]
    return SourceFiles(path, path, [known[name] for name in images], texts) if any(texts) else None


def _object(path: Location, retries: int) -> dict[str, Any]:
    file = File.of(path, retries)
    try:
        value = json.loads(file.read(0, file.size))
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not JSON: {error}. Write the folder again") from error
    return value if isinstance(value, dict) else {}
