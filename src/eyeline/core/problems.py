"""Problems of settings as text: pydantic's errors as one line each, with the location as a recipe writes it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from eyeline.core.aliases import ALIASES, NOT_THERE, VALUES
from eyeline.core.errors import closest, nearest
from eyeline.core.plan import PARTS

MAX_PLACES = 3  # that are named for a setting that belongs elsewhere
LIKENESS = 0.8  # of a word to a setting of another place (of 1): less, and the suggestion misleads
SAME_PLACE = ("missing", "value_error", "extra_forbidden")

_EXAMPLES = {
    "sources": "[{path: my.json}]",
    "optimizer": "{kind: adamw}",
    "schedule": "{kind: cosine}",
    "batch": "{max_tokens: 8192, max_patches: 8192}, or batch: auto",
    **dict.fromkeys(PARTS, "{how: full, lr: 1.0e-3}"),
}
_LIMITS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True)
class _Place:
    """The location of a problem: how a recipe writes it, the type that is wanted there, and the record that it belongs to."""

    path: tuple[str, ...]
    wanted: Any
    record: type[BaseModel] | None
    others: tuple[type[BaseModel], ...] = ()  # records that could stand there in place of that one, by another `kind` or `how`

    def __str__(self) -> str:
        return ".".join(self.path) or "the recipe"


def lines_of(record: Any, values: Any, error: ValidationError) -> list[str]:
    """One line per problem of values that were to become a `record` (a type of settings, or a union of types): where it is, what was
    got, what is wanted, and the remedy."""
    problems = [(_place_at(record, values, problem["loc"]), problem) for problem in error.errors(include_url=False)]
    unknown = [place.path for place, problem in problems if problem["loc"][-1:] == ("[key]",)]
    lines: dict[str, None] = {}
    for place, problem in problems:
        if problem["loc"][-1:] != ("[key]",) and any(place.path[: len(path)] == path for path in unknown):
            continue  # a part that does not exist is one problem, whatever is said about it
        deeper = any(len(other.path) > len(place.path) and other.path[: len(place.path)] == place.path for other, _ in problems)
        if deeper and problem["type"] not in SAME_PLACE:
            continue  # a list whose only item is wrong is also too short, and not the other thing that could stand there
        said = any(other.path == place.path and one["type"] == "value_error" for other, one in problems)
        if said and problem["type"] not in SAME_PLACE:
            continue  # it is a mapping whose settings exclude one another, and not the other thing that could stand there
        lines[_line(place, problem, values, record)] = None
    return list(lines)


def _line(place: _Place, problem: Any, recipe: Any, root: Any) -> str:
    kind, got, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(place, got, recipe, root)
    if problem["loc"][-1:] == ("[key]",):
        known = re.findall(r"'([^']*)'", problem["msg"])
        return f"{'.'.join(place.path[:-1])}: there is no {place.path[-1]!r}; there are {', '.join(known)}.{nearest(place.path[-1], known)}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _untagged(place, kind, got, context)
    if kind == "value_error":
        return f"{place}: ".removeprefix("the recipe: ") + f"{problem['msg'].removeprefix('Value error, ')}"
    if kind == "json_invalid":
        return f"it is not JSON ({context['error']})"
    if kind == "missing":
        return f"{place} is missing; wanted {_words(place.wanted)}{_such_as(place)}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        fraction = " (it is a fraction of the whole)" if context[name] == 1 and kind == "less_than_equal" else ""
        return f"{place}: got {got!r}, wanted {_article(place.wanted)} {words} {context[name]:g}{fraction}"
    if kind == "finite_number":
        return f"{place}: got {got!r}, wanted a finite number"
    if kind == "too_short":
        return f"{place} is empty; wanted at least {context['min_length']}{_such_as(place)}"
    if kind == "too_long":
        return f"{place}: got {context['actual_length']} values, wanted {context['max_length']}"
    if kind == "string_pattern_mismatch":
        return f"{place}: got {got!r:.80}, wanted {_description(place)}"
    if one := _as_tag(place, got):
        return f"{place}: got {_yaml_value(got)}, wanted a mapping{one}"
    return f"{place}: got {_yaml_value(got)}, wanted {_words(place.wanted)}{_such_as(place)}{_hint(place, got)}"


def _unknown(place: _Place, got: Any, recipe: Any, root: Any) -> str:
    """A setting that its record does not have: a misspelt sibling, a setting of another place, or a word that nothing has."""
    name, siblings = place.path[-1], _fields(place.record)
    if renamed := _renamed(place, siblings, root):
        return renamed + _renamed_value(name, got)
    if other := _of_other(place):
        return other
    here = f"{place}: there is no such setting"
    if found := [path for path in _paths(recipe, name) if path != str(place)]:
        return f"{here} here. Did you mean {_some(found)}?"
    if close := nearest(name, siblings):
        return f"{here}.{close}"
    everywhere = list(_schema_paths(root))
    if found := [path for known, path in everywhere if known == name]:
        return f"{here} here. It belongs elsewhere: {_some(found)}"
    above = ".".join(place.path[:-1]) or "The outermost level"
    typo = closest(name, [known for known, _ in everywhere], LIKENESS)
    return f"{here}.{f' Did you mean {typo!r}?' if typo else ''} {above} has {', '.join(siblings)}"


def _of_other(place: _Place) -> str | None:
    """The message for a setting that the place would have with another `kind` or `how`; None if it would have it with none."""
    name = place.path[-1]
    having = [record for record in place.others if name in record.model_fields]
    if not having or place.record is None:
        return None
    key = next(field for field in having[0].model_fields if _tags(having[0], field) and _tags(place.record, field))
    kinds = " and ".join(f"{key}: {_tags(record, key)[0]}" for record in having)
    return f"{place} is a setting of {kinds}, and this is {key}: {_tags(place.record, key)[0]}. Leave it out, or change {key}"


def _tags(record: type[BaseModel], field: str) -> tuple[Any, ...]:
    """The words that a field of a record can be, where it is one of a few."""
    found = record.model_fields.get(field)
    return get_args(found.annotation) if found is not None and get_origin(found.annotation) is Literal else ()


def _renamed(place: _Place, siblings: list[str], root: Any) -> str | None:
    """The message for a setting that has another name here; None if it is not one that is known."""
    alias = ALIASES.get(".".join(place.path[-2:])) or ALIASES.get(place.path[-1])
    if alias is None:
        return None
    target, note = alias
    if not target:
        return f"{place}: there is no such setting; {note}"
    if target in siblings or target.partition(".")[0] in siblings:
        called = ".".join((*place.path[:-1], target))
    elif target.split(".")[-2:-1] == list(place.path[-2:-1]) and target.rpartition(".")[2] in siblings:
        called = ".".join((*place.path[:-1], target.rpartition(".")[2]))
    else:
        called = next(path for _, path in _schema_paths(root) if path == target or path.endswith(f".{target}"))
    return f"{place} is called {called} here{f'; {note}' if note else ''}"


def _renamed_value(typed: str, got: Any) -> str:
    """A sentence about the value of a setting that has another name here, where the value has one, too, or is not there."""
    hint = _other_word(ALIASES.get(typed, ("", ""))[0].rpartition(".")[2], got)
    return f".{hint}" if hint else ""


def _other_word(setting: str, got: Any) -> str:
    """A hint for a value that is called by another name here."""
    if isinstance(got, str) and (setting, got) in NOT_THERE:
        return f" {got!r}: {NOT_THERE[setting, got]}"
    word = VALUES.get((setting, got)) if isinstance(got, str) else None
    return f" {got!r} is called {word!r} here." if word else ""


def _some(paths: list[str]) -> str:
    return " or ".join(paths[:MAX_PLACES]) + (" or another" if len(paths) > MAX_PLACES else "")


def _untagged(place: _Place, kind: str, got: Any, context: Any) -> str:
    key = context["discriminator"].strip("'_()")
    if kind == "union_tag_invalid":
        known = re.findall(r"'([^']*)'", context["expected_tags"])
        hint = _other_word(key, context["tag"]) or nearest(context["tag"], known)
        return f"{place}.{key}: got {context['tag']!r}; there are {', '.join(known)}.{hint}"
    if not isinstance(got, dict):
        return f"{place}: got {_yaml_value(got)}, wanted a mapping{_such_as(place)}"
    return f"{place}: got {_yaml_value(got)}, which has no `{key}`: add it{_such_as(place)}"


def _as_tag(place: _Place, got: Any) -> str | None:
    """The end of the message for a word in place of a mapping of which it is the `kind`, here or elsewhere; None for another word."""
    records = [option for option in _options(place.wanted) if isinstance(option, type) and issubclass(option, BaseModel)]
    keys = {name for record in records for name in _fields(record) if _tags(record, name)} if len(records) > 1 else set[str]()
    for key in sorted(keys) if isinstance(got, str) else ():
        known = [tag for record in records for tag in _tags(record, key)]
        word = got if got in known else VALUES.get((key, got))
        if word in known:
            return f", such as {{{key}: {word}}}"
        if (key, got) in NOT_THERE:
            return f"{_such_as(place)}.{_other_word(key, got)}"
    return None


def _place_at(record: Any, values: Any, loc: tuple[Any, ...]) -> _Place:
    """Follow pydantic's location through the types. It holds pieces that no recipe has: which record of a union it took."""
    path: list[str] = []
    wanted: Any = record
    holder: type[BaseModel] | None = record if isinstance(record, type) and issubclass(record, BaseModel) else None
    others: tuple[type[BaseModel], ...] = ()
    for piece in loc:
        options = _options(wanted)
        records = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        lists = [option for option in options if get_origin(option) is tuple]
        maps = [option for option in options if get_origin(option) is dict]
        if piece == "[key]":
            break
        if isinstance(piece, int) and lists:
            inner = get_args(lists[0])
            path.append(_name_of(values, piece))
            wanted = inner[0] if inner[-1] is ... else inner[min(piece, len(inner) - 1)]
            values = values[piece] if isinstance(values, list | tuple) and piece < len(values) else None
        elif maps and not records:
            path.append(str(piece))
            wanted, values = get_args(maps[0])[1], values.get(piece) if isinstance(values, dict) else None
        elif len(records) > 1 and (tagged := [r for r in records if _has_tag(r, piece)]):
            wanted = holder = tagged[0]
            others = tuple(record for record in records if record is not holder)
        elif len(records) == 1 and (piece in records[0].model_fields or not _is_label(piece, options)):
            others = others if holder is records[0] else ()
            holder = records[0]
            path.append(str(piece))
            field = holder.model_fields.get(str(piece))
            wanted, values = field.annotation if field else None, values.get(piece) if isinstance(values, dict) else None
    return _Place(tuple(path), wanted, holder, others)


