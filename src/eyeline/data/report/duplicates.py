"""Duplicates: equal samples, equal images under several names, and what validation or evaluation shares with training.

Equal is exact: the same text in the same turns, the same bytes of every image. Only hashes are kept.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eyeline.core.batch import EncodedImage, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.data.images.image_files import content_key, image_key

EXAMPLES = 5
Key = bytes  # a hash of 16 bytes


@dataclass(frozen=True)
class Overlap:
    """What a validation or evaluation set shares with the training samples."""

    name: str  # of the set
    samples: int
    equal_samples: int  # of them, those that are in training, images and all
    equal_texts: int  # of them, those whose text is in training, whatever the images
    images: int  # different ones
    equal_images: int  # of them, those whose bytes are in training
    equal_paths: int  # of them, those that training reads from the same place
    examples: tuple[tuple[str, str], ...]  # an image, and its name in training


@dataclass(frozen=True)
class Duplicates:
    """Duplicates among the training samples that were compared, and what other sets share with them."""

    whole: bool  # whether these are all that can be read
    samples: int
    equal_samples: int  # samples that equal an earlier one
    sample_examples: tuple[tuple[str, str], ...]  # ids of such a sample, and of the first that it equals
    images: int  # places that images were read from
    equal_images: int  # of them, those with the bytes of an earlier one
    image_examples: tuple[tuple[str, str], ...]
    overlaps: tuple[Overlap, ...]


@dataclass(eq=False)
class SampleHashes:
    """Hashes of the samples of one set, as far as they were read."""

    samples: int = 0
    sample_examples: list[tuple[str, str]] = field(default_factory=list)
    first: dict[Key, str] = field(default_factory=dict)  # hash of a sample -> id of the first
    wholes: Counter[Key] = field(default_factory=Counter)  # how many there are of each
    texts: Counter[Key] = field(default_factory=Counter)  # and of each text
    places: dict[Key, Key] = field(default_factory=dict)  # hash of the location of an image -> hash of its bytes
    contents: dict[Key, str] = field(default_factory=dict)  # hash of bytes -> name of the first image with them
    equal_images: int = 0
    image_examples: list[tuple[str, str]] = field(default_factory=list)

    @property
    def equal_samples(self) -> int:
        """The number of samples that equal an earlier one."""
        return self.samples - len(self.wholes)

    def add(self, sample: Sample) -> None:
        """Hash one sample. BadSample where an image cannot be read."""
        keys = [self._image(image, sample.id) for image in sample.images]
        text = _hash("\n".join(_text_of(sample)))
        whole = whole_key(text, keys)
        self.samples += 1
        self.texts[text] += 1
        self.wholes[whole] += 1
        if self.wholes[whole] == 1:
            self.first[whole] = sample.id
        else:
            _keep(self.sample_examples, (sample.id, self.first[whole]))

    def _image(self, image: EncodedImage, id: str) -> Key:
        inside = isinstance(image.source, bytes)  # of a row: its place is the row
        place = _hash(f"{id} {image.name}" if inside else image_key(image))
        if place in self.places:
            return self.places[place]
        content = _hash(content_key(image))
        self.places[place] = content
        name = f"{image.name} of {id}" if inside else image.name
        if content in self.contents:
            self.equal_images += 1
            _keep(self.image_examples, (name, self.contents[content]))
        else:
            self.contents[content] = name
        return content


def hashes_of(samples: Iterable[Sample]) -> SampleHashes:
    """The hashes of some samples. Those that cannot be read are rejects, which are counted elsewhere."""
    out = SampleHashes()
    for sample in samples:
        try:
            out.add(sample)
        except BadSample:
            continue
    return out


def duplicates(training: SampleHashes, others: dict[str, SampleHashes], whole: bool = True) -> Duplicates:
    """Compare the sets; `whole` says that `training` is complete."""
    return Duplicates(
        whole=whole,
        samples=training.samples,
        equal_samples=training.equal_samples,
        sample_examples=tuple(training.sample_examples),
        images=len(training.places),
        equal_images=training.equal_images,
        image_examples=tuple(training.image_examples),
        overlaps=tuple(_overlap(name, other, training) for name, other in others.items()),
    )


def _overlap(name: str, other: SampleHashes, training: SampleHashes) -> Overlap:
    shared = [key for key in other.contents if key in training.contents]
    return Overlap(
        name=name,
        samples=other.samples,
        equal_samples=sum(count for key, count in other.wholes.items() if key in training.wholes),
        equal_texts=sum(count for key, count in other.texts.items() if key in training.texts),
        images=len(other.contents),
        equal_images=len(shared),
        equal_paths=sum(place in training.places for place in other.places),
        examples=tuple((other.contents[key], training.contents[key]) for key in shared[:EXAMPLES]),
    )


def whole_key(text: Key, images: Sequence[Key]) -> Key:
    """Equal for equal samples; from the hashes of the text and of each image's bytes."""
    return _hash(b"".join((text, *images)))


def sample_key(sample: Sample, contents: Sequence[str]) -> Key:
    """The same, from the sample and `content_key` of each of its images."""
    return whole_key(_hash("\n".join(_text_of(sample))), [_hash(content) for content in contents])


def _text_of(sample: Sample) -> Iterable[str]:
    """Role and text of every turn, with the type of each image or video in its place."""
    for message in sample.messages:
        yield message.role
        for part in message.parts:
            yield repr(part.text) if isinstance(part, Text) else type(part).__name__


def _keep(examples: list[tuple[str, str]], pair: tuple[str, str]) -> None:
    if len(examples) < EXAMPLES:
        examples.append(pair)


def _hash(value: str | bytes) -> Key:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return hashlib.blake2b(data, digest_size=16).digest()
