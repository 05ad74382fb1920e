"""Hugging Face's config files in and out; what would change the mathematics is refused by name."""

import pytest
import transformers

from eyeline.core.errors import Refused
from eyeline.models import hf, llava, qwen2, siglip2
from eyeline.models.hf import mapping_of
from eyeline.models.hf.forms import MediaTokens
from eyeline.models.hf.languages import LANGUAGES, language_from_hf
from tests.models.cases import each_case
from tests.models.cases.llava import CONFIGS, EVEN, TIED, VISION, config_json, language
from tests.models.parity import peer_of

QWEN25_05B = {  # the keys of the hub's Qwen2.5-0.5B-Instruct
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SIGLIP = {
    "model_type": "siglip",
    "text_config": {"model_type": "siglip_text_model"},
    "vision_config": {"model_type": "siglip_vision_model"},
}
PREPROCESSOR = {
    "image_processor_type": "SiglipImageProcessor",
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 224, "width": 224},
}


def test_qwen25_as_the_hub_has_it():
    want = qwen2.Config(
        vocab_size=151936, hidden_size=896, layers=24, heads=14, kv_heads=2, intermediate_size=4864, rope_theta=1e6, tie_embeddings=True
    )
    assert hf.qwen2.from_hf(QWEN25_05B) == want


def test_siglip2_base_as_the_hub_has_it():
    """Its vision_config leaves nearly all to the class's defaults, and its processor is bilinear."""
    want = siglip2.Config(image_size=224, patch=16, hidden_size=768, layers=12, heads=12, intermediate_size=3072, resample="bilinear")
    assert hf.siglip2.from_hf(SIGLIP, PREPROCESSOR) == want
    assert hf.siglip2.from_hf(SIGLIP, None).resample == "bicubic"


def test_absent_keys_mean_the_reference_classes_defaults():
    assert hf.qwen2.from_hf({"model_type": "qwen2"}) == hf.qwen2.from_hf(transformers.Qwen2Config().to_dict())
    record = transformers.SiglipVisionConfig().to_dict()
    assert hf.siglip2.from_hf({"model_type": "siglip_vision_model"}, None) == hf.siglip2.from_hf(record, None)
    processor = transformers.SiglipImageProcessorPil().to_dict()
    assert hf.siglip2.from_hf({"model_type": "siglip_vision_model"}, None) == hf.siglip2.from_hf(record, processor)


@pytest.mark.parametrize("case", CONFIGS)
def test_there_and_back(case):
    """Our config -> config.json -> transformers' record -> config.json -> our config."""
    c = CONFIGS[case]
    config = config_json(c)
    record = transformers.AutoConfig.for_model(**config)
    naflex = hf.llava.form(c).name == "lfm2_vl"
    preprocessor = hf.siglip2.to_preprocessor_naflex(c.vision) if naflex else hf.siglip2.to_preprocessor(c.vision)
    back = hf.llava.from_hf(record.to_dict(), preprocessor)
    want = (
        c
        if back.projector.hidden_size is None
        else c.model_copy(update={"projector": c.projector.model_copy(update={"hidden_size": c.hidden})})
    )
    assert back == want
    assert (
        hf.siglip2.from_hf(transformers.SiglipVisionConfig(**hf.siglip2.to_hf(c.vision)).to_dict(), hf.siglip2.to_preprocessor(c.vision))
        == c.vision
    )
    module = LANGUAGES[c.language.family]
    assert module.from_hf(transformers.AutoConfig.for_model(**module.to_hf(c.language)).to_dict()) == c.language


def test_head_width_of_its_own_is_kept():
    c = language(tie_embeddings=True, head_dim=8)
    assert hf.qwen2.from_hf(hf.qwen2.to_hf(c)) == c
    assert "head_dim" not in hf.qwen2.to_hf(language(tie_embeddings=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "Qwen3 model, which norms"),
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"attention_bias": False}, "attention_bias=False"),
        ({"use_sliding_window": True}, "use_sliding_window=True with a window of 32768"),
        ({"layer_types": ["full_attention"] * 23 + ["sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary positions in config.json has rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "have factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "896"}, "hidden_size='896'"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"num_key_value_heads": 3}, "does not describe a model: kv_heads=3 must divide heads=14"),
    ],
)
def test_qwen2_refusals(change, message):
    with pytest.raises(Refused, match=message):
        hf.qwen2.from_hf(QWEN25_05B | change)


