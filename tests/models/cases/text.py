"""Language models alone, by their own classes."""

from eyeline.models import qwen2, text
from eyeline.models.forms import MediaTokens
from tests.models.twins import IMAGE_TOKEN, VOCABULARY, Case, texts, token_inputs, twin_of

QWEN2 = qwen2.Config(
    vocabulary=VOCABULARY, width=24, layers=2, heads=4, kv_heads=2, head_dim=8, feed_forward=40, eps=1e-3, rope_theta=100.0, tied=True
)
CONFIGS = {"qwen2 tied": QWEN2, "qwen2 untied": QWEN2.model_copy(update={"tied": False})}


def case(id: str, c: text.Config) -> Case:
    form = text.form(c)
    files = text.to_hf(c, form, MediaTokens(IMAGE_TOKEN, "<|image_pad|>"))
    return Case(id, c, lambda: twin_of(files["config.json"]), token_inputs, text.keys(c, form), texts())


CASES = [case(id, text.Config(language=c)) for id, c in CONFIGS.items()]
