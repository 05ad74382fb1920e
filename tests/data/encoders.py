"""Image files made by hand: what Pillow does not write, byte by byte as the formats' specifications have it."""

import io
import struct
import zlib
from base64 import b64decode
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image as Pillow


def saved(image: Pillow.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


# PNG


def chunk(kind: bytes, body: bytes, crc: int | None = None) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body) if crc is None else crc)


GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6  # colour types


def png(
    width: int,
    height: int,
    rows: Iterable[bytes],
    colour: int = RGB,
    depth: int = 8,
    interlaced: bool = False,
    before: bytes = b"",
    after: bytes = b"",
    crc: int | None = None,
    pieces: int = 1 << 30,
) -> bytes:
    """A PNG with these rows, unfiltered; chunks before and after its data, which is cut into chunks of `pieces` bytes."""
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    body = b"".join(chunk(b"IDAT", data[n : n + pieces], crc) for n in range(0, len(data), pieces))
    return b"\x89PNG\r\n\x1a\n" + header + before + body + after + chunk(b"IEND", b"")


def adam7(pixels: np.ndarray) -> list[bytes]:
    """The rows of an interlaced PNG in order."""
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    parts = [pixels[top::down, left::right] for left, top, right, down in passes]
    return [row.tobytes() for part in parts if part.shape[1] for row in part]


def apng(frames: Sequence[np.ndarray], still: np.ndarray | None = None) -> bytes:
    """An animated PNG; what shows where animations are not known is its first frame, or `still`."""
    height, width = frames[0].shape[:2]
    different = {id(frame): frame for frame in frames}
    packed = {name: zlib.compress(b"".join(b"\0" + row.tobytes() for row in frame)) for name, frame in different.items()}
    before, after, number = chunk(b"acTL", struct.pack(">II", len(frames), 0)), bytearray(), 0
    for n, frame in enumerate(frames):
        control = chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, width, height, 0, 0, 1, 10, 0, 0))
        number += 1
        if n == 0 and still is None:
            before += control
            continue
        after += control + chunk(b"fdAT", struct.pack(">I", number) + packed[id(frame)])
        number += 1
    shown = frames[0] if still is None else still
    return png(width, height, [row.tobytes() for row in shown], before=before, after=bytes(after))


def xmp(orientation: int) -> bytes:
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


# GIF


def gif(width: int, height: int, *blocks: bytes, colours: bytes = bytes([200, 0, 0, 0, 0, 200]), end: bytes = b";") -> bytes:
    """A GIF of two colours, or of none of its own."""
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF0 if colours else 0x70, 0, 0) + colours + b"".join(blocks) + end


def gif_frame(left: int, top: int, width: int, height: int, indices: Sequence[int], transparent: int | None = None) -> bytes:
    """A frame whose data has these indices, perhaps fewer than it should: every third code clears, so that all codes have three bits."""
    codes = [code for n, index in enumerate(indices) for code in ((4, index) if n % 2 == 0 else (index,))] + [5]
    packed = sum(code << 3 * n for n, code in enumerate(codes)).to_bytes(-(-3 * len(codes) // 8), "little")
    blocks = b"".join(bytes([len(packed[n : n + 255])]) + packed[n : n + 255] for n in range(0, len(packed), 255)) + b"\0"
    control = b"" if transparent is None else b"!\xf9\x04\x01\0\0" + bytes([transparent]) + b"\0"
    return control + b"," + struct.pack("<HHHHB", left, top, width, height, 0) + b"\x02" + blocks


# BMP


def bmp(width: int, height: int, bits: int, data: bytes, compression: int = 0, palette: bytes = b"") -> bytes:
    """A BMP; a negative height is that of an image that begins at its top."""
    start = 54 + len(palette)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(data), 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + info + palette + data


# WebP


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for kind, data in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def u24(value: int) -> bytes:
    return struct.pack("<I", value)[:3]


def animated_webp(width: int, height: int, frames: Sequence[bytes]) -> bytes:
    """A WebP animation of whole frames, each a still WebP file."""
    head = b"\x02\0\0\0" + u24(width - 1) + u24(height - 1)
    place = u24(0) + u24(0) + u24(width - 1) + u24(height - 1) + u24(100) + b"\0"
    return riff((b"VP8X", head), (b"ANIM", bytes(6)), *((b"ANMF", place + frame[12:]) for frame in frames))


# JPEG


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def with_segments(jpeg: bytes, *segments: bytes) -> bytes:
    """The file with these after its first marker."""
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def exif(orientation: int, thumbnail: bytes = b"") -> bytes:
    entries = [(0x0112, 3, 1, struct.pack("<HH", orientation, 0))]
    body = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries))
    body += b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in entries) + struct.pack("<I", 0) + thumbnail
    return segment(0xE1, b"Exif\0\0" + body)


