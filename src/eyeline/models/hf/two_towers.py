"""SigLIP's two towers in Hugging Face's form: tensors and config.json of `SiglipModel` and, for NaFlex, of `Siglip2Model`."""

from eyeline.core.errors import Refused
from eyeline.core.key_rules import KeyRule, prefixed
from eyeline.models.hf import siglip2
from eyeline.models.hf.config_json import LAYERS, Json, expect, integer, number, record_of, refuse_quantised, section
from eyeline.models.two_towers import Config, TextConfig

_POOL = {"qkv": "attention.in_proj_", "o": "attention.out_proj.", "norm": "layernorm.", "mlp.up": "mlp.fc1.", "mlp.down": "mlp.fc2."}
_BLOCK = {rule.ours: rule.theirs for rule in siglip2.KEYS if isinstance(rule.ours, str) and rule.ours.startswith("blocks.")}
_TEXT = (
    KeyRule("text.embed.weight", "text_model.embeddings.token_embedding.weight"),
    KeyRule("text.positions.weight", "text_model.embeddings.position_embedding.weight"),
    *(KeyRule(f"text.{ours}", f"text_model.{theirs}") for ours, theirs in _BLOCK.items()),
    *(KeyRule(f"text.norm.{leaf}", f"text_model.final_layer_norm.{leaf}") for leaf in ("weight", "bias")),
    *(KeyRule(f"text.head.{leaf}", f"text_model.head.{leaf}") for leaf in ("weight", "bias")),
)
_HEAD = (
    KeyRule("pool.probe_11D", "vision_model.head.probe"),
    *(KeyRule(f"pool.{ours}.{leaf}", f"vision_model.head.{theirs}{leaf}") for ours, theirs in _POOL.items() for leaf in ("weight", "bias")),
)
DROPPED = ("logit_scale", "logit_bias", "*_model.embeddings.position_ids")


def keys(c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of the class that computes what this config does."""
    return (*prefixed(siglip2.keys(c.vision), "vision.", siglip2.HUB_PREFIX), *_HEAD, *_TEXT)


def from_hf(config_json: Json, preprocessor_json: Json | None) -> Config:
    """The towers described by config.json and preprocessor_config.json of a SigLIP or SigLIP 2 folder. Raises Refused."""
    kind = config_json.get("model_type")
    if kind not in ("siglip", "siglip2"):
        raise Refused(
            f"config.json has model_type={kind!r}; wanted a checkpoint with an image and a text tower: siglip or siglip2, such as "
            "google/siglip2-base-patch16-224"
        )
    where, text = "text_config of config.json", section("config.json", config_json, "text_config")
    refuse_quantised(where, text)
    expect(where, text, siglip2.ACTIVATION | {"attention_dropout": 0.0})
    width = integer(where, text, "hidden_size", 768)
    found = {
        "vocab_size": integer(where, text, "vocab_size", 32_000),
        "max_positions": integer(where, text, "max_position_embeddings", 64),
        "hidden_size": width,
        "layers": integer(where, text, "num_hidden_layers", 12, LAYERS),
        "heads": integer(where, text, "num_attention_heads", 12),
        "intermediate_size": integer(where, text, "intermediate_size", 3072),
        "embedding_size": integer(where, {k: v for k, v in text.items() if v is not None}, "projection_size", width),
        "eps": number(where, text, "layer_norm_eps", 1e-6),
    }
    vision = siglip2.from_hf(config_json, preprocessor_json)
    lower_case = kind == "siglip2"  # as `Siglip2Tokenizer` does, whatever tokenizer.json says
    return record_of("config.json", Config, {"vision": vision, "text": record_of(where, TextConfig, found), "lower_case": lower_case})
