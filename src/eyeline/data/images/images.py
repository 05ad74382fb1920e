"""Encoded pictures and films -> upright RGB -> patches. Every picture is decoded in one way, and whatever is not sound is rejected.

Rules, each with a picture in tests/data/test_zoo.py: orientation (EXIF) is applied once, before anything else looks at the size;
transparency is laid over white; grey, palette, CMYK and 16-bit pictures become 8-bit RGB; colour profiles (ICC) are ignored, as
transformers' processors ignore them; of an animation the first frame counts; a truncated file is never completed, and never half
grey; a header that claims too many pixels is believed and refused before any is decoded.
"""

import errno
import hashlib
import io
import os
import re
import stat
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageChops, ImageFile

from eyeline.core.batch import Image, Ints, Picture, Span, Video
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.facts import ImageRule, Unit
from eyeline.core.files import storage_failed
from eyeline.core.locations import Remote
from eyeline.core.settings import NotNegative, Settings
from eyeline.data.containers.container import HEADER_BYTES, File, number_of, span_file
from eyeline.data.files import stores
from eyeline.data.files.near import near_name, no_folder
from eyeline.data.images.integrity import ends_in_zeros, is_complete, jpeg_scans, wrong_chunk

Pixels = NDArray[np.uint8]  # rows × columns × 3
Planes = tuple[NDArray[np.uint8], ...]  # red, green and blue: rows × columns each. A patch has its colours one after another
Room = Callable[[int], NDArray[np.uint8] | None]  # rows for so many patches; None: none are kept for them
Size = tuple[int, int] | tuple[int, int, int]  # height and width of a still; frames, height and width of a film

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # Pillow reads many more, with decoders that are seldom tested
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of decompression bombs (Pillow 13, Image.MAX_IMAGE_PIXELS)
MAX_FILE_BYTES = 256 << 20
MAX_SCANS = 100  # of a JPEG: encoders write ten or so, and each of a few bytes costs the time of a whole picture
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
_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM}
_ACCEPTED = ((rb"\xff\xd8\xff", "JPEG"), (rb"\x89PNG", "PNG"), (rb"RIFF....WEBP", "WebP"), (rb"GIF8", "GIF"), (rb"BM", "BMP"))
_SIGNATURES = (  # of files that people name .png or .jpg
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"8BPS", "PSD"),
    (b"%!PS", "EPS"),
    (b"SIMPLE", "FITS"),
    (b"%PDF", "PDF"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML"),
    (b"<!DOCTYPE", "HTML, a web page in place of the picture"),
    (b"<html", "HTML, a web page in place of the picture"),
    (b"\0\0\1\0", "ICO"),
    (b"version https://git-lfs", "a Git LFS pointer in place of the picture, which `git lfs pull` fetches"),
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
_RESAMPLE = {
    "nearest": Pillow.Resampling.NEAREST,
    "bilinear": Pillow.Resampling.BILINEAR,
    "bicubic": Pillow.Resampling.BICUBIC,
    "lanczos": Pillow.Resampling.LANCZOS,
}


class Augment(Settings):
    """Random changes of training pictures. Never of validation pictures."""

    flip: bool = False  # left and right exchanged, every second time
    shift: NotNegative = 0  # up to so many pixels in each direction after resizing; the edge is repeated

    @property
    def active(self) -> bool:
        return self.flip or self.shift > 0


def open_picture(picture: Picture) -> tuple[int, int]:
    """(width, height) of the upright picture, from its header alone. Raises as `decode` does, except for broken pixels."""
    if isinstance(picture.source, Remote):
        picture = replace(picture, source=_object(picture.source, stores.HEAD_BYTES)[0])
    begin = picture.source.data if isinstance(picture.source, Span) else picture.source
    if isinstance(begin, bytes) and (frame := _frame(begin[:HEADER_BYTES])) is not None:
        return frame[1]
    with _opened(picture) as (image, _):
        width, height = image.size
        # Pillow decodes a PNG to learn its orientation, which may follow the pixels: not where no chunk can hold one
        turned = (image.format != "PNG" or _says_more(picture)) and _orientation(image) >= 5
        return (height, width) if turned else (width, height)


def _says_more(png: Picture) -> bool:
    """Whether a PNG file has a chunk that may hold its orientation: EXIF, or text that carries it."""
    with _stream(png) as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            begin = file.read(min(length, 22)) if kind in (b"tEXt", b"zTXt", b"iTXt") else b""
            if kind == b"eXIf" or begin.startswith((b"Raw profile type exif", b"XML:com.adobe.xmp")):
                return True
            file.seek(length + 4 - len(begin), os.SEEK_CUR)
    return False


def decode(picture: Picture) -> Pixels:
    """The picture upright, over white, as 8-bit RGB.

    BadSample causes: missing_image, unreadable, not_a_file, file_too_large, image_format, too_many_pixels, empty_image, broken_image.
    A file that its store fails to give is StorageFailed: it says nothing about the sample.
    """
    return np.asarray(upright(picture))


def upright(picture: Picture) -> Pillow.Image:
    """As `decode`, in Pillow's memory: resizing from there saves two copies."""
    with _opened(picture) as (image, file):
        _load(image, file, picture.name)
        orientation = _orientation(image)
        rgb = _rgb(image)
        if orientation in _TRANSPOSE:
            rgb = rgb.transpose(_TRANSPOSE[orientation])
        return rgb


def oddities(picture: Picture) -> list[str]:
    """Decode the picture whole, and say what is unusual about it though it is usable. Raises as `decode` does."""
    out: list[str] = []
    with _opened(picture) as (image, file):
        width, height = image.size
        if getattr(image, "is_animated", False):
            out.append("animated (its first frame is used)")
        _load(image, file, picture.name)
        if _orientation(image) in _TRANSPOSE:
            out.append("turned by its EXIF orientation")
        if _transparent(image):
            out.append("transparent (laid over white)")
        elif image.mode not in ("RGB", "L", "P", "1"):
            out.append(f"mode {image.mode} (made 8-bit RGB)")
        if min(width, height) < SMALL_SIDE:
            out.append(f"a side under {SMALL_SIDE} pixels")
        if max(width, height) > LONG_ASPECT * min(width, height):
            out.append(f"longer than {LONG_ASPECT}:1")
    return out


def _load(image: Pillow.Image, file: BinaryIO, name: str) -> None:
    """Decode the pixels. BadSample where a part of them is lost: Pillow's decoders leave it grey or black in silence when the file
    goes on after the loss, or ends as a whole one does."""
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise Refused("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set, which invents the missing part of cut files. Leave it False")
    lost = BadSample("broken_image", "image", f"{name}: image file is truncated: a part of its pixels is not there")
    match image.format:
        case "JPEG" | "MPO":
            file.seek(0)
            data = file.read()
            scans, end = jpeg_scans(data)
            if scans > MAX_SCANS:
                raise BadSample("broken_image", "image", f"{name} has {scans:,} scans, over {MAX_SCANS}")
            image.load()
            # libjpeg takes 0 for all coefficients that are missing, which is mid-grey; what stands behind a whole picture it never decodes
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
            # Pillow takes the end of the compressed data for that of the picture
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
def _opened(picture: Picture) -> Iterator[tuple[Pillow.Image, BinaryIO]]:
    """The picture opened, with its header checked, and its file. Errors of Pillow inside the block are BadSample `broken_image`."""
    with _stream(picture) as file, ExitStack() as quiet:
        try:
            try:
                found: Pillow.Image = _PlainJpeg(file)
            except SyntaxError:
                quiet.enter_context(warnings.catch_warnings(action="ignore"))  # Pillow's, of odd metadata; what matters is checked here
                file.seek(0)
                found = Pillow.open(file, formats=FORMATS)
            with found as image:
                width, height = image.size
                if width == 0 or height == 0:
                    raise BadSample("empty_image", "image", f"{picture.name} is {width}×{height} pixels")
                if width * height > MAX_PIXELS:
                    raise BadSample("too_many_pixels", "image", f"{picture.name} is {width}×{height} pixels, over {MAX_PIXELS:,}")
                yield image, file
        except Pillow.UnidentifiedImageError as error:
            file.seek(0)
            raise _unidentified(picture.name, file.read(64)) from error
        except Pillow.DecompressionBombError as error:
            raise BadSample("too_many_pixels", "image", f"{picture.name}: {error}") from error
        except OSError as error:
            if error.errno is not None:  # Pillow's own have none
                raise storage_failed("read", Path(picture.name), error) from error
            raise BadSample("broken_image", "image", f"{picture.name}: {error}") from error
        except _BROKEN as error:
            raise BadSample("broken_image", "image", f"{picture.name}: {error or type(error).__name__}") from error


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
        kind, begin = head[at + 1 : at + 2], at + 4
        at += 2 + int.from_bytes(head[at + 2 : begin], "big")
        if not begin <= at <= len(head):
            return None
        match kind:
            case b"\xda":  # a scan
                return frame
            case b"\xc0" | b"\xc1" | b"\xc2" if frame is None and at - begin in (9, 15):  # baseline, extended, progressive
                bits, height, width, colours = struct.unpack_from(">BHHB", head, begin)
                if bits != 8 or at - begin != 6 + 3 * colours or not 0 < width * height <= MAX_PIXELS:
                    return None
                frame = "L" if colours == 1 else "RGB", (width, height)
            case b"\xdb" if (at - begin) % 65 == 0 and max(head[begin:at:65], default=0) < 16:  # tables of 64 bytes, each with its number
                pass
            case b"\xe0" if at - begin == 14 and head.startswith(b"JFIF\0", begin):
                pass
            case b"\xc4" | b"\xdd" | b"\xfe":  # codes, the restart interval, a comment
                pass
            case _:
                return None
    return None


def _stream(picture: Picture) -> BinaryIO:
    match picture.source:
        case bytes():
            return io.BytesIO(picture.source)
        case Span():
            return span_file(picture.source)
        case Path():
            return _file(picture.source)
        case Remote():
            return io.BytesIO(_object(picture.source, stores.PIECE)[1])


def held(medium: Picture | Video) -> Picture | Video:
    """The medium with its encoded bytes in memory, so that decoding it reads nothing. Raises as `decode` does for its file."""
    if isinstance(medium, Video):
        return replace(medium, frames=tuple(_held(frame) for frame in medium.frames))
    return _held(medium)


def _held(picture: Picture) -> Picture:
    if isinstance(picture.source, bytes):
        return picture
    try:
        with _stream(picture) as file:
            return replace(picture, source=file.read())
    except OSError as error:
        raise storage_failed("read", Path(picture.name), error) from error


def _file(path: Path) -> io.BufferedReader:
    _examined(path)
    try:
        return open(path, "rb")
    except OSError as error:
        raise _failed(path, error) from error


def _examined(path: Path) -> None:
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):  # opening a FIFO would wait for ever
            raise BadSample("not_a_file", "image", f"{path} is {'a folder' if stat.S_ISDIR(about.st_mode) else 'not a regular file'}")
        if about.st_dev in _system_devices():  # reading some of them fails, never ends, or does something
            raise BadSample("not_a_file", "image", f"{path} is a file of the system, and not of a disk")
        if about.st_size > MAX_FILE_BYTES:
            raise BadSample("file_too_large", "image", f"{path} has {about.st_size:,} bytes, over {MAX_FILE_BYTES:,}")
    except OSError as error:
        raise _failed(path, error) from error


