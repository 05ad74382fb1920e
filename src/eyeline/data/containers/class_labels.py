"""Class labels: columns of numbers whose names a file has, as Hugging Face's `datasets` stores a `ClassLabel`."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from eyeline.core.errors import BadSample

Labels = tuple[str, ...] | dict[str, "Labels"]  # the names of a column's numbers, or of the fields of its objects


def labels_in(metadata: Mapping[bytes, bytes] | None, features: Any = None) -> dict[str, Labels]:
    """The columns with class labels, by the metadata of a schema, or else by the features of a saved data set."""
    about = (metadata or {}).get(b"huggingface")
    if about is not None:
        with suppress(ValueError, KeyError, TypeError):  # of another writer: then there are no names
            features = json.loads(about)["info"]["features"]
    found = _labels(features)
    return found if isinstance(found, dict) else {}


def _labels(feature: Any) -> Labels | None:
    match feature:
        case [inner]:
            return _labels(inner)
        case {"_type": "ClassLabel", "names": [*names]} if all(isinstance(name, str) for name in names):
            return tuple(names)
        case {"_type": str(), "feature": inner}:  # Sequence, List
            return _labels(inner)
        case {"_type": str()}:
            return None
        case dict():
            found = {key: labels for key, inner in feature.items() if (labels := _labels(inner)) is not None}
            return found or None
        case _:
            return None


def with_names(value: Any, labels: Labels, field: str) -> Any:
    """The value with names for numbers. BadSample for a number that has none."""
    if isinstance(value, list):
        return [with_names(item, labels, f"{field}[{n}]") for n, item in enumerate(value)]
    if isinstance(labels, dict):
        if not isinstance(value, dict):
            return value
        return value | {key: with_names(value[key], inner, f"{field}.{key}") for key, inner in labels.items() if key in value}
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if not 0 <= value < len(labels):
        what = "the marker for no label" if value == -1 else f"and the file has names for 0 to {len(labels) - 1}"
        raise BadSample("wrong_type", field, f"the class label {value}, {what}. Leave such rows out, or write the label as text")
    return labels[value]
