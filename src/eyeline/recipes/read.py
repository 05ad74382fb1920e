"""From YAML and `key=value` overrides to a `Run`, with every problem of the settings reported at once."""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from yaml.nodes import MappingNode

from eyeline.core.errors import Refused, nearest
from eyeline.core.facts import PARTS
from eyeline.core.settings import Settings
from eyeline.models import FAMILIES
from eyeline.models.languages import LANGUAGES
from eyeline.train.run import Run

Record = TypeVar("Record", bound=Settings)

# What PyYAML raises: beside its own errors those of Python, for values that look like a date or a number and are none
_NOT_YAML = (yaml.YAMLError, ValueError, AttributeError, RecursionError)

MAX_BYTES = 1 << 20
MOST_PLACES = 3  # that are named for a setting that stands elsewhere
MAX_NODES = 20_000  # aliases counted each time they are used: a recipe needs hundreds, an alias bomb has billions


def shipped() -> dict[str, Path]:
    """Name -> file of the recipes that come with Eyeline."""
    folder = Path(str(files("eyeline.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_recipe(recipe: str, overrides: Sequence[str] = ()) -> Run:
    """The Run of a shipped recipe's name or of a .yaml path, with overrides applied. Refused, with all that is wrong."""
    path = find_recipe(recipe)
    return run_of(override(load_yaml(path), overrides), str(path))


def find_recipe(recipe: str) -> Path:
    """The file that `recipe` names."""
    known = shipped()
    if recipe in known:
        return known[recipe]
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        raise Refused(
            f"no recipe is called {recipe!r}.{nearest(recipe, list(known))} Shipped recipes: {', '.join(known)}; "
            "a recipe of your own is named by its path, which ends in .yaml"
        )
    if not path.is_file():
        beside = [str(found) for kind in ("*.yaml", "*.yml") for found in sorted(path.parent.glob(kind))]
        raise Refused(
            f"there is no recipe file {path}.{nearest(str(path), beside)} Give the path of a .yaml file, or one of {', '.join(known)}"
        )
    return path


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file: no duplicate keys, no alias bombs, no tags that make objects."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise Refused(f"{path} has {path.stat().st_size:,} bytes; a recipe has at most {MAX_BYTES:,}. Is this a recipe?")
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _examine(node, path)
        value = yaml.safe_load(text)
    except _NOT_YAML as error:  # UnicodeDecodeError is a ValueError
        raise Refused(f"{path} is not YAML that can be read: {error}") from error
    if not isinstance(value, dict):
        raise Refused(
            f"{path} holds {'nothing' if value is None else type(value).__name__}; a recipe is a mapping with name, model and stages"
        )
    return value


def _examine(node: yaml.Node, path: Path) -> None:
    """Refuse duplicate keys (YAML itself lets the last one win) and more nodes than a recipe can need."""
    count = 0
    waiting = [node]
    while waiting:
        count += 1
        if count > MAX_NODES:
            raise Refused(f"{path} unfolds to more than {MAX_NODES:,} values; its aliases (*name) repeat too much")
        node = waiting.pop()
        if isinstance(node, MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            twice = sorted({key for key in keys if keys.count(key) > 1 and key != "<<"})
            if twice:
                raise Refused(f"{path}, line {node.start_mark.line + 1}: {twice[0]!r} is given twice in one place. Keep one of them")
            waiting += [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def override(recipe: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The recipe with each `key.path=value` applied. An item of a list is named by its number, or by its `name`."""
    recipe = _unshared(recipe)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise Refused(f"{text!r} is not an override: write key=value, such as seed=1 or stages.0.steps=100")
        try:
            parsed = yaml.safe_load(value)
        except _NOT_YAML as error:
            raise Refused(f"{text[:200]!r}: the value is not YAML: {error}. Put it in quotes if it is meant as text") from error
        _set(recipe, key.strip().split("."), parsed, text)
    return recipe


def _unshared(value: Any) -> Any:
    """A copy in which an alias (`*name`) has become a value of its own, so that an override changes one place."""
    match value:
        case dict():
            return {key: _unshared(child) for key, child in value.items()}
        case list():
            return [_unshared(child) for child in value]
        case _:
            return value


def _set(place: Any, pieces: list[str], value: Any, text: str) -> None:
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        key: Any = piece
        if isinstance(place, list):
            names = [item.get("name") if isinstance(item, dict) else None for item in place]
            if piece in names:
                key = names.index(piece)
            elif piece.isdigit() and int(piece) < len(place):
                key = int(piece)
            else:
                known = ", ".join(str(name) for name in names if name is not None)
                raise Refused(
                    f"{text!r}: {piece!r} is not in that list of {len(place)} (numbered from 0{'; names: ' + known if known else ''})"
                )
        elif not isinstance(place, dict):
            raise Refused(f"{text!r}: {'.'.join(pieces[:i])} is the value {place!r}, which has nothing called {piece!r} inside")
        elif not last and place.get(key) is None:
            place[key] = {}
        if last:
            place[key] = value
        else:
            place = place[key]


def run_of(recipe: dict[str, Any], where: str) -> Run:
    """Validate a recipe. Refused with one line a problem: where it is, what was got, what is wanted."""
    return settings_of(Run, recipe, where)


def settings_of(record: type[Record], values: dict[str, Any], where: str) -> Record:
    """Validate any record of settings, in the same way."""
    try:
        return record.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # a list whose only item is wrong is also "too short": what is wrong with the item says it
        problems = [p for p in problems if p["type"] != "too_short" or not any(_inside(q, p) for q in problems)]
        # a part that does not exist is one problem, whatever is said about it
        named = [p["loc"][:-1] for p in problems if p["loc"][-1:] == ("[key]",)]
        problems = [p for p in problems if p["loc"][-1:] == ("[key]",) or not any(p["loc"][: len(loc)] == loc for loc in named)]
        lines = list(dict.fromkeys(_line(problem, values) for problem in problems))
        many = f"{len(lines)} problems" if len(lines) > 1 else "a problem"
        raise Refused(f"{where} has {many}:\n" + "\n".join(f"  {line}" for line in lines)) from error


def _inside(inner: Any, outer: Any) -> bool:
    return len(inner["loc"]) > len(outer["loc"]) and inner["loc"][: len(outer["loc"])] == outer["loc"]


# what pydantic puts into a place to say which of several records it took; the recipe has no such key
_TAGS = {"full", "lora", "adamw", "muon", "constant", "linear", "cosine", "wsd", "aux", "bias", "forced", *FAMILIES, *LANGUAGES}


_WANTED = {  # pydantic's types, in words of YAML
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "names with values",
    "model_type": "names with values",
    "model_attributes_type": "names with values",
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}
_EXAMPLES = {
    "sources": "[{path: my.json}]",
    "optimizer": "{kind: adamw}",
    "schedule": "{kind: cosine}",
    "batch": "{tokens: 8192, patches: 8192}",
    **dict.fromkeys(PARTS, "{how: full, lr: 1.0e-3}"),
}


def _line(problem: Any, recipe: dict[str, Any]) -> str:
    *above, last = problem["loc"] or ("recipe",)
    place = ".".join(str(piece) for piece in [*(piece for piece in above if piece not in _TAGS), last])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        known = sorted(set(_names()))
        if last not in known:
            return f"{place}: there is no such setting.{nearest(str(last), known)}"
        found = [path for path in _paths(recipe, str(last)) if path != place]
        some = " or ".join(found[:MOST_PLACES]) + (" or another" if len(found) > MOST_PLACES else "")
        where = f" Did you mean {some}?" if found else " It belongs elsewhere: see docs/recipes.md, or a shipped recipe."
        return f"{place}: there is no such setting here.{where}"
    if last == "[key]":
        known = re.findall(r"'([^']*)'", message)
        parts = place.removesuffix(f".{above[-1]}.[key]")
        return f"{parts}: there is no {above[-1]!r}; there are {', '.join(known)}.{nearest(str(above[-1]), known)}"
    if problem["type"] == "union_tag_not_found":
        key = problem["ctx"]["discriminator"].strip("'_()")
        return f"{place}: got {problem['input']!r:.80}, which does not say `{key}`{_such_as(last, above)}"
    if problem["type"] == "union_tag_invalid":
        known = re.findall(r"'([^']*)'", problem["ctx"]["expected_tags"])
        tag, key = problem["ctx"]["tag"], problem["ctx"]["discriminator"].strip("'_()")
        return f"{place}.{key}: got {tag!r}; there are {', '.join(known)}.{nearest(tag, known)}"
    if problem["type"] in ("missing", "value_error"):
        return f"{place}: {message}"
    if problem["type"] in _WANTED:
        return f"{place}: got {problem['input']!r:.80}, wanted {_WANTED[problem['type']]}{_such_as(last, above)}"
    return f"{place}: got {problem['input']!r:.80}; {message[:1].lower()}{message[1:]}"


def _such_as(last: Any, above: list[Any]) -> str:
    example = "{path: my.json}" if above[-1:] == ["sources"] else _EXAMPLES.get(last)
    return f", such as {example}" if example else ""


def _paths(value: Any, name: str, above: str = "") -> Iterator[str]:
    """Where in a recipe settings of this name stand, as an override would say it."""
    match value:
        case dict():
            for key, child in value.items():
                if key == name:
                    yield f"{above}{key}"
                yield from _paths(child, name, f"{above}{key}.")
        case list():
            for n, child in enumerate(value):
                called = child.get("name") if isinstance(child, dict) else None
                yield from _paths(child, name, f"{above}{n if called is None else called}.")


def _names() -> Iterator[str]:
    """Every setting's name, from the schema of recipes."""
    schema = Run.model_json_schema()
    for record in (schema, *schema["$defs"].values()):
        yield from record.get("properties", {})
