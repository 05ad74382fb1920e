"""What occurs twice: equal samples, equal images under several names, and what validation or evaluation shares with training.

Equal is exact: the same text in the same turns, the same bytes of every image. Only hashes are kept.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from eyeline.core.batch import EncodedImage, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.data.images.image_files import content_key, image_key

EXAMPLES = 5
Key = bytes  # a hash of 16 bytes


@dataclass(frozen=True)
class Overlap:
    """What a set of samples that a model is judged by shares with the samples that it learns from."""

    name: str  # of the set
    samples: int
    equal_samples: int  # of them, those that are in training, images and all
    equal_texts: int  # of them, those whose text is in training, whatever the images
    images: int  # different ones
    equal_images: int  # of them, those whose bytes are in training
    equal_paths: int  # of them, those that training reads from the same place
    examples: tuple[tuple[str, str], ...]  # an image, and its name in training


@dataclass(frozen=True)
class Twins:
    """What was found among the training samples that were compared."""

    whole: bool  # whether these are all that can be read
    samples: int
    equal_samples: int  # samples that equal an earlier one
    sample_examples: tuple[tuple[str, str], ...]  # ids of such a sample, and of the first that it equals
    images: int  # places that images were read from
    equal_images: int  # of them, those with the bytes of an earlier one
    image_examples: tuple[tuple[str, str], ...]
    overlaps: tuple[Overlap, ...]


@dataclass(eq=False)
class Known:
    """The samples of one set, as far as they were read."""

    samples: int = 0
    sample_examples: list[tuple[str, str]] = field(default_factory=list)
    first: dict[Key, str] = field(default_factory=dict)  # hash of a sample -> id of the first
    wholes: Counter[Key] = field(default_factory=Counter)  # how many there are of each
    texts: Counter[Key] = field(default_factory=Counter)  # and of each text
    places: dict[Key, Key] = field(default_factory=dict)  # hash of where an image lies -> hash of its bytes
    contents: dict[Key, str] = field(default_factory=dict)  # hash of bytes -> name of the first image with them
    equal_images: int = 0
    image_examples: list[tuple[str, str]] = field(default_factory=list)

    @property
    def equal_samples(self) -> int:
        """Those that equal an earlier one."""
        return self.samples - len(self.wholes)

    def add(self, sample: Sample) -> None:
        """Read and remember one. BadSample where an image's file cannot be read."""
        keys = [self._image(image, sample.id) for image in sample.images]
        text = _hash("\n".join(_said(sample)))
        whole = _hash(b"".join((text, *keys)))
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


def known(samples: Iterable[Sample]) -> Known:
    """All that can be read of some samples. What cannot is a reject, which others count."""
    out = Known()
    for sample in samples:
        try:
            out.add(sample)
        except BadSample:
            continue
    return out


def twins(training: Known, judges: dict[str, Known], whole: bool = True) -> Twins:
    """What the sets say about each other; `whole`: whether nothing was left out of the first."""
    return Twins(
        whole=whole,
        samples=training.samples,
        equal_samples=training.equal_samples,
        sample_examples=tuple(training.sample_examples),
        images=len(training.places),
        equal_images=training.equal_images,
        image_examples=tuple(training.image_examples),
        overlaps=tuple(_overlap(name, judge, training) for name, judge in judges.items()),
    )


def _overlap(name: str, judge: Known, training: Known) -> Overlap:
    shared = [key for key in judge.contents if key in training.contents]
    return Overlap(
        name=name,
        samples=judge.samples,
        equal_samples=sum(count for key, count in judge.wholes.items() if key in training.wholes),
        equal_texts=sum(count for key, count in judge.texts.items() if key in training.texts),
        images=len(judge.contents),
        equal_images=len(shared),
        equal_paths=sum(place in training.places for place in judge.places),
        examples=tuple((judge.contents[key], training.contents[key]) for key in shared[:EXAMPLES]),
    )


def _said(sample: Sample) -> Iterable[str]:
    """Who says what; where an image or video stands."""
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
