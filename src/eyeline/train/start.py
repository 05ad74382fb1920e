"""Where a run begins: its folder, its model's description, and the weights that a stage starts from."""

import itertools
import re
import shlex
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyeline import models
from eyeline.bundle.bundle import Bundle, Weights, describe, open_bundle, open_weights, read_description, refuse_other_version, tokenizer_of
from eyeline.bundle.fill import Seed, Source, refuse_other_parts
from eyeline.bundle.folders import warn_of_others
from eyeline.bundle.peft_adapter import PeftAdapter, open_adapter
from eyeline.bundle.rows import with_tokens
from eyeline.checkpoint import store
from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.files import read_json, read_lines, read_object, write_json
from eyeline.core.locations import Remote
from eyeline.core.plan import Part, part_of
from eyeline.core.world import ALONE, World
from eyeline.data.prepared.folder import TOKENIZER
from eyeline.data.reader import Reader, changes, identity_of_plan, short_hash, validation_sources
from eyeline.data.sets import training_texts
from eyeline.data.sources.folders import parse_location
from eyeline.data.text.templates import VIDEO, template_named
from eyeline.data.text.tokenizer import Encoder, add_tokens, load_tokenizer, train_bpe
from eyeline.models.moe import Forced
from eyeline.models.shape import shape
from eyeline.parallel.launch import Machine
from eyeline.train import evidence, metrics
from eyeline.train.environment import environment, versions
from eyeline.train.peak import Peak, peak_stamp
from eyeline.train.run import CODE, Full, Run, differences, from_yaml, to_yaml, write_recipe
from eyeline.train.trainable import recomputed

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

# Temporary files of a start that was killed. Those of reports and evaluations are removed by these.
_LEFTOVER = re.compile(r"\.(recipe\.yaml|env\.json|model)\.[0-9a-f]{8}\.tmp")


