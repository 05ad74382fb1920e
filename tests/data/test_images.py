"""Files that cannot be read, and the reference processor for everything that follows decoding."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageFile
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from eyeline.core.batch import EncodedImage, Span, Video
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.image_rule import ImageRule, Square, Tiles, VideoLimits
from eyeline.core.randomness import rng_for
from eyeline.data.images.decode import decode, width_and_height
from eyeline.data.images.image_files import image_key, in_memory
from eyeline.data.images.patches import Augment, Planes, Resized, grey_images, image_patches, resize, with_augmentation
from tests.data.encoders import noise, saved


def encoded(image: Pillow.Image, format: str) -> EncodedImage:
    return EncodedImage(f"made.{format.lower()}", saved(image, format))


# Files (what they hold is in test_image_formats.py)


def test_what_names_no_image_file_is_rejected(tmp_path: Path) -> None:
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
        for look in (decode, width_and_height):
            with pytest.raises(BadSample) as caught:
                look(EncodedImage(name, tmp_path / name))
            assert caught.value.cause == cause, (name, look)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my photos/b.png", r"/my photos/b\.png does not exist$"),
        ("my fotos/new/b.png", r"nor does the folder .*/my fotos \(did you mean 'my photos'\?\)$"),
        ("MY PHOTOS/b.png", r"nor does the folder .*/MY PHOTOS \(did you mean 'my photos'\?\)$"),
        ("elsewhere/b.png", r"nor does the folder .*/elsewhere$"),
        ("my photos\\a.png", "It has backslashes; write / between folders"),
    ],
)
def test_a_missing_image_says_what_is_missing(draw: Callable[..., Path], tmp_path: Path, name: str, said: str) -> None:
    draw("my photos/a.png")
    with pytest.raises(BadSample, match=said):
        decode(EncodedImage(name, tmp_path / name))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge.png", "wb") as file:
        file.truncate(300 << 20)  # sparse
    with pytest.raises(BadSample, match="over 268,435,456") as caught:
        decode(EncodedImage("huge.png", tmp_path / "huge.png"))
    assert caught.value.cause == "file_too_large"


@pytest.mark.parametrize(
    ("number", "cause"), [(errno.EIO, None), (errno.ESTALE, None), (errno.EACCES, "unreadable"), (errno.EPERM, "unreadable")]
)
def test_failing_store_stops_and_unreadable_file_is_a_reject(
    draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, number: int, cause: str | None
) -> None:
    path = draw("a.png")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for what in ("builtins.open", "eyeline.data.images.image_files.os.stat"):
        with monkeypatch.context() as patch:
            patch.setattr(what, refuse)
            with pytest.raises(BadSample if cause else StorageFailed, match=rf"a\.png.*{os.strerror(number)}") as caught:
                decode(EncodedImage("a.png", path))
            assert getattr(caught.value, "cause", None) == cause


def test_tolerant_decoding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(Refused, match="LOAD_TRUNCATED_IMAGES"):
        decode(EncodedImage("cut.jpg", saved(Pillow.fromarray(noise(64, 64)), "JPEG")[:2000]))


def test_keys_tell_images_apart() -> None:
    """Two all-black images of 2×3 and 3×2 have equal pixel bytes and are not the same image."""
    one, two = (encoded(Pillow.new("RGB", size), "PNG") for size in ((2, 3), (3, 2)))
    assert image_key(one) != image_key(two)
    assert image_key(one) == image_key(replace(one, name="renamed"))
    assert image_key(EncodedImage("a", Path("/x/a.png"))) == "/x/a.png"
    parts = [EncodedImage("a", Span(Path("/x/a.tar"), start, length, (90, 1))) for start, length in ((0, 20), (20, 20), (0, 40))]
    assert len({image_key(part) for part in parts}) == 3


# Patches


@pytest.mark.parametrize("resample", ["bicubic", "bilinear", "nearest", "lanczos"])
@pytest.mark.parametrize(("size", "patch", "merge"), [(32, 8, 1), (32, 8, 2), (32, 4, 4), (30, 7, 2)])
@pytest.mark.parametrize("shape", [(45, 23), (8, 64), (32, 32), (1, 1)])
def test_pixels_equal_the_reference_processor(resample: str, size: int, patch: int, merge: int, shape: tuple[int, int]) -> None:
    rule = ImageRule(patch, merge, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), resample, Square(size))  # type: ignore[arg-type]
    png = encoded(Pillow.fromarray(noise(*shape)), "PNG")
    (image,) = image_patches(png, rule)
    reference = SiglipImageProcessorPil(
        size={"height": size, "width": size},
        resample=Pillow.Resampling[resample.upper()],
        image_mean=list(rule.mean),
        image_std=list(rule.std),
    )
    wanted = np.asarray(reference(Pillow.fromarray(decode(png)), return_tensors="np")["pixel_values"][0])
    assert wanted.shape == (3, size, size)
    assert len(image.patches_PC) == image.grid.patches == (size // patch) ** 2
    for patch_C, (row, column) in zip(image.patches_PC, image.places_P2, strict=True):
        found = patch_C.reshape(3, patch, patch) / 255
        found = (found - np.array(rule.mean)[:, None, None]) / np.array(rule.std)[:, None, None]
        there = wanted[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        np.testing.assert_allclose(found, there, atol=1e-6)


def test_patches_of_one_visual_token_lie_together() -> None:
    (image,) = grey_images(ImageRule(4, 2, (0, 0, 0), (1, 1, 1), "bicubic", Square(16)))
    places = image.places_P2
    assert places.tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1],  [0, 2], [0, 3], [1, 2], [1, 3],
        [2, 0], [2, 1], [3, 0], [3, 1],  [2, 2], [2, 3], [3, 2], [3, 3],
    ]  # fmt: skip


# Augmentation


WHOLE = ImageRule(8, 1, (0, 0, 0), (1, 1, 1), "bicubic", Square(8)).units(8, 8)


def changed(pixels: np.ndarray, augment: Augment, n: int) -> np.ndarray:
    planes = tuple(np.moveaxis(pixels, 2, 0))
    return whole(with_augmentation(Resized(WHOLE, ((planes,),)), augment, partial(rng_for, 0, "t", n)).canvases[0][0])


def whole(planes: Planes) -> np.ndarray:
    return np.ascontiguousarray(np.stack(planes, 2))


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
    """A video that jumps, or tiles that do not fit together, would be another image."""
    still = encoded(Pillow.fromarray(np.broadcast_to(noise(16, 16), (16, 16, 3))), "PNG")
    video = Video("f", (still,) * 3, (0.0, 1.0, 2.0))
    rule = ImageRule(4, 1, (0, 0, 0), (1, 1, 1), "bicubic", Tiles(8), frames=2, video=VideoLimits(1, 10_000))
    draw = partial(rng_for, 0, "t", 3)
    frames = [whole(frame) for slice in with_augmentation(resize(video, rule), Augment(shift=3), draw).canvases for frame in slice]
    assert len(frames) == 4
    assert all((frame == frames[0]).all() for frame in frames)
    assert (frames[0] != decode(still)).any()
    tall = resize(encoded(Pillow.fromarray(noise(8, 32)), "PNG"), rule)
    tiles = with_augmentation(tall, Augment(flip=True, shift=1), draw).canvases[1:]
    assert len(tiles) == 4
    assert all(tile[0] is tiles[0][0] for tile in tiles)


def test_resizing_to_the_same_size_changes_nothing(rule: ImageRule) -> None:
    pixels = noise(32, 32)
    assert (whole(resize(encoded(Pillow.fromarray(pixels), "PNG"), rule).canvases[0][0]) == pixels).all()


def test_the_stand_in_is_grey(rule: ImageRule) -> None:
    (image,) = grey_images(rule)
    assert (image.patches_PC == 128).all()
    assert (image.patches_PC.shape, image.tokens) == ((16, 192), 4)


@pytest.mark.parametrize(
    "path", ["/proc/self/mem", "/proc/kmsg", "/proc/self/status", "/proc/meminfo", "/sys/kernel/uevent_seqnum", "/dev/zero"]
)
def test_files_of_the_system_are_no_images(tmp_path: Path, path: str) -> None:
    """Reading some fails, and of some it never ends."""
    if not Path(path).exists():
        pytest.skip("this system has no such file")
    (tmp_path / "a.png").symlink_to(path)
    for given in (Path(path), tmp_path / "a.png"):
        for look in (width_and_height, decode, in_memory):
            with pytest.raises(BadSample, match=r"of the system|not a regular file") as caught:
                look(EncodedImage(path, given))
            assert caught.value.cause == "not_a_file"


NEAR = {
    "Cat.jpg": "'cat.jpg'",
    "cat.JPEG": "'cat.jpg'",
    "dog.jpg": "'dog.jpeg'",
    "cat": "'cat.jpg'",
    "my%20dog.png": "'my dog.png'",
    " cat.jpg": "'cat.jpg'",
    "caf\u00e9.png": "'cafe\u0301.png'",
    "000000000009.jpg": "'COCO_train2014_000000000009.jpg'",
    "COCO_val_000000000010.jpg": "'000000000010.png'",
    "in.png": "'in/in.png'",
    "in/cat.jpg": "cat.jpg', without the folder 'in'",
}


@pytest.mark.parametrize("name", NEAR)
def test_a_missing_image_whose_near_name_is_there_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    there = ["cat.jpg", "dog.jpeg", "my dog.png", "cafe\u0301.png", "COCO_train2014_000000000009.jpg", "000000000010.png", "in/in.png"]
    for one in there:
        (tmp_path / one).touch()
    with pytest.raises(BadSample) as caught:
        decode(EncodedImage(name, tmp_path / name))
    assert caught.value.cause == "missing_image"
    assert caught.value.message.startswith(f"{tmp_path / name} does not exist (did you mean ") and NEAR[name] in caught.value.message
    with pytest.raises(BadSample, match=r"bird\.jpg does not exist$"):
        decode(EncodedImage("bird.jpg", tmp_path / "bird.jpg"))
