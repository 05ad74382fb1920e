"""Safetensors in and out: equal to the library's own files, and every broken folder refused by name."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyeline.checkpoint.tensors import (
    INDEX,
    SINGLE,
    entries_in,
    renamed,
    stream,
    unread_tensors,
    write_file,
    write_folder,
)
from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.key_rules import KeyRule
from tests.weights import load_into

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8]
DTYPES += [torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64]


def some_tensors() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(), (0, 3), (5,), (3, 4)]
    made = {f"{d}.{s}": torch.randint(0, 2, s, generator=rng).to(d) for d in DTYPES for s in shapes}
    return made | {"transposed": torch.randn(3, 4, generator=rng).T, "naïve": torch.randn(2, generator=rng)}


def test_a_file_equals_the_librarys_own_byte_for_byte(tmp_path: Path) -> None:
    tensors = some_tensors()
    written = write_file(tmp_path / "ours", tensors, {"format": "pt"})
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert written.size == (tmp_path / "ours").stat().st_size
    back = load_file(tmp_path / "ours")
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        assert back[name].dtype == x.dtype
        assert torch.equal(back[name], x), name


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    write_file(tmp_path / "x", {"a": torch.zeros(2)})
    with pytest.raises(Exception, match="could not write"):
        write_file(tmp_path / "x", {"a": torch.ones(2)})
    assert torch.equal(load_file(tmp_path / "x")["a"], torch.zeros(2))


@pytest.mark.parametrize("max_shard_bytes", [1, 100, 300, 10**9])
def test_shards_are_read_back_by_us_and_by_transformers(tmp_path: Path, max_shard_bytes: int) -> None:
    tensors = {f"t{i}": torch.full((i, 5), float(i)) for i in range(1, 9)}  # 20 to 160 bytes each
    write_folder(tmp_path, iter(tensors.items()), max_shard_bytes)
    back = {name: load_file(entry.file)[name] for name, entry in entries_in(tmp_path).items()}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], x) for name, x in tensors.items())
    files = sorted(p.name for p in tmp_path.iterdir())
    if max_shard_bytes == 10**9:
        assert files == [SINGLE]
    else:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
        shards = sorted(set(index["weight_map"].values()))
        assert files == sorted([*shards, INDEX])
        assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        theirs = {name: x for shard in shards for name, x in load_file(tmp_path / shard).items()}
        assert theirs.keys() == tensors.keys()
        sizes = {shard: sum(x.nbytes for x in load_file(tmp_path / shard).values()) for shard in shards}
        assert all(size <= max_shard_bytes or len(load_file(tmp_path / shard)) == 1 for shard, size in sizes.items())


def test_writing_a_folder_holds_one_shard_at_a_time(tmp_path: Path) -> None:
    alive = 0
    most = 0

    class Counted:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def made():
        for i in range(20):
            x = torch.zeros(25)  # 100 bytes
            x.held = Counted()
            yield f"t{i}", x
            del x

    write_folder(tmp_path, made(), max_shard_bytes=400)
    assert most <= 6  # four in a shard, the one that did not fit, and the generator's


# ---- broken folders


def raw(header: object, data: bytes = b"\0" * 24, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
BROKEN_FILES: dict[str, bytes] = {
    "empty": b"",
    "header of 2^62 bytes": raw({"a": A}, length=2**62),
    "header longer than the file": raw({"a": A}, length=10**4),
    "negative offset": raw({"a": A | {"data_offsets": [-24, 0]}}),
    "overlap": raw({"a": A, "b": A}),
    "gap": raw({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]}}),
    "trailing byte": raw({"a": A}, b"\0" * 25),
    "cut by one byte": raw({"a": A}, b"\0" * 23),
    "shape against length": raw({"a": A | {"shape": [2, 4]}}),
    "shape that overflows": raw({"a": A | {"shape": [2**62, 2**62]}}),
    "unknown dtype": raw({"a": A | {"dtype": "F99"}}),
    "one name twice": raw(b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(A | {"shape": [3, 2]}).encode() + b"}"),
    "not JSON": raw(b"[[["),
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_broken_safetensors_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / SINGLE).write_bytes(BROKEN_FILES[name])
    with pytest.raises(Refused, match=SINGLE):
        entries_in(tmp_path)


def test_the_same_bytes_unbroken_are_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(raw({"a": A}))
    assert entries_in(tmp_path).keys() == {"a"}
    assert torch.equal(load_file(tmp_path / SINGLE)["a"], torch.zeros(2, 3))


class Boom:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickled_weights_are_refused_unread(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    (tmp_path / name).write_bytes(pickle.dumps(Boom(canary)))
    with pytest.raises(Refused, match=r"pickled weights .*save_pretrained"):
        entries_in(tmp_path)
    assert not canary.exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert canary.exists(), "the bait is harmless: this test shows nothing"


def sharded(folder: Path) -> dict[str, object]:
    write_folder(folder, ((f"t{i}", torch.full((5,), float(i))) for i in range(4)), max_shard_bytes=40)
    return json.loads((folder / INDEX).read_text())


def spoil_index(change: Callable[[dict], object]) -> Callable[[Path, dict], None]:
    def spoil(folder: Path, index: dict) -> None:
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BROKEN_FOLDERS: dict[str, tuple[Callable[[Path, dict], object], str]] = {
    "path above": (spoil_index(lambda i: i["weight_map"].update(t0="../" + ONE)), "never a path"),
    "absolute path": (spoil_index(lambda i: i["weight_map"].update(t0="/etc/passwd")), "never a path"),
    "hidden file": (spoil_index(lambda i: i["weight_map"].update(t0=".x.safetensors")), "never a path"),
    "pickle in the index": (spoil_index(lambda i: i["weight_map"].update(t0="pytorch_model.bin")), "never a path"),
    "missing shard": (lambda f, _: (f / TWO).unlink(), TWO),
    "tensor not in its shard": (spoil_index(lambda i: i["weight_map"].update(t9=ONE)), "t9"),
    "tensor not in the index": (spoil_index(lambda i: i["weight_map"].pop("t0")), "t0"),
    "tensor in the wrong shard": (spoil_index(lambda i: i["weight_map"].update(t0=TWO)), "t0"),
    "wrong total": (spoil_index(lambda i: i["metadata"].update(total_size=81)), "total_size 81"),
    "no map": (spoil_index(lambda i: i.pop("weight_map")), "weight_map"),
    "map of numbers": (spoil_index(lambda i: i["weight_map"].update(t0=1)), "weight_map"),
    "index is a list": (lambda f, _: (f / INDEX).write_text("[]"), "holds a list, wanted a JSON object"),
    "index is nested without end": (lambda f, _: (f / INDEX).write_text("[" * 10**5), "not JSON"),
    "index is a folder": (lambda f, _: ((f / INDEX).unlink(), (f / INDEX).mkdir()), "it is a folder|Is a directory"),
    "index of gigabytes": (lambda f, _: os.truncate(f / INDEX, 2**31), "wanted at most"),
    "metadata is a list": (spoil_index(lambda i: i.update(metadata=[1])), r"metadata=\[1\]; wanted a JSON object"),
    "metadata is text": (spoil_index(lambda i: i.update(metadata="x")), "metadata='x'; wanted a JSON object"),
    "total is text": (spoil_index(lambda i: i["metadata"].update(total_size="80")), "total_size 80"),
    "total is a list": (spoil_index(lambda i: i["metadata"].update(total_size=[80])), r"total_size \[80\]"),
    "map is a list": (spoil_index(lambda i: i.update(weight_map=["t0"])), "weight_map"),
    "map is text": (spoil_index(lambda i: i.update(weight_map="t0")), "weight_map"),
    "map is empty": (spoil_index(lambda i: i.update(weight_map={})), "weight_map"),
    "map of lists": (spoil_index(lambda i: i["weight_map"].update(t0=[ONE])), "weight_map"),
    "map of null": (spoil_index(lambda i: i["weight_map"].update(t0=None)), "weight_map"),
    "folder in the index": (spoil_index(lambda i: i["weight_map"].update(t0=f"sub/{ONE}")), "never a path"),
    "file with a NUL": (spoil_index(lambda i: i["weight_map"].update(t0=f"x\0{ONE}")), "never a path"),
    "shard is a folder": (lambda f, _: ((f / TWO).unlink(), (f / TWO).mkdir()), TWO),
    "shard is a pipe": (lambda f, _: ((f / TWO).unlink(), os.mkfifo(f / TWO)), TWO),
    "index is not JSON": (lambda f, _: (f / INDEX).write_text("{"), "not JSON"),
    "name twice in the index": (lambda f, _: (f / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'), "twice"),
    "both layouts": (lambda f, _: write_file(f / SINGLE, {"a": torch.zeros(1)}), "both"),
    "cut shard": (lambda f, _: (f / TWO).write_bytes((f / TWO).read_bytes()[:-1]), TWO),
    "nothing": (lambda f, _: [p.unlink() for p in f.iterdir()], "looked for"),
}


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_broken_folders_are_refused_by_name(tmp_path: Path, name: str) -> None:
    index = sharded(tmp_path)
    assert len(entries_in(tmp_path)) == 4
    spoil, message = BROKEN_FOLDERS[name]
    spoil(tmp_path, index)
    with pytest.raises((Refused, StorageFailed), match=message):
        entries_in(tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_weights_that_are_no_file_are_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / SINGLE)
    with pytest.raises(Refused, match="is a folder or a device"):
        entries_in(tmp_path)


def test_a_header_of_no_end_is_not_read(tmp_path: Path) -> None:
    """Its length is within the file's, which is sparse: the library refuses it by its length."""
    (tmp_path / SINGLE).write_bytes((2**36).to_bytes(8, "little") + b"[" * 10**5)
    os.truncate(tmp_path / SINGLE, 2**37)
    with pytest.raises(Refused, match="is not a complete safetensors file"):
        entries_in(tmp_path)