@dataclass(frozen=True)
class Home:
    """A run folder that is ready to be trained in."""

    folder: Path
    id: str  # unique to the run: no other run's checkpoint is ever taken for one of it
    attempt: int  # 1 at the first start
    bundle: Bundle
    encoder: Encoder
    writes: bool = True  # of several ranks, whether this is the one that writes into the folder

    def record(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self.writes:
            metrics.write(self.folder, line, self.attempt)

    def record_rank(self, rank: int, line: dict[str, Any]) -> None:
        """Append a line to the metrics of one rank."""
        metrics.write_rank(self.folder, rank, line, self.attempt)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def start_run(run: Run, folder: Path, world: World = ALONE) -> Home:
    """Make the run folder, or examine the one that is there; of several ranks, one does, and the others read it. Refused if it belongs to
    another recipe, or to no run."""
    world.by_first(lambda: _make_folder(run, folder))
    bundle, known = read_description(folder / "model"), _attempts(folder / "env.json")
    home = Home(folder, known["run"], len(known["attempts"]) + 1, bundle, bundle.encoder(), world.first)
    refuse_other_ranks(run, home, world)
    return home


def refuse_other_ranks(run: Run, home: Home, world: World) -> None:
    """Raise Refused on every rank where one has another recipe, tokenizer, or version of anything than rank 0, naming both."""
    if world.size == 1:
        return
    own = versions() | {"recipe": short_hash(to_yaml(run)), "tokenizer": home.encoder.identity, "run folder": home.id}
    first, *others = world.gather_patiently(own)
    for rank, other in enumerate(others, 1):
        if differ := [
            f"{name} is {other.get(name)} there and {first.get(name)} on rank 0"
            for name in first | other
            if other.get(name) != first.get(name)
        ]:
            raise Refused(f"rank {rank} is not like rank 0: {'; '.join(differ)}. Start all ranks with the same code, recipe and folder")


def refuse_other_data(world: World, reader: Reader, budget: Budget) -> None:
    """Raise Refused on every rank where one reads other data than rank 0, naming both."""
    identity = identity_of_plan(reader, budget)
    paths = {"data": reader.training.index.sources, "validation": validation_sources(reader)}
    first, *others = world.gather_patiently(identity)
    for rank, other in enumerate(others, 1):
        if other == first:
            continue
        differ = [name for name in first if first[name] != other.get(name)]
        files = [
            str(rows.path)
            for name in paths.keys() & set(differ)
            for rows, here, there in zip(paths[name], first[name], other[name], strict=True)
            if here != there
        ]
        raise Refused(f"rank {rank} reads other data than rank 0: {', '.join(files or differ)}. Give all ranks the same files")


def _make_folder(run: Run, folder: Path) -> None:
    """The folder then holds recipe.yaml (resolved), env.json (the run's id, and the environment of every attempt) and model/ (the
    description and tokenizer, which a later attempt and other ranks read instead of making them again).
    """
    recipe, env = folder / "recipe.yaml", folder / "env.json"
    if recipe.exists():
        before, _ = _recorded(recipe), _attempts(env)
        if before != run and _untouched(folder):
            describe(_described(run), folder / "model")
            write_recipe(folder, run)
        else:
            refuse_another_recipe(run, folder)
            warn_of_others(folder)
    else:
        refuse_strangers(folder)
        describe(_described(run), folder / "model")
        write_json(env, {"run": uuid.uuid4().hex[:12], "attempts": []})
        write_recipe(folder, run)
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    store.remove_leftovers(folder / "checkpoints")
    evidence.remove_leftovers(folder)
    shutil.rmtree(folder / "ranks", ignore_errors=True)  # where ranks of an earlier attempt were, which may have been more


def refuse_strangers(folder: Path) -> None:
    """Raise Refused if a folder that is there is not a run folder and not empty. Nothing is written, not even a lock."""
    if not folder.is_dir() or (folder / "recipe.yaml").exists():
        return
    strangers = sorted(p.name for p in folder.iterdir() if p.name not in ("lock", CODE, "index") and not p.name.startswith("."))
    if strangers not in ([], ["model"], ["env.json", "model"]):  # the latter are what a start that was killed leaves, and indexes
        raise Refused(f"{folder} holds {', '.join(strangers[:5])} and no recipe.yaml: it is not a run folder. Choose another out=")


def _untouched(folder: Path) -> bool:
    """Return whether the folder's run never made a step: then another recipe may have it."""
    saved = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())
    return not saved and not any(line["kind"] == "step" for line in read_lines(folder / "metrics.jsonl"))


def _attempts(env: Path) -> dict[str, Any]:
    """What env.json says: the run's id, and the attempts so far."""
    known = read_object(env)
    if not isinstance(known.get("run"), str) or not isinstance(known.get("attempts"), list):
        raise Refused(f"{env} has no id of the run (`run`) and list of `attempts`. Restore it, or choose another out=")
    return known


def refuse_changed_past(run: Run, home: Home, checkpoint: store.Checkpoint | None) -> None:
    """Raise Refused if a stage that has ended is given another length, or a running one fewer steps than it has done: nothing
    would come of it."""
    if checkpoint is None:
        return
    ended, done = checkpoint.state["stage"], checkpoint.state["progress"]["step"]
    if ended < len(run.stages) and (steps := run.stages[ended].steps) is not None and steps <= done:
        raise Refused(f"stage {run.stages[ended].name} has steps={steps} and has already done {done}; raise steps, or leave it unchanged")
    before = _recorded(home.folder / "recipe.yaml")
    for old, new in list(zip(before.stages, run.stages, strict=True))[:ended]:
        for length in ("steps", "epochs"):
            was, wanted = getattr(old, length), getattr(new, length)
            if was != wanted:
                raise Refused(
                    f"stage {old.name} has ended, with {length}={was}; {length}={wanted} would change nothing. Leave it unchanged. "
                    f"{onward(run, home.folder)}"
                )


def peak_here(run: Run, home: Home, here: Machine) -> Peak | None:
    """The peak of one device of the run, measured unless an attempt before has done so on the same machine."""
    return peak_stamp(here, run.precision, _attempts(home.folder / "env.json")["attempts"])


