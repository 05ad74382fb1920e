"""Hub folders in: every byte kept, every difference refused by name, embeddings that never shrink."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, SiglipVisionModel

from eyeline.bundle.bundle import open_bundle, template_name
from eyeline.bundle.fill import load
from eyeline.bundle.importing import import_model, import_whole
from eyeline.core.batch import Message, Text
from eyeline.core.errors import Refused
from eyeline.data.text.templates import QWEN_SYSTEM, TEMPLATES
from eyeline.generate.prompts import Prompts
from eyeline.models import hf, llava, spec
from eyeline.models.hf import mapping_of
from tests.bundle.tiny import ROWS, SIDE, asked, built, our_logits, randomise, save_language, save_vision, tokenizer, without_image_token
from tests.command import Command

Capture = pytest.CaptureFixture[str]

# The template of Qwen2.5-Instruct's tokenizer_config.json, but for what it does with tools.
QWEN_OWN = (
    "{%- if tools %}{{- 'tools' }}{%- else %}{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- else %}"
    "{{- '<|im_start|>system\\n" + QWEN_SYSTEM + "<|im_end|>\\n' }}{%- endif %}{%- endif %}"
    '{%- for message in messages %}{%- if (message.role == "user") or (message.role == "system" and not loop.first) or '
    '(message.role == "assistant" and not message.tool_calls) %}'
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN_BASE = QWEN_OWN.replace(QWEN_SYSTEM, "You are a helpful assistant.")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    save_vision(folder / "siglip")
    save_vision(folder / "tower", whole=False)
    save_language(folder / "tied")
    save_language(folder / "untied", tied=False, dtype=torch.bfloat16)
    return folder


@pytest.mark.parametrize("vision", ["siglip", "tower"])
@pytest.mark.parametrize("language", ["tied", "untied"])
def test_every_tensor_is_kept_as_it_was_stored(hub: Path, tmp_path: Path, vision: str, language: str) -> None:
    bundle = import_model(hub / vision, hub / language, tmp_path / "model")
    before, after = load_file(hub / vision / "model.safetensors"), load_file(tmp_path / "model" / "vision" / "model.safetensors")
    tower = {n if vision == "siglip" else f"vision_model.{n}": x for n, x in before.items() if "head." not in n}
    assert after.keys() == {n for n in tower if n.startswith("vision_model.")}  # the hub's names, wherever it came from
    assert all(torch.equal(x, tower[name]) and x.dtype == torch.float32 for name, x in after.items())
    before, after = load_file(hub / language / "model.safetensors"), load_file(tmp_path / "model" / "language" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(x, before[name]) and x.dtype == before[name].dtype for name, x in after.items())
    assert ("lm_head.weight" in after) is (language == "untied")

    opened = open_bundle(tmp_path / "model")
    assert (opened.form and opened.form.name, opened.bundle.config, opened.bundle.template) == ("parts", bundle.config, "qwen2.5")
    model = load(opened, "cpu").model
    assert torch.equal(model.language.head.weight, after.get("lm_head.weight", after["model.embed_tokens.weight"]).float())


def test_transformers_loads_the_imported_parts(hub: Path, tmp_path: Path) -> None:
    import_model(hub / "siglip", hub / "tied", tmp_path / "model")
    tower = SiglipVisionModel.from_pretrained(tmp_path / "model" / "vision", output_loading_info=True)
    language = Qwen2ForCausalLM.from_pretrained(tmp_path / "model" / "language", output_loading_info=True)
    for _, report in (tower, language):
        assert not any(report.values()), report
    assert AutoTokenizer.from_pretrained(tmp_path / "model" / "language").chat_template == TEMPLATES["qwen2.5"].jinja


def test_settings_of_the_tower_and_its_images_come_along(hub: Path, tmp_path: Path) -> None:
    bundle = import_model(hub / "siglip", hub / "tied", tmp_path / "model", projector=llava.ProjectorConfig(shuffle=2), seed=5)
    vision = bundle.config.vision
    assert (vision.resample, vision.mean, vision.std, vision.eps) == ("bilinear", (0.5, 0.4, 0.6), (0.5, 0.3, 0.25), 1e-5)
    assert bundle.config.language.max_positions == 512
    rule = llava.spec(bundle.config).image
    assert rule is not None
    assert rule.units(7, 9)[0].tokens == 4


def test_the_fresh_projector_is_that_of_its_seed(hub: Path, tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        import_model(hub / "siglip", hub / "tied", tmp_path / name, seed=seed)
        files.append((tmp_path / name / "projector.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


# ---- vocabularies


def test_a_vocabulary_with_free_rows_keeps_its_size(hub: Path, tmp_path: Path) -> None:
    small = tokenizer(without_image_token(TEMPLATES["qwen2.5"]), vocabulary=300)
    assert "<|image_pad|>" not in small.get_vocab()
    used = len(small)
    language = save_language(tmp_path / "language", tok=small)
    bundle = import_model(hub / "siglip", language, tmp_path / "model", template="qwen2.5")
    assert bundle.config.language.vocab_size == ROWS > used + 1
    assert bundle.encoder().image_token == used
    before, after = load_file(language / "model.safetensors"), load_file(tmp_path / "model" / "language" / "model.safetensors")
    assert all(torch.equal(x, before[name]) for name, x in after.items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_without_free_rows_grows_by_means(hub: Path, tmp_path: Path, tied: bool) -> None:
    small = tokenizer(without_image_token(TEMPLATES["qwen2.5"]), vocabulary=300)
    language = save_language(tmp_path / "language", tied, rows=len(small), tok=small)
    bundle = import_model(hub / "siglip", language, tmp_path / "model", template="qwen2.5")
    rows = bundle.config.language.vocab_size
    assert rows % 64 == 0
    assert rows > len(small)
    before, after = load_file(language / "model.safetensors"), load_file(tmp_path / "model" / "language" / "model.safetensors")
    grown = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if not tied else set())
    for name, x in after.items():
        if name in grown:
            assert len(x) == rows
            assert torch.equal(x[: len(small)], before[name])
            torch.testing.assert_close(x[len(small) :], before[name].mean(0).expand(rows - len(small), -1))
        else:
            assert torch.equal(x, before[name])
    assert Qwen2ForCausalLM.from_pretrained(tmp_path / "model" / "language").config.vocab_size == rows


# ---- templates


@pytest.mark.parametrize(("jinja", "name"), [(t.jinja, n) for n, t in TEMPLATES.items()] + [(QWEN_OWN, "qwen2.5")])
def test_a_chat_template_is_known_by_what_it_renders(jinja: str, name: str) -> None:
    tok = tokenizer()
    tok.chat_template = jinja
    assert template_name(tok, Path("somewhere")) == name


@pytest.mark.parametrize("jinja", [None, QWEN_BASE, "{{ messages[0]['content'] }}", "{{ raise_exception('no') }}", "{% if %}", ""])
def test_another_chat_template_is_refused_unless_replaced(hub: Path, tmp_path: Path, jinja: str | None) -> None:
    tok = tokenizer()
    tok.chat_template = jinja
    language = save_language(tmp_path / "language", tok=tok)
    with pytest.raises(Refused, match="--template"):
        import_model(hub / "siglip", language, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert import_model(hub / "siglip", language, tmp_path / "model", template="plain").template == "plain"
    assert open_bundle(tmp_path / "model").bundle.tokenizer.chat_template == TEMPLATES["plain"].jinja


def test_tokenizer_that_autotokenizer_would_change_is_exact(hub: Path, tmp_path: Path, capsys: Capture) -> None:
    """With Qwen2's config.json it replaces normalisation; the ids that a model was trained on must not change."""
    from tokenizers import normalizers

    tok = tokenizer()
    tok.backend_tokenizer.normalizer = normalizers.Lowercase()
    language = save_language(tmp_path / "language", tok=tok)
    bundle = import_model(hub / "siglip", language, tmp_path / "model")
    again = open_bundle(tmp_path / "model").bundle
    for text in ("Cafe\u0301 UPPER", "it's 12"):
        assert bundle.encoder().ids(text) == again.encoder().ids(text) == tok.encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "model" / "language").encode("UPPER") != tok.encode("UPPER")
    assert "PreTrainedTokenizerFast.from_pretrained" in capsys.readouterr().err


