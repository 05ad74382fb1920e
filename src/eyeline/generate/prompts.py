"""Conversations -> prompts, with their images and videos decoded."""

from collections.abc import Callable, Sequence

from eyeline.core.batch import Document, EncodedImage, Image, Message, Sample, Text, Video
from eyeline.core.errors import BadSample
from eyeline.core.image_rule import ImageRule
from eyeline.core.recent import Recent
from eyeline.data.images.image_files import media_key
from eyeline.data.images.patches import image_patches
from eyeline.data.text.documents import prompt_of
from eyeline.data.text.tokenizer import Encoder

KEPT = 64  # images and videos whose patches are kept: questions on one image follow one another


class Prompts:
    """Makes prompts, and remembers the last images and videos, so that many questions on one of them decode it once. `images_of`: the
    images that a media item becomes, if not those of its pixels."""

    def __init__(
        self,
        encoder: Encoder,
        rule: ImageRule | None,
        images_of: Callable[[EncodedImage | Video, ImageRule], tuple[Image, ...]] | None = None,
    ):
        self.encoder = encoder
        self.rule = rule
        self._made = images_of or image_patches
        self._images = Recent[str, tuple[Image, ...]]()

    def prompt(self, asked: Sample | Sequence[Message]) -> Document:
        """The conversation up to where its last answer begins. BadSample where its text or an image is unusable."""
        messages = asked.messages if isinstance(asked, Sample) else tuple(asked)
        if messages and messages[-1].role == "assistant":
            messages = messages[:-1]
        media = [part for message in messages for part in message.parts if not isinstance(part, Text)]
        return prompt_of(asked, self.encoder, self.rule, [self._images_of(item) for item in media])

    def _images_of(self, item: EncodedImage | Video) -> tuple[Image, ...]:
        if self.rule is None:
            what = "image" if isinstance(item, EncodedImage) else "video"
            raise BadSample("image_without_tower", "image", f"{item.name} is a {what}, and this model reads text only")
        key = media_key(item)
        return self._images.get(key) or self._images.keep(key, self._made(item, self.rule), KEPT)