def test_a_header_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5)
    with pytest.raises(Refused, match="is not a complete safetensors file"):
        entries_in(tmp_path)


def test_tensors_that_are_left_out_are_counted_by_their_first_name() -> None:
    names = ["mtp.layers.0.x", "mtp.norm", "a.b", "r.inv_freq", "logit_scale", "e.position_ids"]
    assert unread_tensors(names, ["mtp.**", "logit_scale", "r.*", "e.*"]) == "mtp.* (2), logit_scale"
    assert unread_tensors(["a.b"], ["mtp.**"]) == ""


OTHER_FORMATS = {
    "model.Q4_K_M.gguf": "holds GGUF files, llama.cpp's, whose weights are mostly quantised. Take the safetensors checkpoint",
    "__0_0.distcp": "a distributed checkpoint of PyTorch",
    "global_step100": "a checkpoint of DeepSpeed",
    "model_index.json": "a pipeline of diffusers",
    "model.onnx": "ONNX files, which cannot be trained",
    "tf_model.h5": "weights of TensorFlow",
    "flax_model.msgpack": "weights of Flax",
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_weights_of_another_format_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(Refused, match=OTHER_FORMATS[name]):
        entries_in(tmp_path)
    write_file(tmp_path / SINGLE, {"a": torch.zeros(1)})  # next to safetensors they are ignored
    assert entries_in(tmp_path).keys() == {"a"}


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no such folder"):
        entries_in(tmp_path / "gone")


# ---- names

RULES = (
    KeyRule("embed.weight", "model.embed_tokens.weight"),
    KeyRule("blocks.{i}.q.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    KeyRule("patch.weight", "conv.weight", read=lambda x: x.flatten(1), write=lambda x: x.unflatten(1, (3, 2, 2))),
    KeyRule("head.weight", "lm_head.weight"),
)


def ours(tied: bool = False) -> dict[str, Tensor]:
    made = {"embed.weight": torch.zeros(4, 2), "patch.weight": torch.zeros(5, 12)}
    made |= {f"blocks.{i}.q.weight": torch.zeros(2, 2) for i in range(12)}
    return made | {"head.weight": made["embed.weight"] if tied else torch.zeros(4, 2)}


def theirs() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    made = {f"model.layers.{i}.self_attn.q_proj.weight": torch.randn(2, 2, generator=rng) for i in range(12)}
    made |= {"conv.weight": torch.randn(5, 3, 2, 2, generator=rng), "model.embed_tokens.weight": torch.randn(4, 2, generator=rng)}
    return made | {"lm_head.weight": torch.randn(4, 2, generator=rng)}


def test_tensors_are_renamed_both_ways(tmp_path: Path) -> None:
    stored, made = theirs(), ours()
    write_folder(tmp_path, stored.items())
    load_into(made, tmp_path, RULES)
    assert torch.equal(made["blocks.11.q.weight"], stored["model.layers.11.self_attn.q_proj.weight"])
    assert torch.equal(made["blocks.1.q.weight"], stored["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(made["patch.weight"], stored["conv.weight"].reshape(5, 12))
    back = dict(renamed(made.items(), RULES))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], x) for name, x in stored.items())


def test_loading_casts_to_each_tensors_dtype(tmp_path: Path) -> None:
    stored, made = theirs(), ours()
    write_folder(tmp_path, ((name, x.bfloat16()) for name, x in stored.items()))
    made["patch.weight"] = made["patch.weight"].half()
    load_into(made, tmp_path, RULES)
    assert torch.equal(made["embed.weight"], stored["model.embed_tokens.weight"].bfloat16().float())
    assert torch.equal(made["patch.weight"], stored["conv.weight"].reshape(5, 12).bfloat16().half())


@pytest.mark.parametrize("present", ["embedding", "head", "both"])
def test_tied_weight_is_read_under_either_name_once(tmp_path: Path, present: str) -> None:
    stored, made = theirs(), ours(tied=True)
    value = stored["lm_head.weight"]
    stored["model.embed_tokens.weight"] = value
    gone = {"embedding": "lm_head.weight", "head": "model.embed_tokens.weight", "both": None}[present]
    write_folder(tmp_path, ((name, x.clone()) for name, x in stored.items() if name != gone))
    load_into(made, tmp_path, RULES)
    assert torch.equal(made["embed.weight"], value)
    assert made["head.weight"] is made["embed.weight"]
    names = [name for name, _ in stream(made, tmp_path, RULES)]
    assert names.count("embed.weight") == 1
    assert "head.weight" not in names


def test_a_tied_model_refuses_two_different_weights(tmp_path: Path) -> None:
    write_folder(tmp_path, theirs().items())
    with pytest.raises(Refused, match=r"model\.embed_tokens\.weight and lm_head\.weight with different values"):
        load_into(ours(tied=True), tmp_path, RULES)


def test_an_untied_model_refuses_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    write_folder(tmp_path, ((name, x) for name, x in theirs().items() if name != "lm_head.weight"))
    with pytest.raises(Refused, match=r"missing: lm_head\.weight"):
        load_into(ours(), tmp_path, RULES)


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("conv.weight"), r"missing: conv\.weight"),
    "block missing": (lambda t: t.pop("model.layers.11.self_attn.q_proj.weight"), r"missing: model\.layers\.11"),
    "block too many": (lambda t: t.update({"model.layers.12.self_attn.q_proj.weight": torch.zeros(2, 2)}), r"unknown: model\.layers\.12"),
    "unknown": (lambda t: t.update({"vision.weight": torch.zeros(1)}), r"unknown: vision\.weight"),
    "near miss": (lambda t: t.update({"con.weight": t.pop("conv.weight")}), r"Did you mean 'con\.weight'"),
    "shape": (lambda t: t.update({"lm_head.weight": torch.zeros(4, 3)}), r"lm_head\.weight is \[4, 3\], wanted \[4, 2\]"),
    "their layout": (lambda t: t.update({"conv.weight": torch.zeros(5, 12)}), r"conv\.weight is \[5, 12\], wanted \[5, 3, 2, 2\]"),
    "transposed conv": (lambda t: t.update({"conv.weight": torch.zeros(3, 5, 2, 2)}), r"wanted \[5, 3, 2, 2\]"),
    "integers": (lambda t: t.update({"lm_head.weight": torch.zeros(4, 2, dtype=torch.int8)}), r"lm_head\.weight is I8: quantised"),
    "NaN": (lambda t: t["conv.weight"].view(-1)[7:8].fill_(float("nan")), r"conv\.weight .*1 of 60 values"),
    "infinity": (lambda t: t["lm_head.weight"].view(-1)[0:1].fill_(float("-inf")), r"lm_head\.weight .*1 of 8 values"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_with_names(tmp_path: Path, name: str) -> None:
    stored, made = theirs(), ours()
    spoil, message = MISFITS[name]
    spoil(stored)
    write_folder(tmp_path, stored.items())
    with pytest.raises(Refused, match=message):
        load_into(made, tmp_path, RULES)
    if name not in ("NaN", "infinity"):  # those show only when the values are read
        assert all(not x.any() for x in made.values()), "something was loaded before the refusal"


def test_declared_leftovers_are_dropped_and_nothing_else(tmp_path: Path) -> None:
    stored = theirs() | {"text.layers.0.weight": torch.zeros(1), "logit_scale": torch.zeros(())}
    write_folder(tmp_path, stored.items())
    load_into(ours(), tmp_path, RULES, dropped=("text.**", "logit_scale"))
    with pytest.raises(Refused, match=r"unknown: text\.layers\.0\.weight\. "):
        load_into(ours(), tmp_path, RULES, dropped=("text.*", "logit_*"))


def test_streaming_gives_what_is_stored_in_our_layout(tmp_path: Path) -> None:
    stored = {name: x.bfloat16() for name, x in theirs().items()}
    write_folder(tmp_path, stored.items())
    on_meta = {name: x.to("meta") for name, x in ours().items()}
    found = dict(stream(on_meta, tmp_path, RULES))
    assert found.keys() == on_meta.keys()
    assert torch.equal(found["patch.weight"], stored["conv.weight"].flatten(1))
    back = dict(renamed(found.items(), RULES))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], x) and back[name].dtype == torch.bfloat16 for name, x in stored.items())