# ---- what is refused


def edit(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return spoil


def retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "pickle": ("language", pickled, "pickled weights"),
    "no weights": ("vision", lambda f: (f / "model.safetensors").unlink(), "no weights in"),
    "no config": ("language", lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config is not JSON": ("vision", lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "config is a list": ("vision", lambda f: (f / "config.json").write_text("[1]"), "holds a list"),
    "config nested without end": ("vision", lambda f: (f / "config.json").write_text("[" * 10**6), "config.json is not JSON"),
    "tower in the other's place": ("language", edit("config.json", lambda c: c.update(model_type="siglip")), "model_type='siglip'"),
    "half a NaFlex tower": ("vision", edit("config.json", lambda c: c.update(model_type="siglip2")), "model_type='siglip_vision_model'"),
    "another image size": (
        "vision",
        edit("preprocessor_config.json", lambda c: c.update(size={"height": 32, "width": 32})),
        "preprocessor_config.json has size",
    ),
    "fewer layers in the config": ("language", edit("config.json", lambda c: c.update(num_hidden_layers=1, layer_types=None)), "unknown: "),
    "wider in the config": ("language", edit("config.json", lambda c: c.update(intermediate_size=44)), "of another shape or dtype"),
    "tensor missing": ("language", retensor(lambda t: t.pop(Q)), f"missing: {Q}"),
    "tensor unknown": ("language", retensor(lambda t: t.update({"model.extra": torch.zeros(1)})), r"unknown: model\.extra"),
    "text-like name in the tower": (
        "vision",
        retensor(lambda t: t.update({"vision_model.text.x": torch.zeros(1)})),
        r"unknown: vision_model\.text\.x",
    ),
    "shape": ("language", retensor(lambda t: t.update({Q: torch.zeros(24, 12)})), rf"{Q} is \[24, 12\], wanted \[24, 24\]"),
    "NaN": ("language", retensor(lambda t: t[Q].view(-1)[3:4].fill_(float("nan"))), f"{Q} .*NaN or infinite"),
    "infinity in the tower": (
        "vision",
        retensor(lambda t: t["vision_model.post_layernorm.bias"][0:1].fill_(float("inf"))),
        r"post_layernorm\.bias .*NaN or infinite",
    ),
    "quantised": ("language", retensor(lambda t: t.update({Q: t[Q].to(torch.int8)})), f"{Q} is I8"),
    "no tokenizer": ("language", lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "tokenizer is no tokenizer": ("language", lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer .* cannot be read"),
    "huge tokenizer": ("language", lambda f: (f / "tokenizer.json").write_bytes(b" " * (64 * 2**20 + 1)), "wanted at most"),
    "one id for two tokens": (
        "language",
        edit("tokenizer.json", lambda c: c["added_tokens"].append(c["added_tokens"][0] | {"content": "<|again|>"})),
        "to both",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_and_nothing_is_left(hub: Path, tmp_path: Path, name: str) -> None:
    part, spoil, message = BROKEN[name]
    folders = {"vision": tmp_path / "vision", "language": tmp_path / "language"}
    shutil.copytree(hub / "siglip", folders["vision"])
    shutil.copytree(hub / "tied", folders["language"])
    spoil(folders[part])
    with pytest.raises(Refused, match=message):
        import_model(folders["vision"], folders["language"], tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["language", "vision"]


def test_code_beside_a_checkpoint_is_named_and_never_run(hub: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(hub / "tied", tmp_path / "language")
    canary = tmp_path / "canary"
    (tmp_path / "language" / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass C: pass\n")
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C", "AutoTokenizer": ["evil.C", "evil.C"]}
    edit("config.json", lambda c: c.update(auto_map=code, trust_remote_code=True))(tmp_path / "language")
    edit("tokenizer_config.json", lambda c: c.update(auto_map=code))(tmp_path / "language")
    import_model(hub / "siglip", tmp_path / "language", tmp_path / "model")
    assert "auto_map" in capsys.readouterr().err
    assert not canary.exists()
    assert "auto_map" not in (tmp_path / "model" / "language" / "config.json").read_text()
    assert not (tmp_path / "model" / "language" / "evil.py").exists()


def test_parts_that_do_not_fit_are_refused_with_the_valid_choices(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"shuffle=3 must divide the 4×4 patches .* valid: \[1, 2, 4\]"):
        import_model(hub / "siglip", hub / "tied", tmp_path / "model", projector=llava.ProjectorConfig(shuffle=3))
    with pytest.raises(Refused, match="is not known; there are"):
        import_model(hub / "siglip", hub / "tied", tmp_path / "model", template="vicuna")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "x").write_text("mine")
    with pytest.raises(Refused, match="exists already"):
        import_model(hub / "siglip", hub / "tied", tmp_path / "model")


def test_without_image_settings_the_defaults_are_named(hub: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(hub / "siglip", tmp_path / "vision")
    (tmp_path / "vision" / "preprocessor_config.json").unlink()
    bundle = import_model(tmp_path / "vision", hub / "tied", tmp_path / "model")
    assert bundle.config.vision.mean == (0.5, 0.5, 0.5)
    assert "no preprocessor_config.json" in capsys.readouterr().err


def test_a_tied_config_over_an_untied_checkpoint_is_refused(hub: Path, tmp_path: Path) -> None:
    shutil.copytree(hub / "untied", tmp_path / "language")
    edit("config.json", lambda c: c.update(tie_word_embeddings=True))(tmp_path / "language")
    with pytest.raises(Refused, match="tie_word_embeddings"):
        import_model(hub / "siglip", tmp_path / "language", tmp_path / "model")


def test_an_untied_config_over_a_tied_checkpoint_is_refused(hub: Path, tmp_path: Path) -> None:
    shutil.copytree(hub / "tied", tmp_path / "language")
    edit("config.json", lambda c: c.update(tie_word_embeddings=False))(tmp_path / "language")
    with pytest.raises(Refused, match=r"missing: lm_head\.weight"):
        import_model(hub / "siglip", tmp_path / "language", tmp_path / "model")


def test_controls_that_are_missing_are_added_together(hub: Path, tmp_path: Path, capsys: Capture) -> None:
    bare = tokenizer(replace(TEMPLATES["plain"], controls=("<|endoftext|>",)), vocabulary=300)
    language = save_language(tmp_path / "language", tok=bare)
    bundle = import_model(hub / "siglip", language, tmp_path / "model", template="qwen2.5")
    ids = [bundle.encoder().controls[c] for c in TEMPLATES["qwen2.5"].controls if c != "<|endoftext|>"]
    assert sorted(ids) == list(range(len(bare), len(bare) + 5))
    assert f"rows {len(bare)} to {len(bare) + 4}" in capsys.readouterr().out


@pytest.mark.parametrize("whole", [True, False])
def test_added_tokens_are_recorded_as_untrained(hub: Path, tmp_path: Path, whole: bool) -> None:
    """But for the image token, whose embedding visual features replace; a second import keeps the record."""
    bare = tokenizer(replace(TEMPLATES["plain"], controls=("<|endoftext|>",)), vocabulary=300)
    language = save_language(tmp_path / "language", tok=bare)
    folder = tmp_path / "model"
    if whole:
        import_whole(language, folder, template="smollm2")
    else:
        import_model(hub / "siglip", language, folder, template="smollm2")
    assert open_bundle(folder).bundle.untrained == ("<|im_start|>", "<|im_end|>")
    if whole:
        import_whole(folder, tmp_path / "again")
        assert open_bundle(tmp_path / "again").bundle.untrained == ("<|im_start|>", "<|im_end|>")
    else:
        import_model(hub / "siglip", folder / "language", tmp_path / "again")
        assert open_bundle(tmp_path / "again").bundle.untrained == ("<|im_start|>", "<|im_end|>")
    import_model(hub / "siglip", hub / "tied", tmp_path / "own")
    assert open_bundle(tmp_path / "own").bundle.untrained == ()
    (folder / ("" if whole else "language") / "untrained_tokens.json").write_text('{"tokens": "x"}')
    with pytest.raises(Refused, match="wanted a list of token strings"):
        open_bundle(folder)


# ---- whole models

QWEN3: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def test_a_whole_model_is_taken_in_with_the_controls_of_its_template(hub: Path, tmp_path: Path, eyeline: Command) -> None:
    small = tokenizer(without_image_token(TEMPLATES["qwen2.5"]), vocabulary=300)
    language = save_language(tmp_path / "language", tied=False, rows=len(small), tok=small)
    done = eyeline("import", "taken", "--model", str(language), "--template", "qwen3-thinking")
    assert done.code == 0, done.err
    assert f"grew from {len(small)} to 320" in done.out
    assert "Qwen2ForCausalLM" in done.out
    opened = open_bundle(tmp_path / "taken")
    assert opened.bundle.config.family == "text"
    assert opened.bundle.config.language.vocab_size == 320
    before, after = load_file(language / "model.safetensors"), load_file(tmp_path / "taken" / "model.safetensors")
    for name, x in after.items():
        assert torch.equal(x[: len(before[name])], before[name])
        assert len(x) == (320 if name in ("model.embed_tokens.weight", "lm_head.weight") else len(before[name]))
    assert Qwen2ForCausalLM.from_pretrained(tmp_path / "taken").config.vocab_size == 320


def test_a_text_model_gets_no_image_token(hub: Path, tmp_path: Path, eyeline: Command) -> None:
    """Its embedding stays the original's, row by row, so that the two can be merged; what it answers with does not need one."""
    template = TEMPLATES["qwen2.5"]
    small = tokenizer(replace(template, controls=tuple(c for c in template.controls if c not in template.media)), vocabulary=300)
    language = save_language(tmp_path / "language", rows=len(small), tok=small)
    done = eyeline("import", "taken", "--model", str(language), "--template", "qwen2.5")
    assert (done.code, "added" in done.out) == (0, False), done.err
    before, after = load_file(language / "model.safetensors"), load_file(tmp_path / "taken" / "model.safetensors")
    assert {name: x.shape for name, x in before.items()} == {name: x.shape for name, x in after.items()}
    bundle = open_bundle(tmp_path / "taken").bundle
    assert bundle.tokenizer.get_vocab() == small.get_vocab()
    prompt = Prompts(bundle.encoder(), None).prompt([Message("user", (Text("hi"),))])
    asked = small.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False)
    assert prompt.tokens_T.tolist() == asked
    done = eyeline("export", "taken", "out")
    assert done.code == 0, done.err
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == before.keys()
    joined = import_model(hub / "siglip", tmp_path / "taken", tmp_path / "joined")  # where an image token is needed, it comes
    assert joined.encoder().image_token >= len(small)


def test_a_folder_in_bf16_is_exported_in_bf16(hub: Path, tmp_path: Path, eyeline: Command) -> None:
    """To the bit, and in float32 when that is asked for; a folder that holds both goes out in float32."""
    before = load_file(hub / "untied" / "model.safetensors")
    assert eyeline("import", "taken", "--model", str(hub / "untied"), "--template", "qwen2.5").code == 0
    joined = ("--vision", str(hub / "siglip"), "--language", str(hub / "untied"), "--template", "qwen2.5")
    assert eyeline("import", "mixed", *joined).code == 0
    for folder, options, dtype in (
        ("taken", (), torch.bfloat16),
        ("taken", ("--dtype", "fp32"), torch.float32),
        ("mixed", (), torch.float32),
    ):
        done = eyeline("export", folder, f"out{len(options)}{folder}", *options)
        assert done.code == 0, done.err
        after = load_file(tmp_path / f"out{len(options)}{folder}" / "model.safetensors")
        assert {x.dtype for x in after.values()} == {dtype}
        if folder == "taken":
            assert all(torch.equal(after[name][: len(x)], x.to(dtype)) for name, x in before.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "a", "--vision", "b"), "Give one or the other"),
        (("--language", "a"), "give --model with a complete model, or --vision and --language"),
        (("--model", "a", "--shuffle", "2", "--no-feature-norm"), "--shuffle, --feature-norm would change nothing"),
        (("--vision", "a", "--language", "b", "--transplant", "--tiles", "3"), "--tiles would change nothing"),
        ((), "give --model with a complete model, or --vision and --language"),
    ],
)
def test_a_whole_model_or_two_parts(eyeline: Command, options: tuple[str, ...], message: str) -> None:
    done = eyeline("import", "out", *options)
    assert (done.code, message in done.err) == (2, True), done.err


def test_a_refusal_names_the_folder_that_it_is_about(hub: Path, tmp_path: Path) -> None:
    for vision, language, named in ((hub / "tied", hub / "tied", hub / "tied"), (hub / "siglip", hub / "siglip", hub / "siglip")):
        with pytest.raises(Refused, match=f"^{re.escape(str(named))}: config.json has model_type"):
            import_model(vision, language, tmp_path / "out")


def test_a_folder_of_parts_needs_no_import(hub: Path, tmp_path: Path, eyeline: Command) -> None:
    import_model(hub / "siglip", hub / "tied", tmp_path / "parts", tiles=5)
    done = eyeline("import", "again", "--model", str(tmp_path / "parts"))
    assert done.code == 2
    assert "Use it as it is" in done.err


def test_a_transplant_by_the_command_line(hub: Path, tmp_path: Path, eyeline: Command) -> None:
    vision = save_vision(tmp_path / "vision", layer_norm_eps=1e-6, num_hidden_layers=4)
    language = Qwen3ForCausalLM(Qwen3Config(**QWEN3))
    randomise(language, 2)
    language.save_pretrained(tmp_path / "language")
    tokenizer().save_pretrained(str(tmp_path / "language"))
    done = eyeline("import", "out", "--vision", str(vision), "--language", "language", "--transplant", "--template", "qwen3")
    assert done.code == 0, done.err
    assert "Qwen3VLForConditionalGeneration" in done.out
    assert open_bundle(tmp_path / "out").bundle.config.family == "qwen3_vl"
    done = eyeline("import", "not", "--vision", str(vision), "--language", str(hub / "tied"), "--transplant")
    assert (done.code, "architecture needs a Qwen3" in done.err) == (2, True), done.err


def test_tiles_bring_their_marks(hub: Path, tmp_path: Path) -> None:
    """An image of twice the tower's side is shown whole and in four tiles, each after the token that says which it is."""
    import_model(hub / "siglip", hub / "tied", tmp_path / "model", tiles=5)
    opened = open_bundle(tmp_path / "model")
    assert opened.form == hf.llava.PARTS
    encoder, rule = opened.bundle.encoder(), spec(opened.bundle.config).image
    document = asked(opened.bundle, rule, tmp_path, size=2 * SIDE)
    assert len(document.images) == 10  # of two images
    text = encoder.decode(document.tokens_T.tolist(), special=True)
    tiles = "".join(f"<row_{r}_col_{c}>" + "<|image_pad|>" * 16 for r in (1, 2) for c in (1, 2))
    assert text.count("<|global_image|>" + "<|image_pad|>" * 16 + tiles) == 2
    assert our_logits(built(opened.bundle, seed=1), document).isfinite().all()
    assert mapping_of(opened.bundle.config).form(opened.bundle.config).name == "parts"


def test_a_run_needs_no_import(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(
        Refused, match=r"run is a run folder\. Use it as it is: train from it \(model\.path\), chat with it, or export it\."
    ):
        import_whole(tmp_path / "run", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---- folders of other kinds


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"}))
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return folder


ADAPTER = (
    r"is an adapter \(LORA\) for the model Qwen/Qwen2\.5-0\.5B-Instruct, not a model\. .* model\.adapter\. Or merge it .*merge_and_unload"
)


def test_an_adapter_is_named_with_what_to_do(hub: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter")
    for ask in (
        lambda: import_whole(folder, tmp_path / "out"),
        lambda: open_bundle(folder),
        lambda: import_model(hub / "siglip", folder, tmp_path / "out"),
        lambda: import_model(folder, hub / "tied", tmp_path / "out"),
    ):
        with pytest.raises(Refused, match=ADAPTER):
            ask()
    (folder / "config.json").write_text("{}")  # some trainers save the base's with it
    with pytest.raises(Refused, match=ADAPTER):
        import_whole(folder, tmp_path / "out")


def test_an_export_with_an_adapter_says_which_folder(tmp_path: Path) -> None:
    adapter(tmp_path / "exported" / "adapter")
    (tmp_path / "exported" / "base").mkdir()
    (tmp_path / "exported" / "base" / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"is an export with an adapter\. Give .*/exported/base"):
        open_bundle(tmp_path / "exported")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "quantised by GPTQ or AWQ to 4 bits"),
        ("quant_config.json", {"w_bit": 4, "zero_point": True}, "quantised by GPTQ or AWQ to 4 bits"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "quantised by ModelOpt"),
    ],
)
def test_quantisation_in_a_file_of_its_own_is_named(hub: Path, tmp_path: Path, name: str, content: dict, message: str) -> None:
    shutil.copytree(hub / "tied", tmp_path / "language")
    (tmp_path / "language" / name).write_text(json.dumps(content))
    with pytest.raises(Refused, match=message):
        import_whole(tmp_path / "language", tmp_path / "out")


def test_gguf_files_are_named(tmp_path: Path, eyeline: Command) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "x.Q4_K_M.gguf").write_bytes(b"GGUF")
    for command in (("import", "out", "--model", "model"), ("import", "out", "--model", "model/x.Q4_K_M.gguf"), ("export", "model", "out")):
        done = eyeline(*command)
        assert (done.code, "whose weights are mostly quantised" in done.err) == (2, True), done.err
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert "is a file; give the folder that it is in" in eyeline("import", "out", "--model", "weights.safetensors").err