# Made with libjpeg-turbo 2.1.5 at quality 100, asked for what Pillow's saver does not ask it for. 16×8 pixels of RAMPS; as CMYK,
# cyan is its red, magenta its green, yellow 0 and black 40
Y, X = np.mgrid[:8, :16]
RAMPS = np.stack([X * 16, Y * 32, 255 - X * 16], -1).astype(np.uint8)
ARITHMETIC = b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQH/2wBDAQEB"
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQH/yQARCAAIABADAREAAhEBAxEB/8wACgAQEAUBEBEF/9oA"
    "DAMBAAIRAxEAPwD/ANyUJ4Xf5y5oWd6TpRKCNgtS8Db71GzjiTQ2cvcAoJ5m0HV+nw+NyMQrRRcV1W6oePO/QGRpW8tw1tIfMIhdYs48wnRu/F4wRNsN8QZEmAP015Pc"
    "WUwrLpZAfUOYHN+A5kWU/9k="
)
ARITHMETIC_PROGRESSIVE = b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQH/2wBDAQEB"
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQH/ygARCAAIABADAREAAhEBAxEB/8wABgAQARD/2gAMAwEA"
    "AhADEAAAAf8AuR87HoNZgySsDD7/zAAEEAX/2gAIAQEAAQUCFffutj6ocP/MAAQRBf/aAAgBAwEBPwEWmzkNWvwsiibo6HlIndo8XxYYnv/MAAQRBf/aAAgBAgEBPwE7"
    "oHO4jaSGv/7Rntc6JIFFz/2DoP/MAAQQBf/aAAgBAQAGPwIKshZ4D7b/zAAEEAX/2gAIAQEAAT8h1h6nT9nbLP/aAAwDAQACAAMAAAAQGv/MAAQRBf/aAAgBAwEBPxBM"
    "p0iAAFqmYxPiX8OY2buA/8wABBEF/9oACAECAQE/ENMTSuWh8eH0M9NlyTP9JYD/zAAEEAX/2gAIAQEAAT8QeYU2SJRuwgXS3P/Z"
)
YCCK = b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAC/9sAQwABAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB/9sAQwEBAQEB"
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB/8AAFAgACAAQBAERAAIRAQMRAQQRAP/EAB8AAAEFAQEBAQEB"
    "AAAAAAAAAAABAgMEBQYHCAkKC//EALUQAAIBAwMCBAMFBQQEAAABfQECAwAEEQUSITFBBhNRYQcicRQygZGhCCNCscEVUtHwJDNicoIJChYXGBkaJSYnKCkqNDU2Nzg5"
    "OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6g4SFhoeIiYqSk5SVlpeYmZqio6Slpqeoqaqys7S1tre4ubrCw8TFxsfIycrS09TV1tfY2drh4uPk5ebn6Onq"
    "8fLz9PX29/j5+v/EAB8BAAMBAQEBAQEBAQEAAAAAAAABAgMEBQYHCAkKC//EALURAAIBAgQEAwQHBQQEAAECdwABAgMRBAUhMQYSQVEHYXETIjKBCBRCkaGxwQkjM1Lw"
    "FWJy0QoWJDThJfEXGBkaJicoKSo1Njc4OTpDREVGR0hJSlNUVVZXWFlaY2RlZmdoaWpzdHV2d3h5eoKDhIWGh4iJipKTlJWWl5iZmqKjpKWmp6ipqrKztLW2t7i5usLD"
    "xMXGx8jJytLT1NXW19jZ2uLj5OXm5+jp6vLz9PX29/j5+v/aAA4EAQACEQMRBAAAPwD8kvhR/wAEqc/Zv+Kb4+T/AJdOvTgfJ0/n9M5/yK4x+mD/ABf+FT+b/l969Ob5"
    "26vex/NH0bfp6v8A2D/haX/Lr/mJXl5n9XFfpn8KP+CVP/Ht/wAU3/c/5dOg4/2Ov+fQV/KfGP0wf4v/AAq2+L/l92/7e6d9k9kf9AH0bfp6v/YP+Fpf8uv+YleXmFf/"
    "2Q=="
)