def test_rope_theta_in_all_its_places():
    old = {k: v for k, v in QWEN25_05B.items() if k != "rope_theta"}
    assert hf.qwen2.from_hf(old | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5
    assert hf.qwen2.from_hf(old | {"rope_scaling": {"type": "default", "rope_theta": 5e5}}).rope_theta == 5e5
    assert hf.qwen2.from_hf(old | {"rope_scaling": None}).rope_theta == 1e4
    assert hf.qwen2.from_hf(QWEN25_05B | {"use_sliding_window": True, "max_window_layers": 24}), "no layer is that high"


@pytest.mark.parametrize(
    ("vision", "preprocessor", "message"),
    [
        ({"model_type": "siglip2_vision_model"}, {}, "model_type='siglip2_vision_model'"),
        ({"model_type": "clip_vision_model"}, {}, "model_type='clip_vision_model'"),
        ({"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
        ({"num_channels": 1}, {}, "num_channels=1"),
        ({"image_size": [224, 256]}, {}, r"image_size=\[224, 256\]"),
        ({"num_attention_heads": 7}, {}, "heads=7 must divide hidden_size=768"),
        ({}, {"size": {"height": 256, "width": 256}}, "size="),
        ({}, {"size": {"shortest_edge": 224}}, "size=.* limits for the size of an image, and this tower takes squares of 224 pixels"),
        ({}, {"size": {"shortest_edge": 3136, "longest_edge": 99_999}}, "limits for the size of an image"),
        ({}, {"min_pixels": 3136}, "min_pixels=3136: limits"),
        ({}, {"max_pixels": 99_999}, "max_pixels=99999: limits"),
        ({}, {"size": 256}, "size=256"),
        ({}, {"do_center_crop": True}, "do_center_crop=True"),
        ({}, {"do_rescale": False}, "do_rescale=False"),
        ({}, {"rescale_factor": 1.0}, "rescale_factor=1.0"),
        ({}, {"resample": 5}, "resample=5"),
        ({}, {"image_mean": [0.5]}, r"image_mean=\[0.5\]"),
        ({}, {"image_std": [0.5, 0.5, 0.0]}, "greater than 0"),
    ],
)
def test_siglip2_refusals(vision, preprocessor, message):
    config = SIGLIP | {"vision_config": SIGLIP["vision_config"] | vision}
    with pytest.raises(Refused, match=message):
        hf.siglip2.from_hf(config, PREPROCESSOR | preprocessor)


@pytest.mark.parametrize("size", [224, [224, 224]])
def test_a_size_as_older_files_have_it_is_taken(size):
    assert hf.siglip2.from_hf(SIGLIP, PREPROCESSOR | {"size": size}) == hf.siglip2.from_hf(SIGLIP, PREPROCESSOR)


QUANTISED = [
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantised by bitsandbytes to 4 bits"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantised by bitsandbytes to 8 bits"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, "quantised by GPTQ to 4 bits"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by AWQ to 4 bits"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantised by FP8, and"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantised by compressed-tensors"),
    ({"quantization_config": [1]}, "a method that it does not name"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantised by compressed-tensors"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "quantised by MLX to 4 bits"),
]


@pytest.mark.parametrize(("config", "message"), QUANTISED)
def test_a_quantised_checkpoint_is_refused_by_its_name(config, message):
    with pytest.raises(Refused, match=f"{message}.* Take the checkpoint that they were made from"):
        hf.siglip2.from_hf(SIGLIP | {"vision_config": SIGLIP["vision_config"] | config}, PREPROCESSOR)
    with pytest.raises(Refused, match=message):
        language_from_hf({"model_type": "llama", **config})


def test_an_empty_quantization_is_none():
    hf.siglip2.from_hf(
        SIGLIP | {"vision_config": SIGLIP["vision_config"] | {"quantization_config": None, "quantization": {}}}, PREPROCESSOR
    )


@pytest.mark.parametrize(
    ("vision", "preprocessor", "message"),
    [
        ({"num_patches": 200}, {}, "num_patches=200; wanted a square number"),
        ({}, {"patch_size": 14}, "patch_size=14"),
        ({}, {"max_num_patches": 0}, "max_num_patches=0"),
        ({"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
    ],
)
def test_naflex_refusals(vision, preprocessor, message):
    with pytest.raises(Refused, match=message):
        hf.siglip2.from_hf({"model_type": "siglip2_vision_model"} | vision, preprocessor)


def test_naflex_as_the_hub_has_it():
    """As google/siglip2-base-patch16-naflex: its vision_config leaves all to the class's defaults."""
    want = siglip2.Config(
        image_size=256, patch=16, hidden_size=768, layers=12, heads=12, intermediate_size=3072, resample="bilinear", patches=256
    )
    assert hf.siglip2.from_hf({"model_type": "siglip2", "vision_config": {"model_type": "siglip2_vision_model"}}, None) == want
    assert hf.siglip2.from_hf(transformers.Siglip2VisionConfig().to_dict(), transformers.Siglip2ImageProcessorPil().to_dict()) == want
    more = want.model_copy(update={"patches": 1024, "resample": "bicubic", "mean": (0.1, 0.2, 0.3)})
    record = transformers.Siglip2VisionConfig(**hf.siglip2.to_hf(more)).to_dict()
    assert hf.siglip2.from_hf(record, hf.siglip2.to_preprocessor(more)) == more


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "internvl"}, "model_type='internvl'"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act='relu'"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias=False"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy='default'"),
        ({"vision_feature_layer": [-2, -1]}, r"vision_feature_layer=\[-2, -1\]"),
        ({"vision_feature_layer": -9}, "not among the 4 hidden states"),
        ({"text_config": {"model_type": "gpt2"}}, "text_config of config.json has model_type='gpt2'"),
        ({"vision_config": None}, "has no vision_config"),
    ],
)
def test_llava_refusals(change, message):
    config = config_json(TIED)
    with pytest.raises(Refused, match=message):
        hf.llava.from_hf(config | change, hf.siglip2.to_preprocessor(VISION))


def test_omitted_select_strategy_is_the_one_that_drops_a_patch():
    config = config_json(TIED)
    del config["vision_feature_select_strategy"]
    with pytest.raises(Refused, match="vision_feature_select_strategy"):
        hf.llava.from_hf(config, hf.siglip2.to_preprocessor(VISION))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "lfm2_vl"),
        ({"feature_norm": False}, "llava"),
        ({"feature_norm": False, "feature_layer": -2}, "llava"),
        ({"feature_norm": False, "projector": {"hidden_size": 24}}, "llava"),
        ({"feature_norm": False, "projector": {"hidden_size": 20}}, "parts"),
        ({"feature_norm": False, "projector": {"shuffle": 2}}, "parts"),
        ({"feature_norm": False, "projector": {"norm": True}}, "parts"),
        ({"projector": {"shuffle": 2, "hidden_size": 20}}, "lfm2_vl"),
        ({"projector": {"shuffle": 2, "norm": True}}, "lfm2_vl"),
        ({"projector": {"kind": "linear"}}, "parts"),
        ({"vision": VISION.model_dump()}, "parts"),
    ],
)
def test_form_of_an_export(change, name):
    c = llava.Config(**({"vision": EVEN, "language": language(tie_embeddings=True)} | change))
    form = hf.llava.form(c)
    assert form.name == name
    assert len(form.reason) > 20