def _name_of(values: Any, index: int) -> str:
    """The name of a list item in a recipe: by its name where it has one, else by its number."""
    item = values[index] if isinstance(values, list | tuple) and index < len(values) else None
    name = item.get("name") if isinstance(item, dict) else None
    return name if isinstance(name, str) and name else str(index)


def _has_tag(record: type[BaseModel], tag: Any) -> bool:
    """Return whether this record of a union is the one that pydantic calls by this tag."""
    return any(get_origin(field.annotation) is Literal and tag in get_args(field.annotation) for field in record.model_fields.values())


def _is_label(piece: Any, options: list[Any]) -> bool:
    """Return whether a piece of a location only says which type of a union was tried: `tuple[str, ...]`, `bool`."""
    plain = [option.__name__ for option in options if option in (bool, int, float, str)]
    return len(options) > 1 and isinstance(piece, str) and (not piece.isidentifier() or piece in plain)


def _options(annotation: Any) -> list[Any]:
    """The types of a union; of another annotation, itself."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (tuple, list, dict, Literal) or not get_args(annotation):
        return [annotation]
    return [option for inner in get_args(annotation) for option in _options(inner)]


def _words(annotation: Any) -> str:
    """The values that a setting takes, in words of YAML."""
    words: dict[str, None] = {}
    for option in _options(annotation):
        match get_origin(option) or option:
            case _ if option is bool:
                words["true or false"] = None
            case _ if option is int:
                words["a whole number"] = None
            case _ if option is float:
                words["a number"] = None
            case _ if option is str:
                words["text"] = None
            case _ if get_origin(option) is Literal:
                words[_choice(get_args(option))] = None
            case _ if get_origin(option) is tuple:
                inner = get_args(option)
                many = "" if inner[-1] is ... else f"{len(inner)} "
                words[f"a list of {many}{_plural(inner[0])}"] = None
            case _ if option is NoneType:
                words["null"] = None
            case _:
                words["a mapping"] = None
    return " or ".join(words)


def _choice(words: tuple[Any, ...]) -> str:
    *some, last = map(str, words)
    return f"{', '.join(some)} or {last}" if some else last


def _plural(annotation: Any) -> str:
    return {"text": "texts", "a number": "numbers", "a whole number": "whole numbers", "a mapping": "mappings"}.get(
        _words(annotation), _words(annotation)
    )


def _article(annotation: Any) -> str:
    return _words(annotation).removesuffix(" or null")


def _such_as(place: _Place) -> str:
    *above, last = place.path or ("",)
    of = {"sources": "{path: my.json}", "weights": "runs/first"}  # elements of these, whatever they are called
    parent = above[-1] if above else ""
    example = of.get(parent, None if last in PARTS and parent == "config" else _EXAMPLES.get(last))
    return f", such as {example}" if example else ""


def _description(place: _Place) -> str:
    field = place.record.model_fields.get(place.path[-1]) if place.record else None
    return field.description if field and field.description else "another text"


def _yaml_value(got: Any) -> str:
    """A value as YAML would have it, cut to a line."""
    match got:
        case None:
            return "null"
        case bool():
            return str(got).lower()
        case tuple():
            return f"{list(got)!r:.80}"
        case _:
            return f"{got!r:.80}"


def _hint(place: _Place, got: Any) -> str:
    """A hint why text that looks like another value is text, or which word is probably meant."""
    options = _options(place.wanted)
    numbers = int in options or float in options
    if numbers and isinstance(got, str):
        if re.fullmatch(r"[-+]?0[0-9_]+", got):
            return f". A leading zero may mean octal, so it is not read as a number: write {got.lstrip('+-0_') or '0'}"
        if re.fullmatch(r"[0-9]+(:[0-9]+)+", got):
            return ". A number with colons is not read as one"
        if re.fullmatch(r"[-+]?[0-9_.]+(e[-+]?[0-9]+)?", got, re.IGNORECASE):
            return ". Write it without quotes and separators"
    if bool in options and isinstance(got, str) and got.lower() in ("yes", "no", "on", "off", "y", "n"):
        return f". Write {'true' if got.lower() in ('yes', 'on', 'y') else 'false'}"
    if str in options and not numbers and isinstance(got, int | float):
        return ". Put it in quotes to have it as text"
    if word := _other_word(place.path[-1] if place.path else "", got):
        return "." + word
    words = [str(word) for option in options if get_origin(option) is Literal for word in get_args(option)]
    if got == "gpu" and "cuda" in words:
        return ". Did you mean 'cuda'?"
    return "." + nearest(str(got), words) if words and isinstance(got, str) and nearest(got, words) else ""


def _fields(record: type[BaseModel] | None) -> list[str]:
    return [] if record is None else list(record.model_fields)


def _paths(value: Any, name: str, above: str = "") -> Iterator[str]:
    """The paths of all settings of this name in a recipe, as an override writes them."""
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


def _schema_paths(annotation: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """(name, path) of every setting that a record of this type can have, as an override would say it."""
    for option in _options(annotation):
        if get_origin(option) is tuple:
            inner = get_args(option)[0]
            called = any("name" in _fields(o) for o in _options(inner) if isinstance(o, type) and issubclass(o, BaseModel))
            yield from _schema_paths(inner, f"{above}.{'NAME' if called else '0'}")
        elif get_origin(option) is dict:
            yield from _schema_paths(get_args(option)[1], f"{above}.PART")
        elif isinstance(option, type) and issubclass(option, BaseModel):
            for name, field in option.model_fields.items():
                path = f"{above}.{name}".lstrip(".")
                yield name, path
                yield from _schema_paths(field.annotation, path)
