"""Conversations -> prompts, with their pictures prepared."""

from collections.abc import Sequence

from eyeline.core.batch import Document, Image, Message, Picture, Sample
from eyeline.core.errors import BadSample
from eyeline.core.facts import ImageRule
from eyeline.data.documents import prompt_of
from eyeline.data.images import picture_key, prepare
from eyeline.data.tokenizer import Encoder

KEPT = 64  # pictures whose patches are kept: questions on one picture follow one another


class Prompts:
    """Makes prompts, and remembers the last pictures, so that many questions on one of them decode it once."""

    def __init__(self, encoder: Encoder, rule: ImageRule | None):
        self.encoder = encoder
        self.rule = rule
        self._images: dict[str, Image] = {}

    def prompt(self, asked: Sample | Sequence[Message]) -> Document:
        """The conversation up to where its last answer begins. BadSample where its text or a picture is unusable."""
        messages = asked.messages if isinstance(asked, Sample) else tuple(asked)
        if messages and messages[-1].role == "assistant":
            messages = messages[:-1]
        pictures = [part for message in messages for part in message.parts if isinstance(part, Picture)]
        return prompt_of(asked, self.encoder, [self._image(picture) for picture in pictures])

    def _image(self, picture: Picture) -> Image:
        if self.rule is None:
            raise BadSample("picture_without_tower", "image", f"{picture.name} is a picture, and this model reads text only")
        key = picture_key(picture)
        image = self._images.pop(key, None) or prepare(picture, self.rule)
        self._images[key] = image  # now the newest
        if len(self._images) > KEPT:
            del self._images[next(iter(self._images))]
        return image