@lru_cache(maxsize=1)
def _system_devices() -> frozenset[int]:
    """What regular files are on that are none: /proc/self/mem, /proc/kmsg, /sys/..."""
    mounts = ("/proc", "/proc/sys/fs/binfmt_misc", "/sys", "/sys/fs/cgroup", "/sys/kernel/debug", "/sys/kernel/tracing")
    root = os.stat("/").st_dev
    return frozenset(os.stat(mount).st_dev for mount in mounts if os.path.isdir(mount)) - {root}


def _failed(path: Path, error: OSError) -> BadSample | StorageFailed:
    if error.errno in _NO_SUCH_FILE:
        return BadSample("missing_image", "image", f"{path} does not exist{_lost(path)}")
    if error.errno in _NOT_ALLOWED:
        return BadSample("unreadable", "image", f"{path} may not be read: {error.strerror}")
    return storage_failed("read", path, error)


def _unidentified(name: str, head: bytes) -> BadSample:
    """What is wrong with a file that Pillow does not take for any of FORMATS."""
    known = next((kind for magic, kind in _ACCEPTED if re.match(magic, head, re.DOTALL)), None)
    if known is None:
        return BadSample("image_format", "image", f"{name} {_what(head)}")
    return BadSample("broken_image", "image", f"{name} is {known}, of a kind that is not read or with a damaged header")


