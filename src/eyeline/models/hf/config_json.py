"""Reading Hugging Face's config.json with suspicion: what would change the mathematics is understood or refused, by name."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from eyeline.core.errors import Refused
from eyeline.core.problems import lines_of
from eyeline.core.settings import Settings

Json = Mapping[str, Any]
LAYERS = 10_000  # a file with more is damaged; a larger model would never be built
S = TypeVar("S", bound=Settings)
K = TypeVar("K", bound=str)


def expect(where: str, config: Json, wanted: Mapping[str, Any]) -> None:
    """Raise Refused for the first key whose value is not the one that our code computes with. An absent key is accepted."""
    for key, value in wanted.items():
        got = config.get(key, value)
        if got != value or isinstance(got, bool) != isinstance(value, bool):
            raise Refused(f"{where} has {key}={got!r}; Eyeline computes with {value!r} only. Use a checkpoint that has that.")


METHODS = {"bitsandbytes": "bitsandbytes", "gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "fbgemm_fp8": "FP8", "mxfp4": "MXFP4"}


def refuse_quantised(where: str, config: Json) -> None:
    """Raise Refused for weights that are stored in another form than numbers of their own: what is trained is the checkpoint that they
    were made from. `quantization` is what MLX writes."""
    for key in ("quantization_config", "compression_config", "quantization"):
        got = config.get(key)
        if not got:
            continue
        settings = got if isinstance(got, Mapping) else {}
        method = str(settings.get("quant_method") or ("MLX" if key == "quantization" else "a method that it does not name"))
        bits = next((str(settings[name]) for name in ("bits", "w_bit", "weight_bits") if settings.get(name)), "")
        bits = bits or "4" * bool(settings.get("load_in_4bit")) or "8" * bool(settings.get("load_in_8bit"))
        raise Refused(
            f"{where} has {key}: the weights are quantised by {METHODS.get(method, method)}{f' to {bits} bits' if bits else ''}, and "
            "Eyeline computes with unquantised ones. Take the checkpoint that they were made from (on the Hub mostly the same name without "
            "-bnb-4bit, -GPTQ, -AWQ, -FP8 or the like), or dequantise them with the library that quantised them."
        )


def refuse_limits(where: str, json: Json, why: str) -> None:
    """Raise Refused where an image processor's file has limits for the size of images, which this model does not have; `why` says so."""
    size = json.get("size")
    edges = [key for key in size if key not in ("height", "width")] if isinstance(size, Mapping) else []
    found = [f"size={size!r}"] if edges else [f"{key}={json[key]!r}" for key in ("min_pixels", "max_pixels") if json.get(key) is not None]
    if found:
        raise Refused(
            f"{where} has {', '.join(found)}: limits for the size of an image, and {why}. Use the model's own file, or remove them."
        )


def integer(where: str, config: Json, key: str, default: int, most: int = 2**31 - 1) -> int:
    """A positive whole number; a pair of equal ones counts as one (image and patch sizes). Raises Refused."""
    got = config.get(key, default)
    if isinstance(got, list | tuple) and len(got) == 2 and got[0] == got[1]:
        got = got[0]
    if not isinstance(got, int) or isinstance(got, bool) or not 0 < got <= most:
        raise Refused(f"{where} has {key}={got!r}; wanted one positive whole number, at most {most:,}. Is the file damaged?")
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


def mapping(where: str, config: Json, key: str) -> Json:
    """Settings by name; none where the key is absent, null or empty. Raises Refused."""
    got = config.get(key) or {}
    if not isinstance(got, Mapping):
        raise Refused(f"{where} has {key}={got!r}; wanted settings by name. Is the file damaged?")
    return got


def layer_types(where: str, config: Json, layers: int, known: Collection[K]) -> list[K]:
    """The kind of each layer, from `layer_types`; none where the key is absent, null or empty. Raises Refused for an unknown kind."""
    got = config.get("layer_types") or []
    if not isinstance(got, list) or (got and len(got) != layers) or not all(isinstance(one, str) and one in known for one in got):
        raise Refused(
            f"{where} has layer_types={got!r}; Eyeline computes {' and '.join(known)}, and wanted one for each of {layers} layers."
        )
    return got


def rope(where: str, config: Json, default_theta: float) -> tuple[float, str, dict[str, Any]]:
    """Base, type and other settings of rotary positions: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    scaled = {**mapping(where, config, "rope_scaling"), **mapping(where, config, "rope_parameters")}
    theta = number(where, {**config, **scaled}, "rope_theta", default_theta)
    type = scaled.get("rope_type", scaled.get("type", "default"))
    expect(f"rotary positions in {where}", scaled, {"type": type})
    return theta, type, {key: value for key, value in scaled.items() if key not in ("rope_theta", "rope_type", "type")}


def rope_to_hf(theta: float, scaling: Json) -> dict[str, Any]:
    """The entries of config.json that describe rotary positions, as both generations of transformers read them: `rope_parameters` (5),
    and `rope_theta` and `rope_scaling` (4, which knows no `rope_parameters` and would compute with a base of 10,000). `scaling` has
    `rope_type` and what belongs to that type."""
    share = {key: value for key, value in scaling.items() if key == "partial_rotary_factor"}  # 4 has it one level up
    rest = {key: value for key, value in scaling.items() if key not in share}
    return {
        "rope_parameters": {**scaling, "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": None if rest == {"rope_type": "default"} else rest,
        **share,
    }


def plain_rope(where: str, config: Json, default_theta: float) -> float:
    """The base of unscaled rotary positions of whole heads. Raises Refused for others."""
    theta, type, others = rope(where, config, default_theta)
    expect(f"rotary positions in {where}", {"rope_type": type, **others}, {"rope_type": "default", "partial_rotary_factor": 1.0})
    unknown = sorted(others.keys() - {"partial_rotary_factor"})
    if unknown:
        raise Refused(f"rotary positions in {where} have {', '.join(unknown)}; Eyeline computes unscaled ones only. Remove the scaling.")
    return theta


def refuse_windows(where: str, config: Json, layers: int) -> None:
    """Raise Refused where a layer would attend to a window of its document only."""
    types = layer_types(where, config, layers, ("full_attention",))
    window = config.get("use_sliding_window", False) and config.get("sliding_window", 4096)
    if window and not types and config.get("max_window_layers", 28) < layers:
        raise Refused(f"{where} has use_sliding_window=True with a window of {window} tokens; Eyeline attends to whole documents only.")


def section(where: str, config: Json, key: str) -> Json:
    """A config inside a config. Raises Refused."""
    got = config.get(key)
    if not isinstance(got, Mapping):
        raise Refused(f"{where} has no {key}; found {', '.join(list(config)[:8]) or 'nothing'}. Is it the right config.json?")
    return got


def expect_model_type(where: str, config: Json, wanted: str, others: Mapping[str, str]) -> None:
    """Check `model_type`. `others` says of types that look alike why they are not taken."""
    got = config.get("model_type")
    if got != wanted:
        why = others.get(str(got), f"Eyeline reads {wanted!r} here")
        raise Refused(f"{where} has model_type={got!r}: {why}.")


def record_of(where: str, record: type[S], values: Json) -> S:
    """The record of these values. Raises Refused where they contradict each other."""
    try:
        return record(**values)
    except ValidationError as error:
        faults = "; ".join(lines_of(record, values, error))
        raise Refused(f"{where} does not describe a model: {faults}. Is the file damaged?") from error