def announce(
    run: Run,
    home: Home,
    here: Machine,
    checkpoint: store.Checkpoint | None,
    world: World,
    peak: Peak | None,
    elapsed: Callable[[], float],
) -> list[str]:
    """Put this attempt on record: its stamps in env.json and metrics.jsonl, and the settings that changed in recipe.yaml. The changes.
    `elapsed`: seconds since the process started."""
    recipe = home.folder / "recipe.yaml"
    changed = differences(_recorded(recipe), run, may=True)
    stamps = environment(here) | {
        "precision": run.precision,
        "world_size": world.size,
        "peak": peak,
        "resumed_from": checkpoint.step if checkpoint else None,
    }
    stamps["forced_expert_balance"] = any(isinstance(stage.experts, Forced) for stage in run.stages)
    env = home.folder / "env.json"
    known = read_json(env)
    write_json(env, known | {"attempts": [*known["attempts"], stamps]})
    changed += [f"{name}, which the recipe names" for name in write_recipe(home.folder, run)]
    home.record({"kind": "start", **stamps, "elapsed_s": elapsed()})
    return changed


def _recorded(recipe: Path) -> Run:
    """The recipe of the run that is there."""
    refuse_other_version(recipe.parent / "model")  # first: the recipe of such a run has other names too
    try:
        return from_yaml(recipe.read_text(encoding="utf-8"), recipe.parent)
    except ValueError as error:
        raise Refused(f"{recipe} cannot be read by this version of Eyeline: {error}. Choose another out=") from error


def recorded_batches(run: Run, folder: Path) -> dict[int, Budget]:
    """The sizes of packs that the run in a folder has chosen, by the number of the stage that asks for one; none before its first step."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists() or _untouched(folder):
        return {}
    pairs = enumerate(zip(_recorded(recipe).stages, run.stages, strict=False))
    return {n: old.batch.budget for n, (old, new) in pairs if not new.batch.chosen and old.batch.auto and old.batch.chosen}


def refuse_another_recipe(run: Run, folder: Path) -> None:
    """Raise Refused if the folder holds a run that has made a step, with settings that may not change."""
    recipe = folder / "recipe.yaml"
    if recipe.exists() and not _untouched(folder) and (changed := differences(_recorded(recipe), run)):
        listed = "\n  ".join(changed)
        raise Refused(
            f"{folder} holds a run of another recipe; these settings differ and may not change on resume:\n  {listed}\n"
            f"Restore the settings that the run was started with, or choose another out=. {onward(run, folder)}"
        )


def refuse_changed_data(run: Run, folder: Path, reader: Reader, state: Mapping[str, Any]) -> None:
    """Raise Refused if the data of the stage that a checkpoint's `state` stands in are not those that it has begun to train on."""
    progress = state["progress"]
    if progress["data"] is None:
        return
    found = changes(reader, run.stages[progress["stage"]].batch.budget, progress["data"], folder / "sources")
    if found:
        listed = "; ".join(how if what in ("data", "validation") else f"{what}: {how}" for what, how in found)
        raise Refused(
            f"{folder} cannot be resumed: since its checkpoint of step {state['global_step']}, {listed}. Restore it, and give the same "
            f"command again. {onward(run, folder)}"
        )


def onward(run: Run, folder: Path) -> str:
    """What to add to a command so that a new run starts from the newest weights of the run in `folder`."""
    number = next(n for n in itertools.count(2) if not folder.with_name(f"{folder.name}-{n}").exists())
    words = [f"out={folder.with_name(f'{folder.name}-{number}')}", f"model.path={folder}"]
    words += [f"model.{name}=null" for name in ("config", "template", "tokenizer", "adapter") if getattr(run.model, name) is not None]
    words += ["model.fresh=[]"] * bool(run.model.fresh) + ["model.weights={}"] * bool(run.model.weights)
    stages = " (after removing the stages that have ended from the recipe)" if len(run.stages) > 1 else ""
    return f"To start a new run from these weights, add to the command{stages}: {shlex.join(words)}"