def _lost(path: Path) -> str:
    """Why a file is probably not where it was looked for, as the end of a sentence."""
    if "\\" in str(path):
        return ". It has backslashes, and / is what sets folders apart"
    return near_name(path) if os.path.isdir(path.parent) else no_folder(path.parent)


def _object(location: Remote, length: int) -> tuple[Span, bytes]:
    """An object as it is now, and its first bytes; all of them where `length` is what one request gives."""
    try:
        stamp, data = stores.look(location, length)
    except StorageFailed as failed:
        if number_of(failed) == errno.ENOENT:
            raise BadSample("missing_image", "image", f"{location} does not exist") from failed
        raise
    if stamp[0] > MAX_FILE_BYTES:
        raise BadSample("file_too_large", "image", f"{location} has {stamp[0]:,} bytes, over {MAX_FILE_BYTES:,}")
    if length == stores.PIECE and len(data) < stamp[0]:
        data += File(location, stamp, 0).read(len(data), stamp[0] - len(data))
    return Span(location, 0, stamp[0], stamp), data


def _what(head: bytes) -> str:
    """What a file that is no accepted picture seems to be."""
    wanted = f"; {', '.join(FORMATS)} are accepted"
    if not head:
        return "is an empty file" + wanted
    for signature, name in _SIGNATURES:
        if head.lstrip().startswith(signature) or head.startswith(signature):
            return f"is {name}{wanted}"
    if head[4:8] == b"ftyp":
        return f"is HEIF, AVIF or a film (ISO media){wanted}"
    return "is no picture that can be read" + wanted


