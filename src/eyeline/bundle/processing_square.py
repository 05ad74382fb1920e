"""Processes text and images for an LFM2-VL model that was trained on square images, as Eyeline processed them in training.

Transformers' own Lfm2VlProcessor keeps an image's shape and cuts tiles. This file goes along with an export and stands alone:
`AutoProcessor.from_pretrained(FOLDER, trust_remote_code=True)` runs it, in transformers 4.57 and 5.
"""

from collections.abc import Iterator
from typing import Any

from transformers import BatchFeature, ProcessorMixin
from transformers.image_utils import load_image


class SquareProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012  transformers 4 reads these three
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        image_token: str = "<image>",
        image_size: int = 224,
        tokens_per_image: int = 1,
    ):
        self.image_token, self.image_size, self.tokens_per_image = image_token, image_size, tokens_per_image
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        """`text` is one prompt or a list of them, each with one image token per image; `images` are in their order."""
        prompts = [text] if isinstance(text, str) else list(text)
        shown = [self._square(image) for image in _flat(images)]
        wanted = sum(prompt.count(self.image_token) for prompt in prompts)
        if wanted != len(shown):
            raise ValueError(f"the text has {wanted} {self.image_token}, and there are {len(shown)} images; one is needed per image.")
        filled = [prompt.replace(self.image_token, self.image_token * self.tokens_per_image) for prompt in prompts]
        options = {"padding": kwargs.get("padding", False), "padding_side": kwargs.get("padding_side")}
        tokens = self.tokenizer(filled, add_special_tokens=False, return_tensors=return_tensors, **options)  # the template has written them
        pixels = self.image_processor(shown, return_tensors=return_tensors) if shown else {}
        return BatchFeature({**tokens, **pixels})

    def _square(self, image: Any) -> Any:
        return load_image(image).convert("RGB").resize((self.image_size, self.image_size), self.image_processor.resample)


def _flat(images: Any) -> Iterator[Any]:
    """One image, a list of them, or a list per prompt."""
    if isinstance(images, list | tuple):
        for image in images:
            yield from _flat(image)
    elif images is not None:
        yield images
