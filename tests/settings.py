"""Every leaf of a recipe's settings, by its path."""

from collections.abc import Iterator
from typing import Any

from eyeline.train.run import Run


def leaves(schema: dict[str, Any], records: dict[str, Any], path: str = "", met: list[list[str]] | None = None) -> Iterator[str]:
    """Every leaf of a JSON schema by its path: `[]` an item of a list, `.*` a value of a mapping, `<Record>` one of several records.
    A choice of the same records as one that was met before, and a model's record that was, is obeyed by the same code, and left out."""
    met = [] if met is None else met
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        if name.endswith("__Config"):
            if [name] in met:
                return
            met.append([name])
        yield from leaves(records[name], records, path, met)
    elif variants := choices(schema):
        inner = [v for v in variants if "$ref" in v and "properties" in records[v["$ref"].rsplit("/", 1)[-1]]]
        names = [v["$ref"].rsplit("/", 1)[-1] for v in inner]
        if len(names) > 1 and names in met:
            return
        met.append(names)
        for variant, name in zip(inner, names, strict=True):
            short = name.removeprefix("eyeline__models__").removesuffix("__Config")
            yield from leaves(variant, records, f"{path}<{short}>" if len(inner) > 1 else path, met)
        if not inner:
            yield path
    elif "properties" in schema:
        for name, child in schema["properties"].items():
            yield from leaves(child, records, f"{path}.{name}" if path else name, met)
    elif schema.get("type") == "array" and "$ref" in schema.get("items", {}):
        yield from leaves(schema["items"], records, path + "[]", met)
    elif isinstance(schema.get("additionalProperties"), dict):
        yield from leaves(schema["additionalProperties"], records, path + ".*", met)
    else:
        yield path


def choices(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The variants of a schema, those of a variant that is itself a choice included."""
    return [leaf for v in schema.get("oneOf") or schema.get("anyOf") or () for leaf in (choices(v) or [v])]


SCHEMA = Run.model_json_schema()
LEAVES = tuple(leaves(SCHEMA, SCHEMA["$defs"]))
