"""What we write, transformers and peft load with their own classes, and compute the same from; what we read back is the same."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    Lfm2VlForConditionalGeneration,
    LlavaForConditionalGeneration,
    Qwen2ForCausalLM,
    SiglipImageProcessorPil,
    SiglipVisionModel,
)

from eyeline.bundle.bundle import Bundle, describe, open_bundle, read_description
from eyeline.bundle.exporting import export, weights
from eyeline.bundle.fill import load
from eyeline.bundle.importing import import_model
from eyeline.core.batch import Document
from eyeline.core.errors import Refused
from eyeline.models import hf, llava
from eyeline.models.lora import LoRA, LoRALinear
from tests.bundle.tiny import CONVERSATION, FORMS, asked, built, drawing, imported, our_logits, save_language, save_vision
from tests.planned import adapt

TOWERS = [("llava", "", "vision_tower."), ("lfm2_vl", "", "model.vision_tower."), ("parts", "vision", "")]
SIZE = 40  # pixels of the images that are asked about: another size than the tower's, so that they are resized
SETTINGS = [(form, tied) for form in FORMS for tied in (True, False)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Bundle]:
    """Bundles of every form, tied and untied."""
    return {(form, tied): imported(tmp_path_factory.mktemp(f"{form}-{tied}"), form, tied)[1] for form, tied in SETTINGS}


def close(got: Tensor, want: Tensor) -> None:
    error = float((got - want).abs().max() / want.abs().max())
    assert error < 2e-5, f"off by {error:.1e} of the largest logit"


@torch.no_grad()
def their_logits(folder: Path, form: str, bundle: Bundle, document: Document, model: nn.Module | None = None) -> Tensor:
    """The same question, as a user of the exported folder asks it."""
    drawings = [drawing(0, SIZE), drawing(1, SIZE)]
    match form:
        case "llava":
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
            text = processor.apply_chat_template(CONVERSATION, add_generation_prompt=True)
            inputs = processor(text=text, images=drawings, return_tensors="pt")
            assert inputs["input_ids"][0].tolist() == document.tokens_T.tolist(), "processor and loader differ"
            model = model or LlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
            return model.eval()(**inputs).logits[0]
        case "lfm2_vl":
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
            text = processor.apply_chat_template(CONVERSATION, add_generation_prompt=True)
            inputs = processor(text=text, images=drawings, return_tensors="pt")
            assert inputs["input_ids"][0].tolist() == document.tokens_T.tolist(), "processor and loader differ"
            model = model or Lfm2VlForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
            return model.eval()(**inputs).logits[0]
        case _:
            prepared = SiglipImageProcessorPil.from_pretrained(folder / "vision")(drawings, return_tensors="pt")
            tower, language = SiglipVisionModel.from_pretrained(folder / "vision"), Qwen2ForCausalLM.from_pretrained(folder / "language")
            features = tower.eval()(**prepared).last_hidden_state
            projector = load_file(folder / "projector.safetensors")
            assert projector.keys() == {"out.weight", "out.bias"}
            visual = nn.functional.linear(features, projector["out.weight"], projector["out.bias"]).flatten(0, 1)
            tokens = torch.tensor(document.tokens_T, dtype=torch.int64)
            embedded = language.get_input_embeddings()(tokens)
            embedded[tokens == bundle.encoder().image_token] = visual
            return language.eval()(inputs_embeds=embedded[None]).logits[0]


def compare(folder: Path, form: str, bundle: Bundle, model: llava.Model, scratch: Path, their_model: nn.Module | None = None) -> None:
    document = asked(bundle, llava.spec(bundle.config).image, scratch, SIZE)
    close(their_logits(folder, form, bundle, document, their_model), our_logits(model, document))


@pytest.mark.parametrize(("form", "tied"), SETTINGS)
def test_transformers_computes_the_same_and_exports_are_stable(made: dict, tmp_path: Path, form: str, tied: bool) -> None:
    bundle = made[form, tied]
    model = built(bundle, seed=3)
    assert export(bundle, model, tmp_path / "one") == form
    compare(tmp_path / "one", form, bundle, model, tmp_path)

    opened = open_bundle(tmp_path / "one")
    assert opened.form is not None
    assert opened.form.name == form
    assert opened.bundle.config == bundle.config
    assert opened.bundle.template == bundle.template
    again = load(opened, "cpu").model
    assert (again.language.head.weight is again.language.embed.weight) is tied
    export(opened.bundle, again, tmp_path / "two")
    files = {p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file()}
    assert files == {p.relative_to(tmp_path / "two") for p in (tmp_path / "two").rglob("*") if p.is_file()}
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


@pytest.mark.parametrize("tied", [True, False])
def test_exported_parts_are_imported_again_byte_for_byte(made: dict, tmp_path: Path, tied: bool) -> None:
    bundle = made["parts", tied]
    export(bundle, built(bundle, seed=3), tmp_path / "one", max_shard_bytes=10_000)
    one = tmp_path / "one"
    import_model(one / "vision", one / "language", tmp_path / "two", **FORMS["parts"], max_shard_bytes=10_000)
    for part in ("vision", "language"):
        shards = sorted(p.name for p in (one / part).glob("model*"))
        assert len(shards) > 3
        assert shards == sorted(p.name for p in (tmp_path / "two" / part).glob("model*"))
        for file in shards:
            assert (one / part / file).read_bytes() == (tmp_path / "two" / part / file).read_bytes(), file


@pytest.mark.parametrize("form", FORMS)
def test_tied_weights_are_written_once_and_untied_ones_twice(made: dict, tmp_path: Path, form: str) -> None:
    for tied in (True, False):
        folder = tmp_path / str(tied)
        export(made[form, tied], built(made[form, tied], seed=3), folder)
        names = load_file((folder / "language" if form == "parts" else folder) / "model.safetensors")
        assert sum(name.endswith("embed_tokens.weight") for name in names) == 1
        assert sum(name.endswith("lm_head.weight") for name in names) == (0 if tied else 1)


def test_what_goes_along(made: dict, tmp_path: Path) -> None:
    bundle = made["llava", True]
    export(bundle, built(bundle, seed=3), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == bundle.tokenizer.chat_template
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == bundle.encoder().image_token
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == list(bundle.encoder().stop_ids)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation.eos_token_id
    images = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert (images["size"], images["resample"]) == ({"height": 16, "width": 16}, 2)
    assert (images["image_mean"], images["image_std"]) == ([0.5, 0.4, 0.6], [0.5, 0.3, 0.25])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]["vocab_size"] == 384


def test_tokenizer_config_holds_nothing_of_how_it_was_loaded(tmp_path: Path) -> None:
    """Nor what a published file says of it; what text becomes, and which tokens are special, stays."""
    imported(tmp_path, "llava")
    source = tmp_path / "hub-language" / "tokenizer_config.json"
    loading = {"name_or_path": "/home/me/secret", "special_tokens_map_file": "/root/x", "local_files_only": True, "auto_map": {"a": "b"}}
    named = {"extra_special_tokens": {"image_token": "<|image_pad|>"}, "padding_side": "left"}
    before = json.loads(source.read_text())
    named["additional_special_tokens"] = before["extra_special_tokens"]
    source.write_text(json.dumps(before | loading | named | {"processor_class": "OtherProcessor"}))
    bundle = import_model(tmp_path / "hub-vision", tmp_path / "hub-language", tmp_path / "m", **FORMS["llava"])
    export(bundle, built(bundle, seed=3), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    kept = {"additional_special_tokens", "clean_up_tokenization_spaces", "eos_token", "extra_special_tokens", "image_token"}
    assert written.keys() == kept | {"model_input_names", "model_max_length", "pad_token", "padding_side", "tokenizer_class"}
    assert (written["tokenizer_class"], written["padding_side"]) == ("PreTrainedTokenizerFast", "left")
    assert written["extra_special_tokens"] == {"image_token": "<|image_pad|>"}
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.image_token, sorted(theirs.all_special_tokens)) == ("<|image_pad|>", sorted(bundle.tokenizer.all_special_tokens))


def test_generation_config_survives_import_training_and_export(tmp_path: Path) -> None:
    imported(tmp_path, "llava")
    language = tmp_path / "hub-language"
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 17, "top_p": 0.85, "repetition_penalty": 1.1, "bos_token_id": 3}
    ids = json.loads((tmp_path / "model" / "language" / "generation_config.json").read_text())
    published = sampling | {"eos_token_id": [7, *ids["eos_token_id"]], "pad_token_id": 5, "transformers_version": "4.37.0"}
    (language / "generation_config.json").write_text(json.dumps(published))
    import_model(tmp_path / "hub-vision", language, tmp_path / "m", **FORMS["llava"])
    bundle = open_bundle(tmp_path / "m").bundle
    describe(bundle, tmp_path / "run" / "model")  # what a run keeps
    bundle = read_description(tmp_path / "run" / "model")
    export(bundle, built(bundle, seed=3), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == sampling | {"eos_token_id": [7, *ids["eos_token_id"]], "pad_token_id": ids["pad_token_id"]}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == written["eos_token_id"]
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6
    (language / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(Refused, match=r"generation_config.json has eos_token_id=\['x'\]; wanted a token's id, or a list of them"):
        import_model(tmp_path / "hub-vision", language, tmp_path / "n", **FORMS["llava"])


def test_an_export_in_bf16_rounds_each_weight_once(made: dict, tmp_path: Path) -> None:
    bundle = made["llava", True]
    model = built(bundle, seed=3)
    export(bundle, model, tmp_path / "out", dtype="bf16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {torch.bfloat16}
    assert torch.equal(stored["language_model.model.norm.weight"], model.language.norm.weight.detach().bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert LlavaForConditionalGeneration.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


# ---- adapters


def adapted(bundle: Bundle, **variant: bool) -> llava.Model:
    model, spec, rng = built(bundle, seed=3), llava.spec(bundle.config), torch.Generator().manual_seed(4)
    adapt(model, spec, "language", LoRA(rank=3, alpha=6, targets=("q_proj", "v_proj", "down_proj"), **variant), rng)
    adapt(model, spec, "vision", LoRA(rank=2, alpha=5, targets="all-linear"), rng)
    adapt(model, spec, "projector", LoRA(rank=2, alpha=2, targets=("up_proj",)), rng) if bundle.config.projector.norm else None
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=rng) * 0.3)
            if name.endswith("lora_magnitude"):
                p.mul_(torch.linspace(0.6, 1.4, len(p)))
    return model


@pytest.mark.parametrize("variant", [{"rslora": True}, {"dora": True}, {"rslora": True, "dora": True}], ids=str)
def test_peft_loads_dora_and_rslora_adapters(made: dict, tmp_path: Path, variant: dict[str, bool]) -> None:
    """With an adapter of the tower that is plain LoRA: of what peft has one setting for, each layer computes what it did."""
    bundle = made["llava", True]
    model = adapted(bundle, **variant)
    export(bundle, model, tmp_path / "out", adapter=True)
    settings = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert settings["use_dora"] is variant.get("dora", False)
    base = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out" / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
    compare(tmp_path / "out" / "base", "llava", bundle, model, tmp_path, theirs)
    export(bundle, model, tmp_path / "merged")
    compare(tmp_path / "merged", "llava", bundle, model, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_export_merges_adapters_and_keeps_them_on_the_model(made: dict, tmp_path: Path, form: str) -> None:
    bundle = made[form, True]
    model = adapted(bundle)
    before = {name: x.clone() for name, x in model.named_parameters()}
    trains = {name: x.requires_grad for name, x in model.named_parameters()}
    export(bundle, model, tmp_path / "out")
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], x) and after[name].requires_grad == trains[name] for name, x in before.items())
    compare(tmp_path / "out", form, bundle, model, tmp_path)
    written = dict(weights(model, True, torch.float32))
    assert written.keys() == dict(built(bundle).named_parameters()).keys()
    for name, x in written.items():
        layer = model.get_submodule(name.rpartition(".")[0])
        update = layer.scale * (layer.lora_B @ layer.lora_A) if isinstance(layer, LoRALinear) and name.endswith(".weight") else 0
        assert torch.equal(x, layer.get_parameter(name.rpartition(".")[2]) + update), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", ["llava", "lfm2_vl"])
def test_peft_loads_the_adapter_on_the_exported_base(made: dict, tmp_path: Path, form: str, tied: bool) -> None:
    bundle = made[form, tied]
    model = adapted(bundle)
    export(bundle, model, tmp_path / "out", adapter=True)
    cls = LlavaForConditionalGeneration if form == "llava" else Lfm2VlForConditionalGeneration
    base = cls.from_pretrained(tmp_path / "out" / "base", attn_implementation="eager")
    document = asked(bundle, llava.spec(bundle.config).image, tmp_path, SIZE)
    plain = their_logits(tmp_path / "out" / "base", form, bundle, document, base)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
    compare(tmp_path / "out" / "base", form, bundle, model, tmp_path, theirs)
    assert (plain - our_logits(model, document)).abs().max() > 0.1, "the adapters do nothing: this test shows nothing"
    layers = [name for name, module in theirs.named_modules() if hasattr(module, "lora_A")]
    ours = [name for name, _ in model.named_parameters() if name.endswith("lora_A") and not name.startswith("projector.")]
    assert len(layers) == len(ours)
    stored = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert not [name for name in stored if "projector" in name and "lora" in name], "a module cannot be adapted and saved"


@pytest.mark.parametrize("form", ["llava", "lfm2_vl"])
def test_a_projector_that_was_not_trained_is_not_in_the_adapter(made: dict, tmp_path: Path, form: str) -> None:
    """vLLM refuses an adapter with `modules_to_save`. LoRA of such a projector is LoRA in the adapter too."""
    bundle = made[form, True]
    model = adapted(bundle)
    export(bundle, model, tmp_path / "out", adapter=True, trained=())
    assert json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())["modules_to_save"] is None
    stored = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in stored)
    assert any("multi_modal_projector" in name for name in stored) is (form == "lfm2_vl")
    cls = LlavaForConditionalGeneration if form == "llava" else Lfm2VlForConditionalGeneration
    base = cls.from_pretrained(tmp_path / "out" / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
    compare(tmp_path / "out" / "base", form, bundle, model, tmp_path, theirs)


def test_parts_in_the_base_only_are_named(made: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = made["llava", True]
    export(bundle, adapted(bundle), tmp_path / "one", adapter=True, trained=("projector",))
    assert "also trained in full" not in capsys.readouterr().out
    export(bundle, adapted(bundle), tmp_path / "two", adapter=True, trained=("vision", "projector"))
    assert f"also trained in full: vision. Load the adapter on {tmp_path / 'two' / 'base'}" in capsys.readouterr().out


def test_the_adapters_projector_is_the_one_that_counts(made: dict, tmp_path: Path) -> None:
    bundle = made["llava", True]
    model = adapted(bundle)
    export(bundle, model, tmp_path / "out", adapter=True)
    base = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out" / "base", attn_implementation="eager")
    with torch.no_grad():  # as in the base that training began with
        for p in base.model.multi_modal_projector.parameters():
            p.zero_()
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
    compare(tmp_path / "out" / "base", "llava", bundle, model, tmp_path, theirs)
    # it is saved with the adapter again
    assert isinstance(
        theirs.base_model.model.model.multi_modal_projector.linear_1, ModulesToSaveWrapper
    )  # it is saved with the adapter again


def test_an_adapter_that_is_not_there_or_cannot_be_taken_is_refused(made: dict, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no layer has an adapter that can be written"):
        export(made["llava", True], built(made["llava", True], seed=3), tmp_path / "out", adapter=True)
    with pytest.raises(Refused, match="one class of transformers"):
        export(made["parts", True], adapted(made["parts", True]), tmp_path / "out", adapter=True)
    with pytest.raises(Refused, match="it was asked for"):
        export(made["llava", True], adapted(made["llava", True]), tmp_path / "out", adapter=True, form="parts")
    assert list(tmp_path.iterdir()) == []


# ---- targets


def test_nothing_is_written_over(made: dict, tmp_path: Path) -> None:
    bundle = made["llava", True]
    model = built(bundle, seed=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link"):
        with pytest.raises(Refused, match="exists already and is not an empty folder"):
            export(bundle, model, tmp_path / name)
    (tmp_path / "empty").mkdir()
    export(bundle, model, tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full", "link"]


def test_a_failure_in_the_middle_leaves_nothing(made: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(hf.llava, "to_hf", broken)
    with pytest.raises(RuntimeError, match="in the middle"):
        export(made["llava", True], built(made["llava", True], seed=3), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_parts_can_be_asked_for(made: dict, tmp_path: Path) -> None:
    bundle = made["lfm2_vl", True]
    assert export(bundle, built(bundle, seed=3), tmp_path / "out", form="parts") == "parts"
    assert open_bundle(tmp_path / "out").form == hf.llava.PARTS


def test_a_folder_of_transformers_own_making_is_opened(made: dict, tmp_path: Path) -> None:
    """As `save_pretrained` writes it, in any dtype, with whatever else it puts there."""
    bundle = made["llava", False]
    model = built(bundle, seed=3)
    export(bundle, model, tmp_path / "ours")
    LlavaForConditionalGeneration.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    AutoProcessor.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    opened = open_bundle(tmp_path / "theirs")
    assert opened.bundle.config == bundle.config
    again = load(opened, "cpu").model
    assert all(torch.equal(x, dict(model.named_parameters())[name]) for name, x in again.named_parameters())


@pytest.mark.parametrize(("form", "place", "prefix"), TOWERS)
def test_tower_names_of_hub_and_transformers_5_are_read(made: dict, tmp_path: Path, form: str, place: str, prefix: str) -> None:
    """The hub's names are the ones that transformers 4 reads too: with others it starts the tower at random, behind a warning."""
    bundle = made[form, True]
    model = built(bundle, seed=3)
    export(bundle, model, tmp_path / "out")
    file = tmp_path / "out" / place / "model.safetensors"
    hub = load_file(file)
    assert f"{prefix}vision_model.embeddings.patch_embedding.weight" in hub
    short = {name.replace("vision_model.", ""): x for name, x in hub.items()}
    for names, head in ((hub, "vision_model.head.probe"), (short, "head.probe")):
        save_file(names | {prefix + head: torch.zeros(1)}, file)
        again = load(open_bundle(tmp_path / "out"), "cpu").model
        assert all(torch.equal(x, dict(model.named_parameters())[name]) for name, x in again.named_parameters())


