"""Reading Hugging Face's config.json with suspicion: what would change the mathematics is understood or refused, by name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from eyeline.core.errors import Refused
from eyeline.core.settings import Settings

Json = Mapping[str, Any]
S = TypeVar("S", bound=Settings)


def expect(where: str, config: Json, wanted: Mapping[str, Any]) -> None:
    """Raise Refused for the first key whose value is not the one that our code computes with. An absent key is well."""
    for key, value in wanted.items():
        got = config.get(key, value)
        if got != value or isinstance(got, bool) != isinstance(value, bool):
            raise Refused(f"{where} has {key}={got!r}; Eyeline computes with {value!r} only. Use a checkpoint that has that.")


def integer(where: str, config: Json, key: str, default: int) -> int:
    """A positive whole number; a pair of equal ones counts as one (image and patch sizes). Raises Refused."""
    got = config.get(key, default)
    if isinstance(got, list | tuple) and len(got) == 2 and got[0] == got[1]:
        got = got[0]
    if not isinstance(got, int) or isinstance(got, bool) or got <= 0:
        raise Refused(f"{where} has {key}={got!r}; wanted one positive whole number. Is the file damaged?")
    return got


def number(where: str, config: Json, key: str, default: float) -> float:
    """A positive number. Raises Refused."""
    got = config.get(key, default)
    if not isinstance(got, int | float) or isinstance(got, bool) or not 0 < got < float("inf"):
        raise Refused(f"{where} has {key}={got!r}; wanted one positive number. Is the file damaged?")
    return float(got)


def flag(where: str, config: Json, key: str, default: bool) -> bool:
    """True or false. Raises Refused."""
    got = config.get(key, default)
    if not isinstance(got, bool):
        raise Refused(f"{where} has {key}={got!r}; wanted true or false. Is the file damaged?")
    return got


def rope(where: str, config: Json, default_theta: float) -> tuple[float, str, dict[str, Any]]:
    """Base, type and other settings of rotary positions: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    scaled = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = number(where, {**config, **scaled}, "rope_theta", default_theta)
    type = scaled.get("rope_type", scaled.get("type", "default"))
    expect(f"rotary positions in {where}", scaled, {"type": type})
    return theta, type, {key: value for key, value in scaled.items() if key not in ("rope_theta", "rope_type", "type")}


def plain_rope(where: str, config: Json, default_theta: float) -> float:
    """The base of unscaled rotary positions of whole heads. Raises Refused for others."""
    theta, type, others = rope(where, config, default_theta)
    expect(f"rotary positions in {where}", {"rope_type": type, **others}, {"rope_type": "default", "partial_rotary_factor": 1.0})
    unknown = sorted(others.keys() - {"partial_rotary_factor"})
    if unknown:
        raise Refused(f"rotary positions in {where} have {', '.join(unknown)}; Eyeline computes unscaled ones only. Remove the scaling.")
    return theta


def refuse_windows(where: str, config: Json, layers: int) -> None:
    """Raise Refused where a layer would see a window of its document only."""
    types = config.get("layer_types") or ["full_attention"] * layers
    if set(types) != {"full_attention"} or len(types) != layers:
        raise Refused(f"{where} has layer_types={types!r}; Eyeline computes {layers} layers of full attention only.")
    window = config.get("use_sliding_window", False) and config.get("sliding_window", 4096)
    if window and not config.get("layer_types") and config.get("max_window_layers", 28) < layers:
        raise Refused(f"{where} has use_sliding_window=True with a window of {window} tokens; Eyeline attends to whole documents only.")


def section(where: str, config: Json, key: str) -> Json:
    """A config inside a config. Raises Refused."""
    got = config.get(key)
    if not isinstance(got, Mapping):
        raise Refused(f"{where} has no {key}; found {', '.join(list(config)[:8]) or 'nothing'}. Is it the right config.json?")
    return got


def kind(where: str, config: Json, wanted: str, others: Mapping[str, str]) -> None:
    """Check `model_type`. `others` says of types that look alike why they are not taken."""
    got = config.get("model_type")
    if got != wanted:
        why = others.get(str(got), f"Eyeline reads {wanted!r} here")
        raise Refused(f"{where} has model_type={got!r}: {why}.")


def made(where: str, record: type[S], values: Json) -> S:
    """The record of these values. Raises Refused where they contradict each other."""
    try:
        return record(**values)
    except ValidationError as error:
        faults = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise Refused(f"{where} describes no model: {faults}. Is the file damaged?") from error
