"""Encoded images and the files that hold them: opening with checks, keys of equal images, messages about what cannot be read,
and checks for damage that decoders do not notice."""

import errno
import hashlib
import io
import os
import re
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from eyeline.core.batch import EncodedImage, Sample, Span, Video
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.files import storage_failed
from eyeline.core.locations import Location, Remote
from eyeline.data.containers.container import File, number_of, span_file
from eyeline.data.files import stores
from eyeline.data.files.names import near_name, no_folder

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # Pillow reads many more, with decoders that are seldom tested
MAX_FILE_BYTES = 256 << 20

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
    (b"<!DOCTYPE", "HTML, a web page instead of the image"),
    (b"<html", "HTML, a web page instead of the image"),
    (b"\0\0\1\0", "ICO"),
    (b"version https://git-lfs", "a Git LFS pointer instead of the image, which `git lfs pull` fetches"),
)


def image_stream(image: EncodedImage) -> BinaryIO:
    match image.source:
        case bytes():
            return io.BytesIO(image.source)
        case Span():
            return span_file(image.source)
        case Path():
            return _checked_file(image.source)
        case Remote():
            return io.BytesIO(stored_object(image.source, stores.PIECE)[1])


def in_memory(item: EncodedImage | Video) -> EncodedImage | Video:
    """The media item with its encoded bytes in memory, so that decoding it reads nothing. Raises as `decode` does for its file."""
    if isinstance(item, Video):
        return replace(item, frames=tuple(_image_in_memory(frame) for frame in item.frames))
    return _image_in_memory(item)


def _image_in_memory(image: EncodedImage) -> EncodedImage:
    if isinstance(image.source, bytes):
        return image
    try:
        with image_stream(image) as file:
            return replace(image, source=file.read())
    except OSError as error:
        raise storage_failed("read", Path(image.name), error) from error


def _checked_file(path: Path) -> io.BufferedReader:
    _refuse_unreadable(path)
    try:
        return open(path, "rb")
    except OSError as error:
        raise _read_error(path, error) from error


def _refuse_unreadable(path: Path) -> None:
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):  # opening a FIFO would wait forever
            raise BadSample("not_a_file", "image", f"{path} is {'a folder' if stat.S_ISDIR(about.st_mode) else 'not a regular file'}")
        if about.st_dev in _system_devices():  # reading some of them fails, never ends, or does something
            raise BadSample("not_a_file", "image", f"{path} is a special file of the system (/proc, /sys or the like)")
        if about.st_size > MAX_FILE_BYTES:
            raise BadSample("file_too_large", "image", f"{path} has {about.st_size:,} bytes, over {MAX_FILE_BYTES:,}")
    except OSError as error:
        raise _read_error(path, error) from error


@lru_cache(maxsize=1)
def _system_devices() -> frozenset[int]:
    """The devices of files that only look regular: /proc/self/mem, /proc/kmsg, /sys/..."""
    mounts = ("/proc", "/proc/sys/fs/binfmt_misc", "/sys", "/sys/fs/cgroup", "/sys/kernel/debug", "/sys/kernel/tracing")
    root = os.stat("/").st_dev
    return frozenset(os.stat(mount).st_dev for mount in mounts if os.path.isdir(mount)) - {root}


def _read_error(path: Path, error: OSError) -> BadSample | StorageFailed:
    if error.errno in _NO_SUCH_FILE:
        return BadSample("missing_image", "image", f"{path} does not exist{_near_miss(path)}")
    if error.errno in _NOT_ALLOWED:
        return BadSample("unreadable", "image", f"{path} may not be read: {error.strerror}")
    return storage_failed("read", path, error)


def _near_miss(path: Path) -> str:
    """The probable reason why a file was not found, as the end of a sentence."""
    if "\\" in str(path):
        return ". It has backslashes; write / between folders"
    return near_name(path) if os.path.isdir(path.parent) else no_folder(path.parent)


def stored_object(location: Remote, length: int) -> tuple[Span, bytes]:
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


# Messages


def unidentified_error(name: str, head: bytes) -> BadSample:
    """The error for a file that Pillow does not identify as any of FORMATS."""
    known = next((kind for magic, kind in _ACCEPTED if re.match(magic, head, re.DOTALL)), None)
    if known is None:
        return BadSample("image_format", "image", f"{name} {_kind_of(head)}")
    return BadSample("broken_image", "image", f"{name} is {known}, of an unsupported kind or with a damaged header")


def _kind_of(head: bytes) -> str:
    """The probable kind of a file that is not an accepted image."""
    wanted = f"; {', '.join(FORMATS)} are accepted"
    if not head:
        return "is an empty file" + wanted
    for signature, name in _SIGNATURES:
        if head.lstrip().startswith(signature) or head.startswith(signature):
            return f"is {name}{wanted}"
    if head[4:8] == b"ftyp":
        return f"is HEIF, AVIF or a video (ISO media){wanted}"
    return "is not an image that can be read" + wanted


