"""Integrity checks of image formats, for damage that their decoders do not notice."""

import os
import re
import struct
import zlib
from typing import BinaryIO

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
