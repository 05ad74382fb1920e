"""Decoded images -> resized -> augmented -> patches, as the model's `ImageRule` states it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from eyeline.core.batch import EncodedImage, Image, Ints, Video
from eyeline.core.image_rule import ImageRule, Unit
from eyeline.core.settings import NotNegative, Settings
from eyeline.data.images.decode import Size, same_size, size_of, upright
from eyeline.data.images.image_files import media_key

Planes = tuple[NDArray[np.uint8], ...]  # red, green and blue: rows × columns each. A patch has its colours one after another
Room = Callable[[int], NDArray[np.uint8] | None]  # rows for a number of patches; None: there are none

_RESAMPLE = {
    "nearest": Pillow.Resampling.NEAREST,
    "bilinear": Pillow.Resampling.BILINEAR,
    "bicubic": Pillow.Resampling.BICUBIC,
    "lanczos": Pillow.Resampling.LANCZOS,
}


class Augment(Settings):
    """Random changes of training images. Never of validation images."""

    flip: bool = False  # left and right exchanged, every second time
    shift: NotNegative = 0  # up to this many pixels in each direction after resizing; the edge is repeated

    @property
    def active(self) -> bool:
        return self.flip or self.shift > 0


def units_of(size: Size, rule: ImageRule) -> tuple[Unit, ...]:
    """The images that a media item of this size becomes. BadSample where the rule does not take it."""
    return rule.units(*size) if len(size) == 2 else rule.slices(*size)


@dataclass(frozen=True, eq=False)
class Resized:
    """A media item decoded, upright and resized: for each of its images the whole image (of a video, the frames) it is cut from."""

    units: tuple[Unit, ...]
    canvases: tuple[tuple[Planes, ...], ...]

    @property
    def bytes(self) -> int:
        return sum(plane.nbytes for canvases in self.canvases for planes in canvases for plane in planes)


def resize(item: EncodedImage | Video, rule: ImageRule) -> Resized:
    """Pixels as transformers' image processors resize them (tested on those that use Pillow). Raises as `decode` does."""
    if isinstance(item, EncodedImage):
        rgb = upright(item)
        units = rule.units(rgb.height, rgb.width)
        sizes = {unit.canvas: _scaled(rgb, unit.canvas, rule) for unit in units}
        return Resized(units, tuple((sizes[unit.canvas],) for unit in units))
    frames = [upright(frame) for frame in item.frames]
    units = rule.slices(len(frames), *same_size(item, [(frame.height, frame.width) for frame in frames]))
    scaled = [_scaled(frame, units[0].canvas, rule) for frame in frames]
    scaled += scaled[-1:] * (-len(scaled) % rule.frames)
    return Resized(units, tuple(tuple(scaled[n : n + rule.frames]) for n in range(0, len(scaled), rule.frames)))


def _scaled(rgb: Pillow.Image, canvas: tuple[int, int], rule: ImageRule) -> Planes:
    height, width = canvas
    shown = rgb if rgb.size == (width, height) else rgb.resize((width, height), _RESAMPLE[rule.resample])
    return tuple(np.frombuffer(shown.tobytes("raw", colour), np.uint8).reshape(height, width) for colour in "RGB")


def with_augmentation(item: Resized, augment: Augment, rng: Callable[[], np.random.Generator]) -> Resized:
    """The same with the random changes that `rng()` draws: the same ones for every frame and tile."""
    changed = {id(canvas): _augmented(canvas, augment, rng()) for canvases in item.canvases for canvas in canvases}
    return Resized(item.units, tuple(tuple(changed[id(canvas)] for canvas in canvases) for canvases in item.canvases))


def _augmented(planes: Planes, augment: Augment, rng: np.random.Generator) -> Planes:
    mirrored, down, right = rng.random() < 0.5, *rng.integers(0, 2 * augment.shift, 2, endpoint=True)
    if augment.flip and mirrored:
        planes = tuple(plane[:, ::-1] for plane in planes)
    if augment.shift:
        height, width = planes[0].shape
        padded = (np.pad(plane, augment.shift, mode="edge") for plane in planes)
        planes = tuple(plane[down : down + height, right : right + width] for plane in padded)
    return tuple(map(np.ascontiguousarray, planes))


def _no_room(patches: int) -> None:  # noqa: ARG001
    return None


def cut(item: Resized, rule: ImageRule, key: str, room: Room = _no_room) -> tuple[Image, ...]:
    """The images of a media item: patches in merge order, not normalised, in `room` where it has some. Pixels beyond the last whole patch
    are left out, as a convolution without padding leaves them out."""
    several = len(item.units) > 1
    pairs = zip(item.units, item.canvases, strict=True)
    return tuple(_cut(unit, canvases, rule, f"{key}#{n}" if several else key, room) for n, (unit, canvases) in enumerate(pairs))


def _cut(unit: Unit, canvases: tuple[Planes, ...], rule: ImageRule, key: str, room: Room) -> Image:
    (rows, columns), (top, left), p, r = unit.grid, unit.corner, rule.patch, rule.merge
    patches_PC = room(unit.grid.patches)
    if patches_PC is None:
        patches_PC = np.empty((unit.grid.patches, 3 * rule.frames * p * p), np.uint8)
    # moved in strips, a row of a patch each: much faster than pixel by pixel
    strips = patches_PC.view(f"V{p}").reshape(rows // r, columns // r, r, r, 3, rule.frames, p)
    for frame in range(rule.frames):
        for colour, plane in enumerate(canvases[frame % len(canvases)]):  # a still repeats
            kept = plane[top : top + rows * p, left : left + columns * p].view(f"V{p}")
            strips[:, :, :, :, colour, frame] = kept.reshape(rows // r, r, p, columns // r, r).transpose(0, 3, 1, 4, 2)
    return Image(key, patches_PC, _places(rows, columns, r), unit.grid, r, unit.mark)


@lru_cache(maxsize=64)
def _places(rows: int, columns: int, merge: int) -> Ints:
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    places = np.stack([row, column], 1).reshape(rows // merge, merge, columns // merge, merge, 2)
    out = places.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)
    out.flags.writeable = False  # every image of this shape has it
    return out


def image_patches(item: EncodedImage | Video, rule: ImageRule) -> tuple[Image, ...]:
    """A media item as the tower takes it, without augmentation: for prompts, evaluation and reports. Raises as `decode` does."""
    return cut(resize(item, rule), rule, media_key(item))


def outlines(item: EncodedImage | Video, rule: ImageRule) -> tuple[Image, ...]:
    """The images of a media item by its header alone: as many patches of the same grids, and grey. Raises as `size_of` does."""
    key = media_key(item)
    return tuple(replace(image, key=f"{key}#{n}") for n, image in enumerate(grey_images(rule, size_of(item))))


def grey_images(rule: ImageRule, size: Size = (1, 1)) -> tuple[Image, ...]:
    """Grey images in place of a media item of this size that was planned and could not be decoded."""
    units = units_of(size, rule)
    canvases = {unit.canvas: (np.full(unit.canvas, 128, np.uint8),) * 3 for unit in units}
    key = f"grey {'×'.join(map(str, size))}"
    return cut(Resized(units, tuple((canvases[unit.canvas],) for unit in units)), rule, key)