def test_no_internvl_form_while_its_class_ignores_the_tower():
    """When this fails, transformers reads SigLIP towers in InternVL folders, and `form` may offer them."""
    tower = hf.siglip2.to_hf(EVEN)
    record = transformers.AutoConfig.for_model("internvl", vision_config=tower, text_config=hf.qwen2.to_hf(language(tie_embeddings=True)))
    assert record.vision_config.__class__.__name__ == "InternVLVisionConfig"


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("case", ["tied", "shuffled untied"])
def test_tied_where_the_reference_ties(case, outer, inner):
    """Two keys say it; what counts is whether the reference's model then has one tensor or two."""
    c = CONFIGS[case]
    config = config_json(c)
    config["text_config"]["tie_word_embeddings"] = inner
    config["tie_word_embeddings"] = outer
    if outer is None:
        del config["tie_word_embeddings"]
    reference = peer_of(config | {"text_config": dict(config["text_config"])})
    tied = reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
    assert hf.llava.from_hf(config, None if c.vision is EVEN else hf.siglip2.to_preprocessor(c.vision)).language.tie_embeddings == tied


ODD = (None, [], {}, "x", "", -1, 0, 1.5, True, float("inf"), 10**18, [1], [[]], {"a": 1}, ["sliding_attention"])
ADDED = ("rope_scaling", "rope_parameters", "layer_types", "mlp_only_layers", "deepstack_visual_indexes", "num_local_experts")


def altered(files):
    """The files with one key, also of a section, holding something odd, or gone."""
    for name, content in files.items():
        sections = [((), content), *(((key,), value) for key, value in content.items() if isinstance(value, dict))]
        for path, section in sections:
            for key in (*section, *ADDED):
                for changed in (*({**section, key: odd} for odd in ODD), {k: v for k, v in section.items() if k != key}):
                    yield f"{name}: {'.'.join((*path, key))}", files | {name: {**content, path[0]: changed} if path else changed}


@each_case
def test_whatever_a_file_says_is_understood_or_refused(case):
    """Never an error of Python's, nor an endless list of layers."""
    mapping = mapping_of(case.config)
    form = mapping.form(case.config)
    if form.name == "parts":
        pytest.skip("has no config.json of its own")
    files = dict(mapping.to_hf(case.config, form, MediaTokens(1, "<image>", 2, 3, 4)))
    tried = 0
    for what, content in altered(files):
        try:
            mapping.from_hf(*(content.get(name) for name in ("config.json", "preprocessor_config.json", "video_preprocessor_config.json")))
        except Refused:
            tried += 1
        except Exception as error:
            raise AssertionError(what) from error
    assert tried > 100
