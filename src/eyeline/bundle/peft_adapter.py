"""An adapter in peft's format: LoRA, with rsLoRA, DoRA, other ranks for some layers, modules that were trained in full, and rows of tokens.

Its tensors have the names of transformers' modules; here each is found by the name of our layer. A layer of theirs that is several of ours
(q, k and v in one) has one A and one B: each of ours gets the same A, and its outputs of B.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyeline.bundle.places import parameters_by_name
from eyeline.checkpoint.tensors import Key, entries_of, key_of, read_tensor
from eyeline.core.errors import Refused
from eyeline.core.files import read_object
from eyeline.core.plan import Part, Plan, part_of
from eyeline.core.shards import put
from eyeline.models import Config, Model
from eyeline.models.hf import mapping_of
from eyeline.models.hf.forms import Form
from eyeline.models.lora import merge, updates_of
from eyeline.models.shape import shape

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NAMED = 4  # layers that a message names

# settings that say how an adapter was trained, or that its tensors show
HARMLESS = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters", "modules_to_save"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights", "trainable_token_indices"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying", "bias", "fan_in_fan_out"),
}
KEEP_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # init_lora_weights that leave the base's weights as they are


@dataclass(frozen=True)
class Update:
    """The adapter of one of our weights: where its tensors are."""

    module: str  # of theirs, as tensors are called in the file
    rank: int
    scale: float
    dora: bool
    key: Key | None  # of a layer's weight; None of stacked experts
    output: int  # which of the key's layers this is; of gate and up of experts, which
    outputs: int = 1  # of stacked experts, how many share the adapter: gate and up, or down alone
    experts: int = 0


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """An adapter's folder, examined. Tensors are read when they are asked for."""

    folder: Path
    base: str  # what it says that it was trained on
    updates: Mapping[str, Update]  # by the name of our weight
    replaced: Mapping[str, tuple[Key, int, str]]  # tensors that were trained in full, by our name; the key, which of it, their name
    rows: Mapping[str, tuple[tuple[int, ...], str]]  # our embedding -> ids of the rows that were trained, and the tensor's name

    def tensor(self, name: str) -> Tensor:
        return read_tensor(self.folder / TENSORS, name)

    def factors(self, weight: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """A, B and the rows' lengths of one of our weights."""
        one = self.updates[weight]
        a_rI, b_Or = (self.tensor(f"{one.module}.lora_{name}.weight").float() for name in "AB")
        if one.key is None:  # as peft stacks them: A by expert and rank, B's columns by rank and expert
            b_EOr = b_Or.unflatten(1, (one.rank, one.experts)).permute(2, 0, 1)
            return a_rI.unflatten(0, (one.experts, one.rank)), b_EOr.chunk(one.outputs, 1)[one.output], None
        b_Or = one.key.read(b_Or)[one.output]
        if not one.dora:
            return a_rI, b_Or, None
        return a_rI, b_Or, one.key.read(self.tensor(_lengths_name(self, one)).float().view(-1, 1))[one.output][:, 0]

    def applied(self, name: str, value: Tensor, merges: bool = True) -> Tensor:
        """A tensor of the base with what the adapter changes of it; without `merges`, the updates of layers are left out."""
        if name in self.replaced:
            key, output, theirs = self.replaced[name]
            value = key.read(self.tensor(theirs))[output]
        if name in self.rows:
            ids, theirs = self.rows[name]
            value = value.float().index_copy(0, torch.tensor(ids), self.tensor(theirs).float())
        if merges and name in self.updates:
            a_rI, b_Or, magnitude_O = self.factors(name)
            value = merge(value, a_rI, b_Or, self.updates[name].scale, magnitude_O)
        return value


def _lengths_name(adapter: PeftAdapter, one: Update) -> str:
    names = entries_of(adapter.folder / TENSORS)
    return next(name for name in (f"{one.module}.lora_magnitude_vector", f"{one.module}.lora_magnitude_vector.weight") if name in names)


def open_adapter(folder: Path, config: Config, form: Form) -> PeftAdapter:
    """Examine an adapter for a model of this config, which transformers has in this form. Raises Refused with what does not fit."""
    settings = _settings(folder)
    named, experts = _names(config, form), _experts(config, form)
    sizes = {name: x.shape for name, x in parameters_by_name(shape(config, trains={}).model).items()}
    updates: dict[str, Update] = {}
    replaced: dict[str, tuple[Key, int, str]] = {}
    rows: dict[str, tuple[tuple[int, ...], str]] = {}
    unknown: list[str] = []
    entries = entries_of(folder / TENSORS)
    for name in entries:
        module, kind = _parsed(folder, name)
        key = named.get(module if kind == "weight" else f"{module}.weight")
        if kind in "AB" and (own := experts.get(module.removesuffix(".base_layer"))) is not None:
            updates |= _expert_updates(folder, settings, name, module, own, entries, sizes) if kind == "A" else {}
        elif key is None:
            unknown += [module] if module not in unknown else []
        elif kind == "A":
            updates |= _updates(folder, settings, name.removesuffix(".lora_A.weight"), module, key, entries, sizes)
        elif kind == "rows":
            rows[key.ours[0]] = _rows_of(folder, settings, module, name, entries[name].shape, sizes[key.ours[0]])
        elif kind == "weight":
            replaced |= {ours: (key, n, name) for n, ours in enumerate(key.ours)}
            if entries[name].shape != tuple(key.write([torch.empty(sizes[ours], device="meta") for ours in key.ours]).shape):
                raise Refused(f"{folder} has {name} of shape {list(entries[name].shape)}, and the model has another. {_MERGE}")
    if unknown:
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        raise Refused(
            f"{folder} adapts {', '.join(unknown[:NAMED])}{more}, which this model does not have, or which takes no adapter here. It was "
            f"trained on {settings.get('base_model_name_or_path')}: is that this model? {_MERGE}"
        )
    if not updates and not replaced and not rows:
        raise Refused(f"{folder / TENSORS} has no adapter of any layer. Was the right file copied?")
    return PeftAdapter(folder, str(settings.get("base_model_name_or_path")), updates, replaced, rows)


_MERGE = "Otherwise merge it with peft (merge_and_unload), and import what that gives"


def _settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json. Raises Refused for kinds of adapters that are not computed here."""
    if not folder.is_dir():
        raise Refused(f"{folder} is not a directory. Give the folder that peft's save_pretrained wrote, with {SETTINGS}")
    if not (folder / SETTINGS).exists():
        raise Refused(f"{folder} has no {SETTINGS}: it is not an adapter of peft's. A whole model goes into model.path")
    settings = read_object(folder / SETTINGS)
    if (kind := settings.get("peft_type")) != "LORA":
        raise Refused(f"{folder} is an adapter of type {kind}, and Eyeline has LoRA, rsLoRA and DoRA. {_MERGE}")
    if not (folder / TENSORS).exists():
        raise Refused(f"{folder} has no {TENSORS}; adapters in .bin are pickled and never loaded. Save it with safe_serialization=True")
    if (bias := settings.get("bias", "none")) != "none":
        raise Refused(f"{folder} has bias={bias!r}: biases of the model that were trained with it, which Eyeline does not read. {_MERGE}")
    if settings.get("fan_in_fan_out"):
        raise Refused(f"{folder} has fan_in_fan_out=true, for weights that are stored transposed, which no model here has")
    if (start := settings.get("init_lora_weights", True)) not in KEEP_BASE:
        raise Refused(
            f"{folder} has init_lora_weights={start!r}, which changes the weights of the base: on the base alone it would compute "
            "something else. Convert it to plain LoRA with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if others := sorted(name for name, value in settings.items() if name not in HARMLESS and value):
        raise Refused(f"{folder / SETTINGS} has {', '.join(others)}, which Eyeline does not compute. {_MERGE}")
    return settings


def _names(config: Config, form: Form) -> dict[str, Key]:
    """The tensors of the model by their names in transformers' module, and in its folder, where a name differs."""
    rules, named = mapping_of(config).keys(config, form), dict[str, Key]()
    for ours in parameters_by_name(shape(config, trains={}).model):
        key = key_of(ours, rules)
        if not key.stacked:
            named.setdefault(key.theirs, key)
            inside = _in_module(key.theirs, form)
            for name in (inside, inside.replace("vision_tower.vision_model.", "vision_tower.")):  # of transformers 4, and of 5
                named.setdefault(name, key)
    return named


def _experts(config: Config, form: Form) -> dict[str, str]:
    """Their module of the experts of a layer -> ours: theirs is next to the router."""
    rules, found = mapping_of(config).keys(config, form), dict[str, str]()
    for ours in parameters_by_name(shape(config, trains={}).model):
        if ours.endswith(".router.weight"):
            router = _in_module(key_of(ours, rules).theirs, form).removesuffix(".weight")
            found[f"{router.rpartition('.')[0]}.experts"] = f"{ours.removesuffix('.router.weight')}.experts"
    return found


def _in_module(on_disk: str, form: Form) -> str:
    """The name that a tensor of a folder has in the model that transformers makes of it."""
    for ours, theirs in form.modules.items():
        if on_disk.startswith(ours):
            return theirs + on_disk.removeprefix(ours)
    return on_disk


def _parsed(folder: Path, name: str) -> tuple[str, str]:
    """Their module, and what of it a tensor of the file is: A, B, lengths, rows; or the name of a whole tensor. Raises Refused."""
    inner = name.removeprefix(PREFIX)
    if match := re.fullmatch(r"(.+)\.lora_([AB])\.weight", inner):
        return match[1], match[2]
    if match := re.fullmatch(r"(.+)\.lora_magnitude_vector(\.weight)?", inner):
        return match[1], "lengths"
    if match := re.fullmatch(r"(.+)\.token_adapter\.trainable_tokens_delta", inner):
        return match[1], "rows"
    if ".lora_" in inner:
        what = "an embedding" if "lora_embedding" in inner else "biases of the adapter" if "bias" in inner else "something else"
        raise Refused(f"{folder} has {name}: LoRA of {what}, which Eyeline does not compute. {_MERGE}")
    return inner, "weight"


def _updates(
    folder: Path,
    settings: Mapping[str, Any],
    stem: str,
    module: str,
    key: Key,
    entries: Mapping[str, Any],
    sizes: Mapping[str, Sequence[int]],
) -> dict[str, Update]:
    """The adapters of our layers that one layer of theirs is. Raises Refused where shapes do not fit."""
    if f"{stem}.lora_B.weight" not in entries:
        raise Refused(f"{folder} has {stem}.lora_A and no lora_B. Is the file damaged?")
    a, b = entries[f"{stem}.lora_A.weight"].shape, entries[f"{stem}.lora_B.weight"].shape
    weights = [sizes[ours] for ours in key.ours]
    outputs = sum(weight[0] for weight in weights)
    if len(a) != 2 or len(b) != 2 or any(len(weight) != 2 for weight in weights) or (a[1], b[0]) != (weights[0][1], outputs):
        raise Refused(
            f"{folder} has an adapter of {module} from {a[-1]} to {b[0]} numbers, and the layer is {' and '.join(map(str, weights))} here. "
            f"Was it trained on another model ({settings.get('base_model_name_or_path')})?"
        )
    if key.rule.read is not None and not _cuts_rows(key, outputs, a[1]):
        raise Refused(f"{folder} adapts {module}, whose inputs have another order here. {_MERGE}")
    rank, scale = a[0], _scale(folder, settings, module, a[0], b[1])
    dora = f"{stem}.lora_magnitude_vector" in entries or f"{stem}.lora_magnitude_vector.weight" in entries
    return {ours: Update(stem, rank, scale, dora, key, n) for n, ours in enumerate(key.ours)}


def _expert_updates(
    folder: Path,
    settings: Mapping[str, Any],
    name: str,
    module: str,
    ours: str,
    entries: Mapping[str, Any],
    sizes: Mapping[str, Sequence[int]],
) -> dict[str, Update]:
    """The adapters of a layer's experts that one parameter of theirs has: gate and up together, or down. Raises Refused."""
    stem = name.removesuffix(".lora_A.weight")
    if f"{stem}.lora_B.weight" not in entries:
        raise Refused(f"{folder} has {stem}.lora_A and no lora_B. Is the file damaged?")
    a, b = entries[name].shape, entries[f"{stem}.lora_B.weight"].shape
    count, hidden, width = sizes[f"{ours}.gate"]
    what = {(width, 2 * hidden): ("gate", "up"), (hidden, width): ("down",)}
    leaves = what.get((a[-1], b[0])) if len(a) == len(b) == 2 and a[0] == b[1] and a[0] % count == 0 else None
    if leaves is None:
        raise Refused(f"{folder} has adapters of {module} that do not fit the {count} experts of a layer here. {_MERGE}")
    rank = a[0] // count
    parameter = f"{module.removesuffix('.base_layer')}.{'down_proj' if leaves == ('down',) else 'gate_up_proj'}"
    scale = _scale(folder, settings, parameter, rank, rank)
    return {f"{ours}.{leaf}": Update(stem, rank, scale, False, None, n, len(leaves), count) for n, leaf in enumerate(leaves)}


def _scale(folder: Path, settings: Mapping[str, Any], module: str, rank: int, of_b: int) -> float:
    """What B·A is multiplied by. Raises Refused where the file has tensors of another rank than the settings say."""
    said = _by_pattern(settings.get("rank_pattern") or {}, module, settings.get("r", 8))
    if not said == rank == of_b:
        raise Refused(
            f"{folder} adapts {module} with rank {said} by its {SETTINGS}, and its tensors have {rank}"
            f"{'' if of_b == rank else f' (lora_A) and {of_b} (lora_B)'}. Are both files of the same training?"
        )
    alpha = float(_by_pattern(settings.get("alpha_pattern") or {}, module, settings.get("lora_alpha", 8)))
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def _cuts_rows(key: Key, rows: int, columns: int) -> bool:
    """Return whether our layers are rows of theirs, with the inputs in their order."""
    column_OI = torch.arange(columns, dtype=torch.int32).expand(rows, columns)
    return all(one.ndim == 2 and one.shape[1] == columns and bool((one == column_OI[0]).all()) for one in key.read(column_OI))


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as peft chooses it."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), otherwise)


def _rows_of(
    folder: Path, settings: Mapping[str, Any], module: str, name: str, stored: Sequence[int], weight: Sequence[int]
) -> tuple[tuple[int, ...], str]:
    """The ids of the rows of an embedding that were trained apart. Raises Refused."""
    indices = settings.get("trainable_token_indices")
    ids = indices.get(module.rpartition(".")[2]) if isinstance(indices, dict) else indices
    if not isinstance(ids, list) or tuple(stored) != (len(ids), weight[1]) or not all(0 <= id < weight[0] for id in ids):
        raise Refused(
            f"{folder} has {name}, whose rows do not fit its trainable_token_indices and the model's {weight[0]} tokens. {_MERGE}"
        )
    return tuple(ids), name


# ---- continued or merged


def continued_parts(adapter: PeftAdapter, plan: Plan[Model]) -> frozenset[Part]:
    """The parts whose adapters the model has in the same shape: they are trained on. Others are merged."""
    ours = {name: (one.rank, one.scale, one.magnitude is not None) for name, one in updates_of(plan.model).items()}
    theirs = {name: (one.rank, one.scale, one.dora) for name, one in adapter.updates.items()}

    def of(layers: Mapping[str, Any], part: Part) -> dict[str, Any]:
        return {name: what for name, what in layers.items() if part_of(name) == part}

    return frozenset(part for part in plan.spec.parts if (mine := of(ours, part)) and mine == of(theirs, part))


def put_adapters(adapter: PeftAdapter, model: nn.Module, parts: frozenset[Part]) -> set[str]:
    """Fill the adapters of these parts; the names of the tensors."""
    done: set[str] = set()
    for weight, update in updates_of(model).items():
        if part_of(weight) in parts:
            for name, value in zip(update[:3], adapter.factors(weight), strict=True):
                if name is not None and value is not None:
                    put(model.get_parameter(name), value)
                    done.add(name)
    return done


def adapter_lines(adapter: PeftAdapter, plan: Plan[Model], stage: str) -> list[str]:
    """What an adapter has, and what becomes of it in the first stage, in words."""
    lines, kept = [], continued_parts(adapter, plan)
    for part in plan.spec.parts:
        ones = {name: one for name, one in adapter.updates.items() if part_of(name) == part}
        if not ones:
            continue
        kinds = sorted({f"{'DoRA' if one.dora else 'LoRA'} r {one.rank}, scale {one.scale:.4g}" for one in ones.values()})
        fate = (
            f"stage {stage} trains them on" if part in kept
            else f"merged into the weights, since stage {stage} does not adapt the same layers in the same way"
        )  # fmt: skip
        lines.append(f"adapter {adapter.folder}: {len(ones)} layers of {part}, {'; '.join(kinds)}: {fate}")
    if adapter.replaced or adapter.rows:
        modules = sorted({name.rpartition(".")[0] for name in (*adapter.replaced, *adapter.rows)})
        lines.append(f"adapter {adapter.folder}: {', '.join(modules)} taken from it in place of the base's")
    return lines
