"""The zoo: each odd picture with its fixed result; and the reference processor for everything that follows decoding."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageFile, ImageOps, PngImagePlugin
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from eyeline.core.batch import Picture, Video
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.facts import Film, ImageRule, Square, Tiles
from eyeline.core.randomness import rng_for
from eyeline.data.images import (
    Augment,
    Resized,
    augmented,
    decode,
    grey,
    oddities,
    open_picture,
    picture_key,
    prepare,
    resized,
)


def encoded(image: Pillow.Image, format: str, **options) -> Picture:
    file = io.BytesIO()
    image.save(file, format, **options)
    return Picture(f"made.{format.lower()}", file.getvalue())


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


# Sound pictures


@pytest.mark.parametrize("format", ["PNG", "BMP"])
def test_lossless_formats_are_read_exactly(format: str) -> None:
    pixels = noise(7, 5)
    assert (decode(encoded(Pillow.fromarray(pixels), format)) == pixels).all()


def test_jpeg_and_webp_are_near() -> None:
    smooth = np.broadcast_to(np.linspace(0, 255, 32, dtype=np.uint8)[None, :, None], (32, 32, 3))
    for picture in (encoded(Pillow.fromarray(smooth), "JPEG", quality=95), encoded(Pillow.fromarray(smooth), "WEBP", quality=95)):
        assert np.abs(decode(picture).astype(int) - smooth).max() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_applied_once(format: str, orientation: int) -> None:
    image = Pillow.fromarray(np.kron(noise(4, 2), np.ones((8, 8, 1), np.uint8)))
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    picture = encoded(image, format, exif=exif)
    with Pillow.open(io.BytesIO(picture.source)) as reference:
        upright = np.asarray(ImageOps.exif_transpose(reference).convert("RGB"))
    assert (decode(picture) == upright).all()
    assert open_picture(picture) == (upright.shape[1], upright.shape[0])
    assert upright.shape[:2] == ((16, 32) if orientation < 5 else (32, 16))
    assert ("turned by its EXIF orientation" in oddities(picture)) == (orientation > 1)


def test_broken_metadata_does_not_spoil_pixels() -> None:
    pixels = noise(16, 8)
    picture = encoded(Pillow.fromarray(pixels), "PNG", exif=b"Exif\0\0MM\0*\0\0\xff\xff garbage")
    assert (decode(picture) == pixels).all()


WHITE = 255
TRANSPARENT = [
    # mode, pixel, what it becomes over white
    ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
    ("RGBA", (10, 20, 30, 0), (255, 255, 255)),  # the hidden colour does not appear
    ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
    ("RGBA", (255, 0, 0, 128), (255, 127, 127)),
    ("LA", (0, 0), (255, 255, 255)),
    ("LA", (100, 255), (100, 100, 100)),
    ("LA", (0, 128), (127, 127, 127)),
]


@pytest.mark.parametrize(("mode", "pixel", "wanted"), TRANSPARENT)
def test_transparency_is_laid_over_white(mode: str, pixel: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    picture = encoded(Pillow.new(mode, (3, 2), pixel), "PNG")
    assert decode(picture).tolist() == [[list(wanted)] * 3] * 2
    assert "transparent (laid over white)" in oddities(picture)


def palette_picture(**options) -> Picture:
    image = Pillow.new("P", (2, 1))
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.putdata([0, 1])
    return encoded(image, "PNG", **options)


def test_palettes_with_and_without_transparency() -> None:
    assert decode(palette_picture()).tolist() == [[[200, 0, 0], [0, 0, 200]]]
    assert decode(palette_picture(transparency=0)).tolist() == [[[255, 255, 255], [0, 0, 200]]]
    assert decode(palette_picture(transparency=b"\x80\xff")).tolist() == [[[227, 127, 127], [0, 0, 200]]]


def test_a_colour_declared_transparent_is_white() -> None:
    image = Pillow.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    assert decode(encoded(image, "PNG", transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [9, 9, 9]]]


def test_grey_one_bit_and_cmyk() -> None:
    assert decode(encoded(Pillow.new("L", (1, 1), 77), "PNG")).tolist() == [[[77, 77, 77]]]
    assert decode(encoded(Pillow.new("1", (1, 1), 1), "PNG")).tolist() == [[[255, 255, 255]]]
    cmyk = decode(encoded(Pillow.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100))
    assert np.abs(cmyk[4, 4].astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize(("wide", "wanted"), [(0, 0), (128, 0), (129, 1), (257, 1), (32768, 128), (65278, 254), (65535, 255)])
def test_sixteen_bit_grey_is_scaled_not_clipped(wide: int, wanted: int) -> None:
    picture = encoded(Pillow.fromarray(np.array([[wide]], np.uint16)), "PNG")
    assert decode(picture).tolist() == [[[wanted] * 3]]


def test_an_animation_is_its_first_frame() -> None:
    frames = [Pillow.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    for format in ("GIF", "WEBP", "PNG"):
        picture = encoded(frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {}))
        assert (decode(picture) == [255, 0, 0]).all(), format
        assert "animated (its first frame is used)" in oddities(picture)


def test_a_file_and_its_bytes_give_the_same_pixels(draw: Callable[..., Path]) -> None:
    path = draw("a.png")
    assert (decode(Picture("a", path)) == decode(Picture("a", path.read_bytes()))).all()


def test_small_and_long_pictures_are_remarked_and_used(rule: ImageRule) -> None:
    picture = encoded(Pillow.fromarray(noise(499, 1)), "PNG")
    assert oddities(picture) == ["a side under 28 pixels", "longer than 10:1"]
    assert prepare(picture, rule)[0].patches_PC.shape == (16, 192)


# Pictures that are rejected


def png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with hardly any pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def half_of(picture: Picture) -> bytes:
    assert isinstance(picture.source, bytes)
    return picture.source[: len(picture.source) // 2]


def with_text_bomb() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("comment", "0" * (80 << 20), zip=True)
    made = encoded(Pillow.new("RGB", (2, 2)), "PNG", pnginfo=info).source
    assert isinstance(made, bytes)
    return made


BIG = Pillow.fromarray(noise(64, 64))
BAD_BYTES = {
    "truncated JPEG": (lambda: half_of(encoded(BIG, "JPEG")), "broken_image", "truncated"),
    "truncated PNG": (lambda: half_of(encoded(BIG, "PNG")), "broken_image", ""),
    "truncated WebP": (lambda: half_of(encoded(BIG, "WEBP")), "broken_image|image_format", ""),
    "truncated GIF": (lambda: half_of(encoded(BIG.convert("P"), "GIF")), "broken_image", ""),
    "bomb": (lambda: png(60000, 60000), "too_many_pixels", "3600000000|60000"),
    "a bomb that Pillow only warns of": (lambda: png(10000, 10000), "too_many_pixels", "10000×10000"),
    "no pixels": (lambda: png(0, 5), "broken_image|empty_image|image_format", ""),
    "cut in its header": (lambda: png(4, 4)[:20], "broken_image|image_format", ""),
    "compressed text bomb": (with_text_bomb, "broken_image", "too large|exceed"),
    "empty file": (lambda: b"", "image_format", "an empty file"),
    "text": (lambda: b"hello, I am no picture", "image_format", "no picture that can be read; JPEG, PNG, WEBP, GIF, BMP are accepted"),
    "HTML": (lambda: b"<!DOCTYPE html><html>404</html>", "image_format", "HTML"),
    "TIFF": (lambda: encoded(BIG, "TIFF").source, "image_format", "TIFF"),
    "EPS": (lambda: encoded(BIG, "EPS").source, "image_format", "EPS"),
    "PSD": (lambda: b"8BPS\0\1" + bytes(100), "image_format", "PSD"),
    "FITS": (lambda: b"SIMPLE  =                    T" + bytes(100), "image_format", "FITS"),
    "PDF": (lambda: encoded(BIG, "PDF").source, "image_format", "PDF"),
    "ICO": (lambda: encoded(BIG, "ICO").source, "image_format", "ICO"),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image_format", "SVG"),
    "AVIF": (lambda: b"\0\0\0\x20ftypavif" + bytes(50), "image_format", "AVIF"),
    "an LFS pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "image_format", "LFS"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
@pytest.mark.parametrize("suffix", ["bytes", "file"])
def test_unusable_pictures_are_rejected_by_name(name: str, suffix: str, tmp_path: Path) -> None:
    make, cause, message = BAD_BYTES[name]
    data = make()
    assert isinstance(data, bytes)
    path = tmp_path / "odd.png"
    path.write_bytes(data)
    picture = Picture("odd.png", data if suffix == "bytes" else path)
    with pytest.raises(BadSample, match=message or None) as caught:
        decode(picture)
    assert caught.value.cause in cause.split("|")
    assert "odd.png" in caught.value.message


def test_what_names_no_picture_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "file").write_text("")
    cases = {
        "absent.png": "missing_image",
        "file/below.png": "missing_image",
        "loop.png": "missing_image",
        "x" * 300: "missing_image",
        "pipe.png": "not_a_file",
        ".": "not_a_file",
    }
    for name, cause in cases.items():
        for look in (decode, open_picture):
            with pytest.raises(BadSample) as caught:
                look(Picture(name, tmp_path / name))
            assert caught.value.cause == cause, (name, look)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my photos/b.png", r"/my photos/b\.png does not exist$"),
        ("my fotos/new/b.png", r"nor does the folder .*/my fotos \(Did you mean 'my photos'\?\)$"),
        ("elsewhere/b.png", r"nor does the folder .*/elsewhere$"),
        ("my photos\\a.png", "It has backslashes, and / is what sets folders apart"),
    ],
)
def test_a_missing_picture_says_what_is_missing(draw: Callable[..., Path], tmp_path: Path, name: str, said: str) -> None:
    draw("my photos/a.png")
    with pytest.raises(BadSample, match=said):
        decode(Picture(name, tmp_path / name))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge.png", "wb") as file:
        file.truncate(300 << 20)  # sparse
    with pytest.raises(BadSample, match="over 268,435,456") as caught:
        decode(Picture("huge.png", tmp_path / "huge.png"))
    assert caught.value.cause == "file_too_large"


def test_a_store_that_fails_is_no_bad_sample(draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = draw("a.png")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(StorageFailed, match=r"could not read .*a\.png: Permission denied"):
        decode(Picture("a.png", path))


def test_tolerant_decoding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(Refused, match="LOAD_TRUNCATED_IMAGES"):
        decode(Picture("cut.jpg", half_of(encoded(BIG, "JPEG"))))


def test_keys_tell_pictures_apart() -> None:
    """Two all-black pictures of 2×3 and 3×2 have equal pixel bytes and are not the same picture."""
    one, two = (encoded(Pillow.new("RGB", size), "PNG") for size in ((2, 3), (3, 2)))
    assert picture_key(one) != picture_key(two)
    assert picture_key(one) == picture_key(replace(one, name="renamed"))
    assert picture_key(Picture("a", Path("/x/a.png"))) == "/x/a.png"


# Patches


@pytest.mark.parametrize("resample", ["bicubic", "bilinear", "nearest", "lanczos"])
@pytest.mark.parametrize(("size", "patch", "merge"), [(32, 8, 1), (32, 8, 2), (32, 4, 4), (30, 7, 2)])
@pytest.mark.parametrize("shape", [(45, 23), (8, 64), (32, 32), (1, 1)])
def test_pixels_equal_the_reference_processor(resample: str, size: int, patch: int, merge: int, shape: tuple[int, int]) -> None:
    rule = ImageRule(patch, merge, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), resample, Square(size))  # type: ignore[arg-type]
    picture = encoded(Pillow.fromarray(noise(*shape)), "PNG")
    (image,) = prepare(picture, rule)
    reference = SiglipImageProcessorPil(
        size={"height": size, "width": size},
        resample=Pillow.Resampling[resample.upper()],
        image_mean=list(rule.mean),
        image_std=list(rule.std),
    )
    wanted = np.asarray(reference(Pillow.fromarray(decode(picture)), return_tensors="np")["pixel_values"][0])
    assert wanted.shape == (3, size, size)
    assert len(image.patches_PC) == image.grid.patches == (size // patch) ** 2
    for patch_C, (row, column) in zip(image.patches_PC, image.places_P2, strict=True):
        found = patch_C.reshape(3, patch, patch) / 255
        found = (found - np.array(rule.mean)[:, None, None]) / np.array(rule.std)[:, None, None]
        there = wanted[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        np.testing.assert_allclose(found, there, atol=1e-6)


def test_patches_of_one_visual_token_lie_together() -> None:
    (image,) = grey(ImageRule(4, 2, (0, 0, 0), (1, 1, 1), "bicubic", Square(16)))
    places = image.places_P2
    assert places.tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1],  [0, 2], [0, 3], [1, 2], [1, 3],
        [2, 0], [2, 1], [3, 0], [3, 1],  [2, 2], [2, 3], [3, 2], [3, 3],
    ]  # fmt: skip


# Augmentation


WHOLE = ImageRule(8, 1, (0, 0, 0), (1, 1, 1), "bicubic", Square(8)).units(8, 8)


def changed(pixels: np.ndarray, augment: Augment, n: int) -> np.ndarray:
    return augmented(Resized(WHOLE, ((pixels,),)), augment, partial(rng_for, 0, "t", n)).canvases[0][0]


def test_augmentation_flips_and_shifts() -> None:
    square = noise(8, 8)
    seen = {changed(square, Augment(flip=True), n).tobytes() for n in range(20)}
    assert seen == {square.tobytes(), np.ascontiguousarray(square[:, ::-1]).tobytes()}
    shifted = [changed(square, Augment(shift=2), n) for n in range(60)]
    padded = np.pad(square, ((2, 2), (2, 2), (0, 0)), mode="edge")
    possible = [np.ascontiguousarray(padded[a : a + 8, b : b + 8]).tobytes() for a in range(5) for b in range(5)]
    assert {s.tobytes() for s in shifted} <= set(possible)
    assert len({s.tobytes() for s in shifted}) > 12


def test_augmentation_has_an_address() -> None:
    square, change = noise(8, 8), Augment(flip=True, shift=3)
    first, again, other = (changed(square, change, n) for n in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    assert not Augment().active


def test_frames_and_tiles_are_augmented_alike() -> None:
    """A film that jumps, or tiles that do not fit together, would be another picture."""
    still = encoded(Pillow.fromarray(np.broadcast_to(noise(16, 16), (16, 16, 3))), "PNG")
    film = Video("f", (still,) * 3, (0.0, 1.0, 2.0))
    rule = ImageRule(4, 1, (0, 0, 0), (1, 1, 1), "bicubic", Tiles(8), frames=2, film=Film(1, 10_000))
    draw = partial(rng_for, 0, "t", 3)
    frames = [frame for slice in augmented(resized(film, rule), Augment(shift=3), draw).canvases for frame in slice]
    assert len(frames) == 4
    assert all((frame == frames[0]).all() for frame in frames)
    assert (frames[0] != decode(still)).any()
    tall = resized(encoded(Pillow.fromarray(noise(8, 32)), "PNG"), rule)
    tiles = augmented(tall, Augment(flip=True, shift=1), draw).canvases[1:]
    assert len(tiles) == 4
    assert all(tile[0] is tiles[0][0] for tile in tiles)


def test_resizing_to_the_same_size_changes_nothing(rule: ImageRule) -> None:
    pixels = noise(32, 32)
    assert (resized(encoded(Pillow.fromarray(pixels), "PNG"), rule).canvases[0][0] == pixels).all()


def test_the_stand_in_is_grey(rule: ImageRule) -> None:
    (image,) = grey(rule)
    assert (image.patches_PC == 128).all()
    assert (image.patches_PC.shape, image.tokens) == ((16, 192), 4)