def smaller(run: Run, home: Home, number: int) -> str:
    """What to do about too little memory in a stage."""
    stage = run.stages[number]
    blocks = shape(home.bundle.config, trains={}).blocks
    again = recomputed(stage, blocks)
    parts = [part for part, names in blocks.items() if part not in again or not again[part].whole(len(names))]
    setting = f"stages.{stage.name}.gradient_checkpointing=true"
    lower = f"To keep less in memory, add {setting} to the same command" if parts else ""
    saved = home.checkpoints.is_dir() and any(home.checkpoints.glob("step-*"))
    if saved:
        lower += "; it resumes from the last checkpoint. " if parts else ""
        sizes = "batch={auto: true, memory_gb: N}" if stage.batch.auto else "batch.max_tokens=N"
        new = f"{onward(run, home.folder)} {shlex.quote(f'stages.{stage.name}.{sizes}')}"
        return f"{lower}Lower batch.max_tokens and batch.max_patches in a new run. {new}"
    lower += f"{', or lower' if parts else 'Lower'} batch.max_tokens and batch.max_patches"
    return f"{lower}: no step was done yet" if _untouched(home.folder) else f"{lower}, with another out=: nothing has been saved yet"


def description(run: Run) -> Bundle:
    """The bundle of a fresh run: read from the model folder, or made from the recipe, its tokenizer trained if need be."""
    if run.model.path is not None:
        bundle = open_bundle(Path(run.model.path)).bundle
        parts = models.spec(bundle.config).parts
        if strange := [part for part in run.model.fresh if part not in parts]:
            raise Refused(f"fresh names {', '.join(strange)}, and the model in {run.model.path} has {', '.join(parts)}")
        adapter_of(run)
        return with_tokens(bundle, run.model.add_tokens)
    config = run.model.config
    assert config is not None, "Model has path or config"
    opened = {folder: open_weights(Path(folder)) for folder in dict.fromkeys(run.model.weights.values())}
    for part, folder in run.model.weights.items():
        if part not in (parts := models.spec(config).parts):
            raise Refused(f"weights names {part}, and the model has {', '.join(parts)}")
        refuse_other_parts(shape(config, trains={}), config, opened[folder], [part])
    language, own = run.model.weights.get("language"), run.model.tokenizer
    given = open_bundle(Path(language)).bundle if language is not None and (own is None or run.model.template is None) else None
    template = template_named(run.model.template or (given.template if given else ""))
    image = models.spec(config).image
    if given is not None and own is None:
        added = add_tokens(given.tokenizer, template, image.marks if image else None)
        learned = [token for token in added if token not in (template.image, VIDEO)]  # an image's features take its token's place
        joined = replace(given, config=config, template=template.name, untrained=(*given.untrained, *learned))
        return with_tokens(joined, run.model.add_tokens)
    prepared = next((stage.data.prepared for stage in run.stages if stage.data.prepared is not None), None)
    if own is not None:
        tokenizer = load_tokenizer(Path(own))
        if language is not None:
            _refuse_other_ids(tokenizer, own, language)
    elif prepared is not None:
        folder = parse_location(prepared)
        if isinstance(folder, Remote):
            raise Refused(
                f"the tokenizer of a new model cannot be read from a store. Copy {folder / TOKENIZER} here, and set model.tokenizer"
            )
        tokenizer = load_tokenizer(folder / TOKENIZER)
    else:
        texts = (text for stage in run.stages for text in training_texts(stage.data))
        marks = image.marks if image else ()
        tokenizer = train_bpe(texts, config.language.vocab_size - len(marks) - len(run.model.add_tokens), template)
        add_tokens(tokenizer, template, marks)
    return with_tokens(Bundle(config, tokenizer, template.name), run.model.add_tokens)


