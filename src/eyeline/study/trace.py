"""What a profiler's trace says: each moment of the main thread belongs to one operator, and so to a part of the model, a pass and a class.

An operator that calls others has only its own time, so that times add up. The backward pass of an operator belongs to the part whose
forward pass made it: autograd numbers both alike. With a GPU it runs on a thread of autograd's own, for which the main thread waits. What
no operator accounts for is the host's: Python, data, waiting.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PART, STEP = "part ", "step "  # ranges that `profile.py` marks, by their first word
CLASSES = (  # of an operator, by its name; the first that fits
    ("autograd", r"^autograd::engine"),  # its own time, without that of the operators that it calls
    ("attention", r"scaled_dot_product|attention|varlen"),
    ("products", r"(^|::|_)(add|b|ba)?mm(\b|_)|matmul|linear|convolution|einsum|addmv|grouped_mm"),
    ("optimizer", r"fused_adam|foreach|lerp|addcdiv|addcmul"),
    ("loss", r"log_softmax|nll_loss|cross_entropy|_Chunked"),
    ("norms", r"norm"),
    (
        "copies",
        r"copy|clone|contiguous|::to\b|_to_copy|cat\b|stack|index|gather|scatter|select_backward|slice_backward|fill|zero|empty|repeat",
    ),
    ("pointwise", r"::(add|sub|mul|div|neg|pow|rsqrt|sqrt|exp|silu|gelu|sigmoid|softmax|tanh|where|sum|mean|max|min|cos|sin|clamp)"),
)


class Key(NamedTuple):
    """What a moment was spent on."""

    part: str  # vision, projector, language, head; "–" outside of the model
    work: str  # forward, backward, optimizer, other
    kind: str  # a class of operators


@dataclass(frozen=True)
class Spent:
    """Microseconds over all profiled steps; `host` is what no operator accounts for, and with it they add up to `total`."""

    operators: Mapping[Key, float]
    host: float
    total: float
    device: Mapping[Key, float]  # of kernels on a GPU, by the operator that asked for them
    device_idle: float  # of the profiled time, without a kernel on the GPU


def kind_of(operator: str) -> str:
    """The class of an operator's name."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, operator)), "other")


def spent_in(events: Sequence[Mapping[str, Any]]) -> Spent:
    """The time of all steps in the trace, as Chrome's trace format has it."""
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]  # a GPU's copies have another category
    windows = [(e["ts"], e["ts"] + e["dur"]) for e in steps]
    ran = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
    threads = {steps[0]["tid"], *(e["tid"] for e in ran if is_backward(e))}
    own = sorted((e for e in ran if e["tid"] in threads), key=lambda e: (e["ts"], -e["dur"]))
    parts = parts_of_sequences(own)
    operators: Counter[Key] = Counter()
    of_external: dict[int, Key] = {}
    for event, self_us, stack in with_self_time(own):
        if event["cat"] == "cpu_op" and any(start <= event["ts"] < end for start, end in windows):
            key = key_of(event, stack, parts)
            operators[key] += self_us  # type: ignore[assignment]  # microseconds are no whole numbers
            if (number := event.get("args", {}).get("External id")) is not None:
                of_external[number] = key
    total = sum(end - start for start, end in windows)
    kernels = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    inside = [e for e in kernels if any(start <= e["ts"] < end for start, end in windows)]
    device: Counter[Key] = Counter()
    for event in inside:
        key = of_external.get(event.get("args", {}).get("External id", -1), Key("–", "other", "other"))
        device[key] += event["dur"]
    idle = total - covered((e["ts"], e["ts"] + e["dur"]) for e in inside) if inside else 0.0
    return Spent(dict(operators), total - sum(operators.values()), total, dict(device), idle)


def parts_of_sequences(own: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Autograd's number of each operator of a forward pass -> the part that it is in."""
    found: dict[int, str] = {}
    for event, _, stack in with_self_time(own):
        number = event.get("args", {}).get("Sequence number", -1)
        if number >= 0 and not any(is_backward(one) for one in (*stack, event)) and (part := part_in(stack)):
            found[number] = part
    return found


def key_of(event: Mapping[str, Any], stack: Sequence[Mapping[str, Any]], parts: Mapping[int, str]) -> Key:
    """What an operator was for."""
    name = str(event["name"])
    if any(str(one["name"]).startswith("Optimizer.step") for one in stack):
        return Key("–", "optimizer", kind_of(name))
    backward = next((one for one in (event, *reversed(stack)) if is_backward(one)), None)
    part = part_in(stack)  # of a recomputed forward pass, which runs inside of a backward pass
    if backward is not None:
        return Key(part or parts.get(backward.get("args", {}).get("Sequence number", -1), "–"), "backward", kind_of(name))
    return Key(part or "–", "forward" if part else "other", kind_of(name))


def is_backward(event: Mapping[str, Any]) -> bool:
    return str(event["name"]).startswith("autograd::engine::evaluate_function")


def part_in(stack: Sequence[Mapping[str, Any]]) -> str | None:
    """The innermost part of the model that encloses an operator."""
    return next((str(one["name"]).removeprefix(PART) for one in reversed(stack) if str(one["name"]).startswith(PART)), None)


def with_self_time(own: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float, Sequence[Mapping[str, Any]]]]:
    """(event, its time without that of what is inside, what encloses it) of the events of one thread, sorted by their start."""
    stack: list[Mapping[str, Any]] = []
    inner = [0.0] * len(own)  # microseconds of what is directly inside of each
    numbers: list[int] = []
    enclosing: list[tuple[Mapping[str, Any], ...]] = []
    for number, event in enumerate(own):
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
            numbers.pop()
        if numbers:
            inner[numbers[-1]] += event["dur"]
        enclosing.append(tuple(stack))
        stack.append(event)
        numbers.append(number)
    for number, event in enumerate(own):
        yield event, max(event["dur"] - inner[number], 0.0), enclosing[number]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return length


def memory_timeline(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """(milliseconds since the first, bytes more than then) after each allocation and release."""
    found = sorted((e["ts"], int(e["args"]["Bytes"])) for e in events if e.get("name") == "[memory]")
    out, bytes_more = [], 0
    for moment, change in found:
        bytes_more += change
        out.append(((moment - found[0][0]) / 1000, bytes_more))
    return out
