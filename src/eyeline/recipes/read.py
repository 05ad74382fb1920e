"""From YAML and `key=value` overrides to a `Run`, with every problem of the settings reported at once."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from pydantic import ValidationError

from eyeline.core.errors import Refused, nearest
from eyeline.core.problems import lines_of
from eyeline.core.settings import Settings
from eyeline.core.user_code import anchored
from eyeline.core.words import counted
from eyeline.core.yaml_text import read_yaml
from eyeline.train.run import Run

Record = TypeVar("Record", bound=Settings)

MAX_BYTES = 1 << 20


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with Eyeline."""
    folder = Path(str(files("eyeline.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_text(name: str) -> str:
    """The text of a shipped recipe, its commented head included. Refused for any other name."""
    known = shipped_recipes()
    if name not in known:
        raise Refused(f"no shipped recipe is called {name!r}.{nearest(name, list(known))} Shipped recipes: {', '.join(known)}")
    return known[name].read_text(encoding="utf-8").rstrip("\n")


def summary(name: str) -> str:
    """The first sentence of a shipped recipe's head."""
    return recipe_text(name).split("\n#\n")[0].replace("\n# ", " ").removeprefix("# ").split(". ")[0].rstrip(".")


def read_recipe(recipe: str, overrides: Sequence[str] = ()) -> Run:
    """The Run of a shipped recipe's name or of a .yaml path, with overrides applied. Refused, with all that is wrong."""
    path = find_recipe(recipe)
    settings = load_yaml(path)
    if path != shipped_recipes().get(recipe):
        settings = anchored(settings, path.parent)  # code is next to the recipe that names it
    return run_of(anchored(override(settings, overrides), Path()), str(path))


def find_recipe(recipe: str) -> Path:
    """The file that `recipe` names."""
    known = shipped_recipes()
    if recipe in known:
        return known[recipe]
    path = Path(recipe).expanduser()
    if path.is_dir():
        inside = path / "recipe.yaml"
        raise Refused(f"{recipe} is a folder. A recipe is a .yaml file{f', such as {inside}' if inside.is_file() else ''}")
    if path.suffix not in (".yaml", ".yml"):
        what = f"{recipe} is a file, and its name does not end in .yaml: is it data? " if path.is_file() else ""
        raise Refused(
            f"{what}no recipe is called {recipe!r}.{nearest(recipe, list(known))} Shipped recipes: {', '.join(known)}; "
            "give one of them, or the path of a .yaml file"
        )
    if not path.is_file():
        others = [str(found) for kind in ("*.yaml", "*.yml") for found in sorted(path.parent.glob(kind))]
        raise Refused(
            f"the recipe file {path} does not exist.{nearest(str(path), others)} Give the path of a .yaml file, or one of "
            f"{', '.join(known)}"
        )
    return path


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file: no duplicate keys, no alias bombs, no tags that make objects."""
    if path.stat().st_size > MAX_BYTES:
        raise Refused(f"{path} has {path.stat().st_size:,} bytes; a recipe has at most {MAX_BYTES:,}. Is this a recipe?")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not a text file in UTF-8: {error}. Is this a recipe?") from error
    value = read_yaml(text, str(path))
    if not isinstance(value, dict):
        kinds = {str: "a single text", list: "a list", NoneType: "nothing"}
        raise Refused(f"{path} contains {kinds.get(type(value), f'only {value!r}')}; a recipe is a mapping with name, model and stages")
    return value


def override(recipe: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The recipe with each `key.path=value` applied. An item of a list is named by its number, or by its `name`."""
    recipe = _unshared(recipe)
    given: dict[tuple[str | int, ...], str] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise Refused(f"{text!r} is not an override: write key=value, such as seed=1 or stages.0.steps=100")
        if not value.strip():
            raise Refused(
                f"{text!r} has no value (is a shell variable unset?). Give one, or write {key.strip()}=null for none, "
                f"{key.strip()}='\"\"' for an empty text"
            )
        parsed = read_yaml(value, f"the value of {text[:200]!r}")
        place = _set(recipe, key.strip().split("."), parsed, text)
        if place in given:
            raise Refused(f"{given[place]!r} and {text!r} are both given, and set the same. Leave one of them out")
        given[place] = text
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


def _set(place: Any, pieces: list[str], value: Any, text: str) -> tuple[str | int, ...]:
    """Set what a path leads to; the path, with items of lists by number."""
    keys: list[str | int] = []
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
                known = ", ".join(f"{n} ({name})" if name is not None else str(n) for n, name in enumerate(names)) or "none"
                items = "item" if len(place) == 1 else "items"
                raise Refused(f"{text!r}: {'.'.join(pieces[:i])} has no {piece!r}; it has {len(place)} {items}: {known}")
        elif not isinstance(place, dict):
            raise Refused(f"{text!r}: {'.'.join(pieces[:i])} is {place!r}, which is not a mapping and has no setting {piece!r}")
        elif not last and place.get(key) is None:
            place[key] = {}
        keys.append(key)
        if last:
            place[key] = value
        else:
            place = place[key]
    return tuple(keys)


def run_of(recipe: dict[str, Any], where: str) -> Run:
    """Validate a recipe. Refused with one line per problem: where it is, what was got, what is wanted."""
    return settings_of(Run, recipe, where)


def settings_of(record: type[Record], values: dict[str, Any], where: str) -> Record:
    """Validate any record of settings, in the same way."""
    try:
        return record.model_validate(values)
    except ValidationError as error:
        lines = lines_of(record, values, error)
        many = counted(len(lines), "problem")
        raise Refused(f"{where} has {many}:\n" + "\n".join(f"  {line}" for line in lines)) from error