# Keys


def frames_of(item: EncodedImage | Video) -> tuple[EncodedImage, ...]:
    return item.frames if isinstance(item, Video) else (item,)


def image_key(image: EncodedImage) -> str:
    """Equal keys mean equal pixels: the location of the file, or the hash of its bytes (not of its pixels, which have lost their shape)."""
    match image.source:
        case bytes():
            return "sha256:" + hashlib.sha256(image.source).hexdigest()
        case Span(path, start, length):
            return f"{path}@{start}+{length}"
        case Path() | Remote():
            return str(image.source)


def content_key(image: EncodedImage) -> str:
    """Equal keys mean equal bytes, wherever they are stored. Raises as `decode` does for its file."""
    return image_key(_image_in_memory(image))


def media_key(item: EncodedImage | Video) -> str:
    """Equal keys mean equal pixels. Of a video: the hash of all its frames', since how large each is taken depends on their number."""
    if isinstance(item, EncodedImage):
        return image_key(item)
    return "video:" + hashlib.sha256("\n".join(image_key(frame) for frame in item.frames).encode("utf-8", "surrogatepass")).hexdigest()


def hold_out_draw(names: Sequence[str]) -> float:
    """A number from 0 to 1 that depends on the names of a row's images alone (on its id for text): the least of theirs, so that no
    image is on both sides."""
    return min(int.from_bytes(hashlib.sha256(("held out" + n).encode("utf-8", "surrogatepass")).digest()[:8], "big") for n in names) / 2**64


def names_of(sample: Sample | BadSample, id: str, root: Location) -> list[str]:
    """The names that decide what is held out: of images below the root, so that they are the same wherever the data is located."""
    if isinstance(sample, BadSample):
        return [id]
    return [image_key(image).removeprefix(str(root)) for image in sample.images] or [id]


# Damage that decoders do not notice


PNG_BEGIN = 8  # bytes of its signature
MANY_ZEROS = 8  # the share of a file: one part in this many


def wrong_chunk(png: bytes) -> str | None:
    """The first chunk of a PNG file whose checksum is not that of its bytes, or that is cut; None for a file that is as it was written.
    A file may end behind its data."""
    at, has_data = PNG_BEGIN, False
    view = memoryview(png)
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at) if at + 8 <= len(png) else (len(png), b"?")
        end = at + 12 + length
        name = kind.decode("latin-1") if kind.isalpha() else f"the chunk at byte {at:,}"
        if end > len(png):
            return None if has_data else name
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(png[end - 4 : end], "big"):
            return name
        if kind == b"IEND":
            return None
        has_data |= kind == b"IDAT"
        at = end
    return None


def is_complete(png: BinaryIO) -> bool:
    """Return whether the compressed data of a PNG file hold as many bytes as its header promises. They are decoded once more for that."""
    inflate, found, wanted = zlib.decompressobj(), 0, 0
    png.seek(8)
    while len(head := png.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind not in (b"IHDR", b"IDAT"):
            png.seek(length + 4, os.SEEK_CUR)
            continue
        data = png.read(length)
        png.seek(4, os.SEEK_CUR)
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", data[:13])
            bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
            for left, top, right, down in _ADAM7 if interlaced else ((0, 0, 1, 1),):
                columns, rows = -(-(width - left) // right), -(-(height - top) // down)
                wanted += rows * (1 + -(-columns * bits // 8)) if columns > 0 else 0
        while data and found < wanted and not inflate.eof and kind == b"IDAT":
            found += len(inflate.decompress(data, 1 << 20))
            data = inflate.unconsumed_tail
    return found >= wanted


_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # column, row, and their steps


_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # within a scan FF00 is a byte, FFD0 to FFD7 are restarts, FFFF fills


def jpeg_scans(jpeg: bytes) -> tuple[int, int | None]:
    """The scans of the first image of a JPEG file, and the position of its end marker, None if there is none."""
    at, scans = 2, 0
    while found := _MARKER.search(jpeg, at):
        if found[0] == b"\xff\xd9":
            return scans, found.start()
        scans += found[0] == b"\xff\xda"
        at = found.end() + int.from_bytes(jpeg[found.end() : found.end() + 2], "big")
    return scans, None


def ends_in_zeros(webp: bytes) -> bool:
    """Return whether the last eighth of the first image in a lossy WebP file is zeros. No encoder writes that: of one colour it writes a
    twentieth. A lossless image may end so."""
    at = 12
    while at + 8 <= len(webp):
        kind, size = struct.unpack_from("<4sI", webp, at)
        if kind == b"ANMF":  # the frame is within
            at += 24
            continue
        if kind in (b"VP8 ", b"VP8L"):
            data = webp[at + 8 : at + 8 + size]
            zeros = len(data) - len(data.rstrip(b"\0"))
            return kind == b"VP8 " and zeros > 64 and zeros * MANY_ZEROS > len(data)
        at += 8 + size + size % 2
    return False
