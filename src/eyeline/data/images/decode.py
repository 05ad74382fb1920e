"""Encoded images -> upright 8-bit RGB, and their sizes from headers. Every image is decoded in one way, and damaged ones are rejected.

Rules, each with an image in tests/data/test_image_formats.py: orientation (EXIF) is applied once, before anything else looks at the size;
transparency is laid over white; grey, palette, CMYK and 16-bit images become 8-bit RGB; colour profiles (ICC) are ignored, as
transformers' processors ignore them; of an animation the first frame counts; a truncated file is never completed, and never half
grey; an image whose header claims too many pixels is refused before any is decoded.
"""

import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageChops, ImageFile

from eyeline.core.batch import EncodedImage, Span, Video
from eyeline.core.errors import BadSample, Refused
from eyeline.core.files import storage_failed
from eyeline.core.locations import Remote
from eyeline.data.containers.container import HEADER_BYTES
from eyeline.data.files import stores
from eyeline.data.images.image_files import (
    FORMATS,
    ends_in_zeros,
    image_stream,
    is_complete,
    jpeg_scans,
    stored_object,
    unidentified_error,
    wrong_chunk,
)

Pixels = NDArray[np.uint8]  # rows × columns × 3
Size = tuple[int, int] | tuple[int, int, int]  # height and width of a still; frames, height and width of a video

MAX_PIXELS = 89_478_485  # where Pillow begins to warn of decompression bombs (Pillow 13, Image.MAX_IMAGE_PIXELS)
MAX_SCANS = 100  # of a JPEG: encoders write ten or so, and each of a few bytes costs the time of a whole image
SMALL_SIDE = 28  # pixels: where other trainers' models stop working; here only worth a remark
LONG_ASPECT = 10

