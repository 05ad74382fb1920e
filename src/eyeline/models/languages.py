"""The language models that a family may have: a module each, with one interface.

A module has `Config`, `Model(c, compute_dtype) -> Decoder`; what it states about itself, relative to the decoder: `blocks`, `linears`,
`splits`, `seams`, `experts` (functions of the config); and its folder of a `...ForCausalLM` class: `MODEL_TYPES`, `DROPPED`, `keys(c)`,
`from_hf(json, where)`, `to_hf(c)`.
"""

from eyeline.models import qwen2

LANGUAGES = {"qwen2": qwen2}
LanguageConfig = qwen2.Config