def adapter_of(run: Run) -> PeftAdapter | None:
    """The adapter that the recipe's model starts with, examined against that model. Raises Refused."""
    if run.model.adapter is None or run.model.path is None:
        return None
    weights = open_weights(Path(run.model.path))
    if weights.form is None or weights.form.name == "parts":
        what = "a run" if weights.form is None else "a folder of parts"
        raise Refused(
            f"adapter {run.model.adapter}: peft's adapters are of models that one class of transformers loads, and {run.model.path} is "
            f"{what}. Give the folder of the model that it was trained on (as `eyeline import --model` or `eyeline export` makes it)"
        )
    adapter = open_adapter(Path(run.model.adapter), weights.config, weights.form)
    if fresh := {part_of(name) for name in (*adapter.updates, *adapter.replaced, *adapter.rows)} & set(run.model.fresh):
        raise Refused(
            f"adapter {adapter.folder} changes {' and '.join(sorted(fresh))}, which fresh starts from random weights. Leave one out"
        )
    return adapter


def _refuse_other_ids(tokenizer: "PreTrainedTokenizerBase", own: str, language: str) -> None:
    """Raise Refused where an id of this tokenizer is another token in the folder of the language model, whose embeddings it would get."""
    theirs = tokenizer_of(Path(language))
    named = {} if theirs is None else {id: token for token, id in theirs.get_vocab().items()}
    other = sorted((id, token) for token, id in tokenizer.get_vocab().items() if named.get(id, token) != token)
    if other:
        id, token = other[0]
        raise Refused(
            f"{own} is not the tokenizer of the language model in {language}: {len(other):,} ids are other tokens, such as {id}, which is "
            f"{token!r} in {own} and {named[id]!r} there. Leave model.tokenizer out, or language out of model.weights"
        )


def description_at(run: Run, folder: Path) -> Bundle:
    """The bundle of a run: where it resumes in the folder, the one that it has there, and nothing that its model started from is read."""
    recipe = folder / "recipe.yaml"
    saved = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())
    if saved and recipe.exists() and _recorded(recipe).model == run.model:
        return read_description(folder / "model")
    return description(run)


def _known_rows(run: Run, folder: str) -> int | None:
    """The rows that tokens have in the model that a run starts from; None where the run adds no tokens to it."""
    tokenizer = tokenizer_of(Path(folder)) if run.model.add_tokens else None
    known = {} if tokenizer is None else tokenizer.get_vocab()
    return 1 + max(known.values()) if known and not known.keys() >= set(run.model.add_tokens) else None


def _described(run: Run) -> Bundle:
    """`description`, as it is once the run has trained: a stage that trains the language model in full trains its embeddings too."""
    bundle = description(run)
    full = any(isinstance(stage.trains.get("language"), Full) for stage in run.stages)
    adapted = any("language" in stage.trains for stage in run.stages)
    left = () if full else tuple(token for token in bundle.untrained if not (adapted and token in run.model.add_tokens))
    return replace(bundle, untrained=left)


def sources_of(run: Run, home: Home, checkpoint: store.Checkpoint | None, world: World = ALONE) -> Mapping[Part, Source]:
    """Where each part's weights come from: the run's checkpoint, or what the recipe's model starts with."""
    parts = models.spec(home.bundle.config).parts
    if checkpoint is not None:
        return dict.fromkeys(parts, Weights(home.folder, home.bundle.config, None, checkpoint))
    fresh = Seed(run.seed)
    if run.model.path is not None:
        known = _known_rows(run, run.model.path)
        whole = replace(open_weights(Path(run.model.path), world), known_rows=known, adapter=adapter_of(run))
        return {part: fresh if part in run.model.fresh else whole for part in parts}
    opened = {folder: open_weights(Path(folder), world) for folder in run.model.weights.values()}
    if (language := run.model.weights.get("language")) is not None:
        opened[language] = replace(opened[language], known_rows=_known_rows(run, language))
    return {part: opened[run.model.weights[part]] if part in run.model.weights else fresh for part in parts}
