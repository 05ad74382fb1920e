"""Encoded images and the files that hold them: opening with checks, keys of equal images, and messages about what cannot be read."""

import errno
import hashlib
import io
import os
import re
import stat
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
from eyeline.data.files.near import near_name, no_folder

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


def in_memory(medium: EncodedImage | Video) -> EncodedImage | Video:
    """The medium with its encoded bytes in memory, so that decoding it reads nothing. Raises as `decode` does for its file."""
    if isinstance(medium, Video):
        return replace(medium, frames=tuple(_image_in_memory(frame) for frame in medium.frames))
    return _image_in_memory(medium)


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
        if not stat.S_ISREG(about.st_mode):  # opening a FIFO would wait for ever
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


def frames_of(medium: EncodedImage | Video) -> tuple[EncodedImage, ...]:
    return medium.frames if isinstance(medium, Video) else (medium,)


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


def medium_key(medium: EncodedImage | Video) -> str:
    """Equal keys mean equal pixels. Of a video: the hash of all its frames', since how large each is taken depends on their number."""
    if isinstance(medium, EncodedImage):
        return image_key(medium)
    return "video:" + hashlib.sha256("\n".join(image_key(frame) for frame in medium.frames).encode("utf-8", "surrogatepass")).hexdigest()


def hold_out_draw(names: Sequence[str]) -> float:
    """A number from 0 to 1 that depends on the names of a row's images alone (on its id for text): the least of theirs, so that no
    image is on both sides."""
    return min(int.from_bytes(hashlib.sha256(("held out" + n).encode("utf-8", "surrogatepass")).digest()[:8], "big") for n in names) / 2**64


def names_of(sample: Sample | BadSample, id: str, root: Location) -> list[str]:
    """The names that decide what is held out: of images below the root, so that they are the same wherever the data is located."""
    if isinstance(sample, BadSample):
        return [id]
    return [image_key(image).removeprefix(str(root)) for image in sample.images] or [id]