def test_vocabulary_grows_with_the_tokenizer(tmp_path: Path) -> None:
    from tests.bundle.tiny import TEMPLATES, tokenizer, without_image_token

    small = tokenizer(without_image_token(TEMPLATES["qwen2.5"]), vocabulary=290)
    language = save_language(tmp_path / "l", rows=len(small), tok=small)
    bundle = import_model(save_vision(tmp_path / "v"), language, tmp_path / "m", template="qwen2.5", feature_norm=False)
    opened = open_bundle(tmp_path / "m")
    model = load(opened, "cpu").model
    assert len(model.language.embed.weight) == 320  # 291 tokens, a multiple of 64
    export(opened.bundle, model, tmp_path / "out")
    compare(tmp_path / "out", "llava", bundle, model, tmp_path)


def test_an_export_whose_image_token_is_another_ones_is_refused(made: dict, tmp_path: Path) -> None:
    bundle = made["llava", True]
    export(bundle, built(bundle, seed=3), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"image_token_index": 7}))
    with pytest.raises(Refused, match=rf"has image_token_index 7, and the template 'qwen2\.5' writes {bundle.encoder().image_token}"):
        open_bundle(tmp_path / "out")


def test_a_tied_export_may_hold_its_head_too_if_it_is_the_same(made: dict, tmp_path: Path) -> None:
    bundle = made["llava", True]
    export(bundle, built(bundle, seed=3), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    embedding = stored["language_model.model.embed_tokens.weight"]
    save_file(stored | {"language_model.lm_head.weight": embedding.clone()}, file)
    again = load(open_bundle(tmp_path / "out"), "cpu").model
    assert torch.equal(again.language.head.weight, embedding)
    save_file(stored | {"language_model.lm_head.weight": embedding + 1}, file)
    with pytest.raises(Refused, match="with different values"):
        load(open_bundle(tmp_path / "out"), "cpu")