# ---- fused and stacked

E, WIDE, NARROW = 3, 6, 4  # experts, their width, the model's: no two equal, so that a forgotten transpose shows
FUSED = (
    KeyRule(("blocks.{i}.q", "blocks.{i}.k", "blocks.{i}.v"), "layers.{i}.qkv", lambda x: x.split((4, 2, 2)), lambda *x: torch.cat(x)),
    KeyRule("blocks.{i}.down", "layers.{i}.experts.{e}.down"),
    KeyRule("blocks.{i}.in", "layers.{i}.experts.{e}.in", lambda x: x.T, lambda x: x.T),
    KeyRule(("blocks.{i}.gate", "blocks.{i}.up"), "layers.{i}.experts.{e}.gate_up", lambda x: x.T.chunk(2), lambda *x: torch.cat(x).T),
    KeyRule(
        ("blocks.{i}.gate_all", "blocks.{i}.up_all"),
        "layers.{i}.all",
        lambda x: x.transpose(1, 2).chunk(2, 1),
        lambda *x: torch.cat(x, 1).transpose(1, 2),
    ),
    KeyRule("embed", "embed"),
)


def fused_there() -> dict[str, Tensor]:
    """As a checkpoint has them, in an order of its own: names of one block and one expert are far apart."""
    rng = torch.Generator().manual_seed(2)
    shapes = {"embed": (5, NARROW)}
    for i in (0, 1, 10):
        shapes |= {f"layers.{i}.qkv": (8, NARROW), f"layers.{i}.all": (E, NARROW, 2 * WIDE)}
        shapes |= {f"layers.{i}.experts.{e}.down": (NARROW, WIDE) for e in range(E)}
        shapes |= {f"layers.{i}.experts.{e}.in": (NARROW, WIDE) for e in range(E)}
        shapes |= {f"layers.{i}.experts.{e}.gate_up": (NARROW, 2 * WIDE) for e in range(E)}
    made = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return dict(sorted(made.items(), key=lambda item: item[0][::-1]))