def _orientation(image: Pillow.Image) -> int:
    """EXIF orientation, 1 (upright) when absent, unknown or unreadable: broken metadata does not spoil sound pixels."""
    if isinstance(image, _PlainJpeg):
        return 1
    try:
        value = image.getexif().get(0x0112, 1)
    except (OSError, *_BROKEN):
        return 1
    return value if isinstance(value, int) and value in _TRANSPOSE else 1


def _transparent(image: Pillow.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _rgb(image: Pillow.Image) -> Pillow.Image:
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


def picture_key(picture: Picture) -> str:
    """Equal keys mean equal pixels: where the file lies, or the hash of its bytes (never of its pixels, whose shape those forget)."""
    match picture.source:
        case bytes():
            return "sha256:" + hashlib.sha256(picture.source).hexdigest()
        case Span(path, begin, length):
            return f"{path}@{begin}+{length}"
        case Path() | Remote():
            return str(picture.source)


def content_key(picture: Picture) -> str:
    """Equal keys mean equal bytes, wherever they lie. Raises as `decode` does for its file."""
    return picture_key(_held(picture))


def medium_key(medium: Picture | Video) -> str:
    """Equal keys mean equal pixels. Of a film: the hash of all its frames', since how large each is taken depends on their number."""
    if isinstance(medium, Picture):
        return picture_key(medium)
    return "film:" + hashlib.sha256("\n".join(picture_key(frame) for frame in medium.frames).encode("utf-8", "surrogatepass")).hexdigest()


def frames_of(medium: Picture | Video) -> tuple[Picture, ...]:
    return medium.frames if isinstance(medium, Video) else (medium,)


def size_of(medium: Picture | Video) -> Size:
    """Height and width of an upright still, before them the number of frames of a film; from headers alone. Raises as
    `open_picture` does, and BadSample `frame_size` where frames differ."""
    match medium:
        case Picture():
            width, height = open_picture(medium)
            return (height, width)
        case Video():
            sizes = [open_picture(frame) for frame in medium.frames]
            return (len(sizes), *_same(medium, [(height, width) for width, height in sizes]))


def _same(film: Video, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    other = next((n for n, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        (height, width), (h, w) = sizes[0], sizes[other]
        raise BadSample("frame_size", "video", f"{film.name}: frame {other} is {w}×{h} pixels, and the first one {width}×{height}")
    return sizes[0]


def units_of(size: Size, rule: ImageRule) -> tuple[Unit, ...]:
    """The images that a medium of this size becomes. BadSample where the rule does not take it."""
    return rule.units(*size) if len(size) == 2 else rule.slices(*size)


@dataclass(frozen=True, eq=False)
class Resized:
    """A medium decoded, upright and resized: for each of its images the whole picture (of a film, the frames) it is cut from."""

    units: tuple[Unit, ...]
    canvases: tuple[tuple[Planes, ...], ...]

    @property
    def bytes(self) -> int:
        return sum(plane.nbytes for canvases in self.canvases for planes in canvases for plane in planes)


def resized(medium: Picture | Video, rule: ImageRule) -> Resized:
    """Pixels as transformers' image processors resize them (tested on those that use Pillow). Raises as `decode` does."""
    if isinstance(medium, Picture):
        rgb = upright(medium)
        units = rule.units(rgb.height, rgb.width)
        sizes = {unit.canvas: _scaled(rgb, unit.canvas, rule) for unit in units}
        return Resized(units, tuple((sizes[unit.canvas],) for unit in units))
    frames = [upright(frame) for frame in medium.frames]
    units = rule.slices(len(frames), *_same(medium, [(frame.height, frame.width) for frame in frames]))
    scaled = [_scaled(frame, units[0].canvas, rule) for frame in frames]
    scaled += scaled[-1:] * (-len(scaled) % rule.frames)
    return Resized(units, tuple(tuple(scaled[n : n + rule.frames]) for n in range(0, len(scaled), rule.frames)))


def _scaled(rgb: Pillow.Image, canvas: tuple[int, int], rule: ImageRule) -> Planes:
    height, width = canvas
    shown = rgb if rgb.size == (width, height) else rgb.resize((width, height), _RESAMPLE[rule.resample])
    return tuple(np.frombuffer(shown.tobytes("raw", colour), np.uint8).reshape(height, width) for colour in "RGB")


def augmented(medium: Resized, augment: Augment, rng: Callable[[], np.random.Generator]) -> Resized:
    """The same with the random changes that `rng()` draws: the same ones for every frame and tile."""
    changed = {id(canvas): _changed(canvas, augment, rng()) for canvases in medium.canvases for canvas in canvases}
    return Resized(medium.units, tuple(tuple(changed[id(canvas)] for canvas in canvases) for canvases in medium.canvases))


def _changed(planes: Planes, augment: Augment, rng: np.random.Generator) -> Planes:
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


def cut(medium: Resized, rule: ImageRule, key: str, room: Room = _no_room) -> tuple[Image, ...]:
    """The images of a medium: patches in merge order, not normalised, in `room` where it has some. Pixels beyond the last whole patch
    are left out, as a convolution without padding leaves them out."""
    several = len(medium.units) > 1
    pairs = zip(medium.units, medium.canvases, strict=True)
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


def prepare(medium: Picture | Video, rule: ImageRule) -> tuple[Image, ...]:
    """A medium as the tower takes it, without augmentation: for prompts, evaluation and reports. Raises as `decode` does."""
    return cut(resized(medium, rule), rule, medium_key(medium))


@lru_cache(maxsize=64)
def _places(rows: int, columns: int, merge: int) -> Ints:
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    places = np.stack([row, column], 1).reshape(rows // merge, merge, columns // merge, merge, 2)
    out = places.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)
    out.flags.writeable = False  # every image of this shape has it
    return out


def grey(rule: ImageRule, size: Size = (1, 1)) -> tuple[Image, ...]:
    """What stands in for a medium of this size that could not be decoded after its place was planned."""
    units = units_of(size, rule)
    canvases = {unit.canvas: (np.full(unit.canvas, 128, np.uint8),) * 3 for unit in units}
    key = f"grey {'×'.join(map(str, size))}"
    return cut(Resized(units, tuple((canvases[unit.canvas],) for unit in units)), rule, key)
