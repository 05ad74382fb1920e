"""The geometry of images and videos, for each way of resizing that a model may state: sizes and grids, before a pixel is read."""

import math
from dataclasses import dataclass
from typing import Literal, assert_never

from eyeline.core.batch import Grid
from eyeline.core.errors import BadSample

Resample = Literal["nearest", "bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True)
class Square:
    """Every image is squeezed into one square. Pixels beyond the last whole patch are not looked at."""

    size: int  # pixels per side


@dataclass(frozen=True)
class Area:
    """The shape is nearly kept: sides are multiples of patch·merge, with `least` to `most` pixels in all (Qwen2-VL and later)."""

    least: int
    most: int


@dataclass(frozen=True)
class Patches:
    """The shape is nearly kept, and an image fills as many patches as it can, up to `most` (SigLIP 2 NaFlex)."""

    most: int


@dataclass(frozen=True)
class Tiles:
    """The image squeezed into a square, and, when it is large or long, again in tiles of that square's size."""

    size: int  # pixels per side
    most: int = 5  # images of one image: the whole, and the tiles


Resize = Square | Area | Patches | Tiles


@dataclass(frozen=True)
class VideoLimits:
    """The size limits of videos: the shape is nearly kept, and all frames together have `least` to `most` pixels (Qwen3-VL)."""

    least: int
    most: int


@dataclass(frozen=True)
class Unit:
    """One image that a still or video becomes, before any pixel is read."""

    height: int  # pixels
    width: int
    grid: Grid
    tokens: int  # visual tokens
    canvas: tuple[int, int]  # height and width to which the whole image is resized
    corner: tuple[int, int] = (0, 0)  # row and column of the canvas where this image begins
    mark: str | None = None  # control token that says which tile follows


ASPECT = 200  # longer images are refused (transformers 5.24, models/qwen2_vl/image_processing_qwen2_vl.py)


@dataclass(frozen=True)
class ImageRule:
    """The rule that turns an image into patches: stated by the model, obeyed by `data/images/patches.py`, saved with every export."""

    patch: int  # pixels per side of a patch
    merge: int  # r: r×r patches become one visual token
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: Resample
    resize: Resize
    frames: int = 1  # frames that one patch spans
    positions: Literal["sequential", "grid"] = "sequential"  # grid: a visual token's row and column are positions of their own (M-RoPE)
    video: VideoLimits | None = None  # None: the model takes no videos

    def units(self, height: int, width: int) -> tuple[Unit, ...]:
        """The images that a still of this size (in pixels, upright) becomes. BadSample `aspect_ratio`."""
        match self.resize:
            case Square(size):
                return (self._unit(size, size),)
            case Area(least, most):
                return (self._unit(*_area(height, width, self.patch * self.merge, least, most)),)
            case Patches(most):
                return (self._unit(*_most_patches(height, width, self.patch * self.merge, most // self.merge**2)),)
            case Tiles(size, most):
                rows, columns = _tiling(height, width, size, most - 1)
                whole = self._unit(size, size, mark=WHOLE)
                if rows * columns == 1:
                    return (whole,)
                canvas = (rows * size, columns * size)
                places = [(row, column) for row in range(rows) for column in range(columns)]
                return (whole, *(self._unit(size, size, canvas, (r * size, c * size), tile_mark(r, c)) for r, c in places))
            case _:
                assert_never(self.resize)

    def slices(self, frames: int, height: int, width: int) -> tuple[Unit, ...]:
        """The images that a video becomes, `self.frames` frames each; the last one may repeat its last frame. BadSample."""
        if self.video is None:
            raise BadSample("unsupported", "video", "this model takes no videos")
        size = _volume(max(frames, self.frames), self.frames, height, width, self.patch * self.merge, self.video)
        return (self._unit(*size),) * -(-frames // self.frames)

    @property
    def marks(self) -> tuple[str, ...]:
        """The control tokens that say which tile follows."""
        if not isinstance(self.resize, Tiles):
            return ()
        most = self.resize.most - 1
        return (WHOLE, *(tile_mark(row, column) for row in range(most) for column in range(most) if (row + 1) * (column + 1) <= most))

    def _unit(
        self,
        height: int,
        width: int,
        canvas: tuple[int, int] | None = None,
        corner: tuple[int, int] = (0, 0),
        mark: str | None = None,
    ) -> Unit:
        grid = Grid(height // self.patch, width // self.patch)
        return Unit(height, width, grid, grid.patches // self.merge**2, canvas or (height, width), corner, mark)


# The names of nanoVLM (models/config.py: vlm_extra_tokens), which writes the whole first, as here (data/processors.py)
WHOLE = "<|global_image|>"


def tile_mark(row: int, column: int) -> str:
    """The control token before the visual tokens of a tile; rows and columns count from 0 here and from 1 there."""
    return f"<row_{row + 1}_col_{column + 1}>"


def _upto(height: int, width: int) -> None:
    if max(height, width) > ASPECT * min(height, width):
        raise BadSample("aspect_ratio", "image", f"{width}×{height} pixels; one side is over {ASPECT} times the other")


def _area(height: int, width: int, cell: int, least: int, most: int) -> tuple[int, int]:
    """`smart_resize` of transformers' models/qwen2_vl/image_processing_qwen2_vl.py, with its float arithmetic."""
    _upto(height, width)
    rows, columns = round(height / cell), round(width / cell)
    if rows * cell * columns * cell > most:
        return _shrunk(height, width, cell, math.sqrt((height * width) / most))
    if rows * cell * columns * cell < least:
        return _rounded_up(height, width, cell, math.sqrt(least / (height * width)))
    return rows * cell, columns * cell


def _volume(frames: int, span: int, height: int, width: int, cell: int, video: VideoLimits) -> tuple[int, int]:
    """`smart_resize` of transformers' models/qwen3_vl/video_processing_qwen3_vl.py: pixels are counted over all frames."""
    if height < cell or width < cell:
        scale = max(cell / height, cell / width)
        height, width = int(height * scale), int(width * scale)
    _upto(height, width)
    rows, columns = round(height / cell), round(width / cell)
    pixels = round(frames / span) * span * rows * cell * columns * cell
    if pixels > video.most:
        return _shrunk(height, width, cell, math.sqrt((frames * height * width) / video.most))
    if pixels < video.least:
        return _rounded_up(height, width, cell, math.sqrt(video.least / (frames * height * width)))
    return rows * cell, columns * cell


def _shrunk(height: int, width: int, cell: int, by: float) -> tuple[int, int]:
    return max(cell, math.floor(height / by / cell) * cell), max(cell, math.floor(width / by / cell) * cell)


def _rounded_up(height: int, width: int, cell: int, by: float) -> tuple[int, int]:
    return math.ceil(height * by / cell) * cell, math.ceil(width * by / cell) * cell


def _most_patches(height: int, width: int, cell: int, most: int) -> tuple[int, int]:
    """The largest scale, by halving, at which cells of the rounded-up sides are at most `most` (transformers' models/siglip2/
    image_processing_siglip2.py: get_image_size_for_max_num_patches)."""

    def cells(scale: float, side: int) -> int:
        return max(1, math.ceil(side * scale / cell))

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        if cells(scale, height) * cells(scale, width) <= most:
            low = scale
        else:
            high = scale
    return cells(low, height) * cell, cells(low, width) * cell


def _tiling(height: int, width: int, size: int, most: int) -> tuple[int, int]:
    """Rows and columns of at most `most` tiles whose shape together is nearest to the image's. Of equally near ones the larger,
    while it has less than twice the image's pixels (InternVL; transformers' models/got_ocr2: get_optimal_tiled_canvas)."""
    best, difference = (1, 1), math.inf
    shapes = sorted(((r, c) for c in range(1, most + 1) for r in range(1, most // c + 1)), key=lambda shape: shape[0] * shape[1])
    for rows, columns in shapes:
        off = abs(width / height - columns / rows)
        if off < difference or (off == difference and height * width > 0.5 * size * size * rows * columns):
            best, difference = (rows, columns), off
    return best