def fused_here() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in (0, 1, 10):
        shapes |= {f"blocks.{i}.q": (4, NARROW), f"blocks.{i}.gate": (E, WIDE, NARROW), f"blocks.{i}.gate_all": (E, WIDE, NARROW)}
        shapes |= {f"blocks.{i}.k": (2, NARROW), f"blocks.{i}.up": (E, WIDE, NARROW), f"blocks.{i}.up_all": (E, WIDE, NARROW)}
        shapes |= {f"blocks.{i}.v": (2, NARROW), f"blocks.{i}.down": (E, NARROW, WIDE), f"blocks.{i}.in": (E, WIDE, NARROW)}
    return {name: torch.zeros(shape) for name, shape in (shapes | {"embed": (5, NARROW)}).items()}


@pytest.mark.parametrize("max_shard_bytes", [1, 500, 10**9])  # one tensor a shard; experts of a layer in several; all in one
def test_fused_and_stacked_tensors_both_ways(tmp_path: Path, max_shard_bytes: int) -> None:
    there, made = fused_there(), fused_here()
    write_folder(tmp_path, there.items(), max_shard_bytes)
    load_into(made, tmp_path, FUSED)
    for i in (0, 1, 10):
        q, k, v = there[f"layers.{i}.qkv"][:4], there[f"layers.{i}.qkv"][4:6], there[f"layers.{i}.qkv"][6:]
        assert torch.equal(made[f"blocks.{i}.q"], q)
        assert torch.equal(made[f"blocks.{i}.k"], k)
        assert torch.equal(made[f"blocks.{i}.v"], v)
        for e in range(E):
            assert torch.equal(made[f"blocks.{i}.down"][e], there[f"layers.{i}.experts.{e}.down"])
            assert torch.equal(made[f"blocks.{i}.in"][e], there[f"layers.{i}.experts.{e}.in"].T)
            assert torch.equal(made[f"blocks.{i}.gate"][e], there[f"layers.{i}.experts.{e}.gate_up"][:, :WIDE].T)
            assert torch.equal(made[f"blocks.{i}.up"][e], there[f"layers.{i}.experts.{e}.gate_up"][:, WIDE:].T)
            assert torch.equal(made[f"blocks.{i}.gate_all"][e], there[f"layers.{i}.all"][e, :, :WIDE].T)
            assert torch.equal(made[f"blocks.{i}.up_all"][e], there[f"layers.{i}.all"][e, :, WIDE:].T)
    back = dict(renamed(made.items(), FUSED))
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name], x) for name, x in there.items())


