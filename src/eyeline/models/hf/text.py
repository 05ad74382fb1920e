"""A language model alone in Hugging Face's form: the folder of its own `...ForCausalLM` class."""

from eyeline.core.key_rules import KeyRule, prefixed
from eyeline.models.hf.config_json import Json
from eyeline.models.hf.forms import NONE, Files, Form, MediaTokens, Shapes
from eyeline.models.hf.languages import LANGUAGES, language_from_hf
from eyeline.models.text import Config

MODEL_TYPES = tuple(kind for language in LANGUAGES.values() for kind in language.MODEL_TYPES)
PARTS = None


def form(_c: Config) -> Form:
    return Form("text", "a language model's own class")


def keys(c: Config, _form: Form, _found: Shapes = NONE) -> tuple[KeyRule, ...]:
    return prefixed(LANGUAGES[c.language.family].keys(c.language), "language.", "")


def dropped(c: Config, _form: Form) -> tuple[str, ...]:
    return LANGUAGES[c.language.family].DROPPED


def to_hf(c: Config, _form: Form, _tokens: MediaTokens) -> Files:
    return {"config.json": LANGUAGES[c.language.family].to_hf(c.language)}


def from_hf(config_json: Json, _preprocessor_json: Json | None, _video_json: Json | None = None) -> Config:
    return Config(language=language_from_hf(config_json))