# What Pillow's decoders raise on hostile bytes, besides OSError
_BROKEN = (
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    ZeroDivisionError,
    AttributeError,
    struct.error,
    zlib.error,
)
_TRANSPOSE = {  # EXIF orientation -> what makes it upright
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


def size_of(item: EncodedImage | Video) -> Size:
    """Height and width of an upright still, before them the number of frames of a video; from headers alone. Raises as
    `width_and_height` does, and BadSample `frame_size` where frames differ."""
    match item:
        case EncodedImage():
            width, height = width_and_height(item)
            return (height, width)
        case Video():
            sizes = [width_and_height(frame) for frame in item.frames]
            return (len(sizes), *same_size(item, [(height, width) for width, height in sizes]))


def same_size(video: Video, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    other = next((n for n, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        (height, width), (h, w) = sizes[0], sizes[other]
        raise BadSample("frame_size", "video", f"{video.name}: frame {other} is {w}×{h} pixels, and the first one {width}×{height}")
    return sizes[0]


def width_and_height(encoded: EncodedImage) -> tuple[int, int]:
    """(width, height) of the upright image, from its header alone. Raises as `decode` does, except for broken pixels."""
    if isinstance(encoded.source, Remote):
        encoded = replace(encoded, source=stored_object(encoded.source, stores.HEAD_BYTES)[0])
    start = encoded.source.data if isinstance(encoded.source, Span) else encoded.source
    if isinstance(start, bytes) and (frame := _frame(start[:HEADER_BYTES])) is not None:
        return frame[1]
    with _open_image(encoded) as (image, _):
        width, height = image.size
        # Pillow decodes a PNG to learn its orientation, which may follow the pixels: not where no chunk can hold one
        turned = (image.format != "PNG" or _says_more(encoded)) and _orientation(image) >= 5
        return (height, width) if turned else (width, height)


def _says_more(png: EncodedImage) -> bool:
    """Return whether a PNG file has a chunk that may hold its orientation: EXIF, or text that carries it."""
    with image_stream(png) as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            start = file.read(min(length, 22)) if kind in (b"tEXt", b"zTXt", b"iTXt") else b""
            if kind == b"eXIf" or start.startswith((b"Raw profile type exif", b"XML:com.adobe.xmp")):
                return True
            file.seek(length + 4 - len(start), os.SEEK_CUR)
    return False


def decode(image: EncodedImage) -> Pixels:
    """The image upright, over white, as 8-bit RGB.

    BadSample causes: missing_image, unreadable, not_a_file, file_too_large, image_format, too_many_pixels, empty_image, broken_image.
    A file that its store fails to give is StorageFailed: it says nothing about the sample.
    """
    return np.asarray(upright(image))


def upright(encoded: EncodedImage) -> Pillow.Image:
    """The decoded image in Pillow's memory: resizing from there saves two copies."""
    with _open_image(encoded) as (image, file):
        _load_whole(image, file, encoded.name)
        orientation = _orientation(image)
        rgb = _as_rgb(image)
        if orientation in _TRANSPOSE:
            rgb = rgb.transpose(_TRANSPOSE[orientation])
        return rgb


def unusual_properties(encoded: EncodedImage) -> list[str]:
    """Decode the image whole, and say what is unusual about it though it is usable. Raises as `decode` does."""
    out: list[str] = []
    with _open_image(encoded) as (image, file):
        width, height = image.size
        if getattr(image, "is_animated", False):
            out.append("animated (its first frame is used)")
        _load_whole(image, file, encoded.name)
        if _orientation(image) in _TRANSPOSE:
            out.append("rotated by its EXIF orientation")
        if _transparent(image):
            out.append("transparent (composited over white)")
        elif image.mode not in ("RGB", "L", "P", "1"):
            out.append(f"mode {image.mode} (converted to 8-bit RGB)")
        if min(width, height) < SMALL_SIDE:
            out.append(f"a side under {SMALL_SIDE} pixels")
        if max(width, height) > LONG_ASPECT * min(width, height):
            out.append(f"longer than {LONG_ASPECT}:1")
    return out


def _load_whole(image: Pillow.Image, file: BinaryIO, name: str) -> None:
    """Decode the pixels. BadSample where a part of them is lost: Pillow's decoders silently leave it grey or black when the file
    continues after the missing part, or ends as a whole one does."""
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise Refused("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set, which invents the missing part of truncated files. Set it to False")
    lost = BadSample("broken_image", "image", f"{name}: image file is truncated: some of its pixels are missing")
    match image.format:
        case "JPEG" | "MPO":
            file.seek(0)
            data = file.read()
            scans, end = jpeg_scans(data)
            if scans > MAX_SCANS:
                raise BadSample("broken_image", "image", f"{name} has {scans:,} scans, over {MAX_SCANS}")
            image.load()
            # libjpeg takes 0 for all coefficients that are missing, which is mid-grey; what stands behind a whole image it never decodes
            corner = image.getpixel((image.width - 1, image.height - 1))
            if end is None or (_all(corner, 127, 128) and _differs(image, data[:end] + _FURTHER + b"\xff\xd9")):
                raise lost
        case "PNG":
            interlaced = bool(image.info.get("interlace"))
            file.seek(0)
            if (wrong := wrong_chunk(file.read())) is not None:
                raise BadSample("broken_image", "image", f"{name} is damaged: the checksum of {wrong} is wrong, or it is cut")
            image.load()
            if image.mode == "P" and image.palette is None:
                raise BadSample("broken_image", "image", f"{name} has no palette")
            # Pillow takes the end of the compressed data for that of the image
            last_row = image.crop((0, image.height - 1, *image.size)).tobytes()
            if (interlaced or not any(last_row)) and not is_complete(file):
                raise lost
        case "WEBP":
            image.load()
            file.seek(0)
            if ends_in_zeros(file.read()):
                raise lost
        case _:
            image.load()


_FURTHER = bytes(range(255))


def _all(pixel: float | tuple[int, ...] | None, least: int, most: int) -> bool:
    return all(least <= value <= most for value in (pixel if isinstance(pixel, tuple) else (pixel or 0,)))


def _differs(image: Pillow.Image, jpeg: bytes) -> bool:
    with Pillow.open(io.BytesIO(jpeg), formats=("JPEG",)) as other:
        return ImageChops.difference(image, other).getbbox() is not None


@contextmanager
def _open_image(encoded: EncodedImage) -> Iterator[tuple[Pillow.Image, BinaryIO]]:
    """The image opened, with its header checked, and its file. Errors of Pillow inside the block are BadSample `broken_image`."""
    with image_stream(encoded) as file, ExitStack() as quiet:
        try:
            try:
                found: Pillow.Image = _PlainJpeg(file)
            except SyntaxError:
                quiet.enter_context(
                    warnings.catch_warnings(action="ignore")
                )  # Pillow's, about unusual metadata; what matters is checked here
                file.seek(0)
                found = Pillow.open(file, formats=FORMATS)
            with found as image:
                width, height = image.size
                if width == 0 or height == 0:
                    raise BadSample("empty_image", "image", f"{encoded.name} is {width}×{height} pixels")
                if width * height > MAX_PIXELS:
                    raise BadSample("too_many_pixels", "image", f"{encoded.name} is {width}×{height} pixels, over {MAX_PIXELS:,}")
                yield image, file
        except Pillow.UnidentifiedImageError as error:
            file.seek(0)
            raise unidentified_error(encoded.name, file.read(64)) from error
        except Pillow.DecompressionBombError as error:
            raise BadSample("too_many_pixels", "image", f"{encoded.name}: {error}") from error
        except OSError as error:
            if error.errno is not None:  # Pillow's own have none
                raise storage_failed("read", Path(encoded.name), error) from error
            raise BadSample("broken_image", "image", f"{encoded.name}: {error}") from error
        except _BROKEN as error:
            raise BadSample("broken_image", "image", f"{encoded.name}: {error or type(error).__name__}") from error


class _PlainJpeg(ImageFile.ImageFile):
    """A JPEG as Pillow would open it, in a quarter of the time. SyntaxError, as plugins of Pillow say it, for another file, and where
    Pillow may find more in the header than the size."""

    format, format_description = "JPEG", "JPEG with a plain header"

    def _open(self) -> None:
        assert self.fp is not None
        frame = _frame(self.fp.read(HEADER_BYTES))
        if frame is None:
            raise SyntaxError("not plain")
        self._mode, self._size = frame
        self.tile = [ImageFile._Tile("jpeg", (0, 0, *self._size), 0, (self._mode, ""))]


def _frame(head: bytes) -> tuple[str, tuple[int, int]] | None:
    """Mode, width and height of a JPEG that begins so. None unless each segment before its first scan is one of those that every JPEG
    has, or a comment, and has the length that it should have: of others Pillow may think what it wants."""
    at, frame = 2, None
    while head[at : at + 1] == b"\xff" and head.startswith(b"\xff\xd8"):
        kind, start = head[at + 1 : at + 2], at + 4
        at += 2 + int.from_bytes(head[at + 2 : start], "big")
        if not start <= at <= len(head):
            return None
        match kind:
            case b"\xda":  # a scan
                return frame
            case b"\xc0" | b"\xc1" | b"\xc2" if frame is None and at - start in (9, 15):  # baseline, extended, progressive
                bits, height, width, colours = struct.unpack_from(">BHHB", head, start)
                if bits != 8 or at - start != 6 + 3 * colours or not 0 < width * height <= MAX_PIXELS:
                    return None
                frame = "L" if colours == 1 else "RGB", (width, height)
            case b"\xdb" if (at - start) % 65 == 0 and max(head[start:at:65], default=0) < 16:  # tables of 64 bytes, each with its number
                pass
            case b"\xe0" if at - start == 14 and head.startswith(b"JFIF\0", start):
                pass
            case b"\xc4" | b"\xdd" | b"\xfe":  # codes, the restart interval, a comment
                pass
            case _:
                return None
    return None


def _orientation(image: Pillow.Image) -> int:
    """EXIF orientation, 1 (upright) when absent, unknown or unreadable: broken metadata does not make valid pixels unusable."""
    if isinstance(image, _PlainJpeg):
        return 1
    try:
        value = image.getexif().get(0x0112, 1)
    except (OSError, *_BROKEN):
        return 1
    return value if isinstance(value, int) and value in _TRANSPOSE else 1


def _transparent(image: Pillow.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _as_rgb(image: Pillow.Image) -> Pillow.Image:
    clear = image.info.get("transparency")  # a colour that is transparent, or the alpha of each in a palette
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I"):  # 16-bit grey: 65535 -> 255, rounded
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        grey = ((wide + 128) // 257).astype(np.uint8)
        return Pillow.fromarray(np.where(wide == clear, 255, grey).astype(np.uint8) if isinstance(clear, int) else grey).convert("RGB")
    if isinstance(clear, tuple) and max(clear) > 255:  # of 16-bit colours, of which Pillow keeps the high bytes
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    if _transparent(image):
        over = image.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", over.size, (255, 255, 255, 255)), over).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