def test_what_was_read_is_written_byte_for_byte(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write_folder(first, ((name, x.bfloat16()) for name, x in fused_there().items()))
    shapes = {name: x.to("meta") for name, x in fused_here().items()}
    write_folder(second, renamed(stream(shapes, first, FUSED), FUSED))
    assert (first / SINGLE).read_bytes() == (second / SINGLE).read_bytes()


FUSED_MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "an expert gone": (lambda t: t.pop("layers.1.experts.2.down"), r"missing: layers\.1\.experts\.2\.down\. "),
    "all experts gone": (
        lambda t: [t.pop(f"layers.1.experts.{e}.in") for e in range(E)],
        r"missing: layers\.1\.experts\.0\.in, layers\.1\.experts\.1\.in, layers\.1\.experts\.2\.in\. ",
    ),
    "an expert too many": (
        lambda t: t.update({"layers.1.experts.3.down": torch.zeros(NARROW, WIDE)}),
        r"unknown: layers\.1\.experts\.3\.down\. ",
    ),
    "a fused tensor gone": (lambda t: t.pop("layers.10.qkv"), r"missing: layers\.10\.qkv\. "),
    "a fused tensor cut": (lambda t: t.update({"layers.0.qkv": torch.zeros(4, NARROW)}), r"layers\.0\.qkv is \[4, 4\], wanted \[8, 4\]"),
    "not transposed": (
        lambda t: t.update({"layers.0.all": torch.zeros(E, 2 * WIDE, NARROW)}),
        r"layers\.0\.all is \[3, 12, 4\], wanted \[3, 4, 12\]",
    ),
    "an expert of another shape": (
        lambda t: t.update({"layers.0.experts.1.in": torch.zeros(WIDE, NARROW)}),
        r"layers\.0\.experts\.1\.in is \[6, 4\], wanted \[4, 6\]",
    ),
    "NaN": (lambda t: t["layers.0.experts.1.in"][0, :2].fill_(float("nan")), r"layers\.0\.experts\.1\.in .*2 of 24 values"),
}


@pytest.mark.parametrize("name", FUSED_MISFITS)
def test_fused_and_stacked_misfits_are_refused_with_names(tmp_path: Path, name: str) -> None:
    there = fused_there()
    spoil, message = FUSED_MISFITS[name]
    spoil(there)
    write_folder(tmp_path, there.items())
    with pytest.raises(Refused, match=message):
        load_into(fused_here(), tmp_path, FUSED)


def test_stacked_tensors_of_several_dtypes_lose_nothing(tmp_path: Path) -> None:
    there, made = fused_there(), fused_here()
    there["layers.0.experts.0.in"] = there["layers.0.experts.0.in"].bfloat16()
    write_folder(tmp_path, there.items())
    load_into(made, tmp_path, FUSED)
    for e in range(E):
        assert torch.equal(made["blocks.0.in"][e], there[f"layers.0.experts.{e}.in"].T.float())


def test_writing_a_part_of_a_fused_tensor_is_a_defect() -> None:
    with pytest.raises(AssertionError, match=r"only parts of layers\.0\.qkv were given: blocks\.0\.q, blocks\.0\.v"):
        list(renamed([(f"blocks.0.{x}", torch.zeros(2, NARROW)) for x in "qv"], FUSED))
