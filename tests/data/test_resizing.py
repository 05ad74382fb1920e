"""Native sizes, tiles and videos: sizes, grids and pixels equal those of transformers' processors (the ones that use Pillow)."""

import io
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from torch.nn import functional as F
from transformers import image_processing_backends
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_resize
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from eyeline.core.batch import EncodedImage, Image, Video
from eyeline.core.errors import BadSample
from eyeline.core.image_rule import Area, ImageRule, Patches, Tiles, VideoLimits
from eyeline.data.images.decode import decode, size_of
from eyeline.data.images.image_files import media_key
from eyeline.data.images.patches import image_patches, units_of

BICUBIC = Pillow.Resampling.BICUBIC
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
LEAST, MOST = 56 * 56, 28 * 28 * 12
QWEN = ImageRule(14, 2, MEAN, STD, "bicubic", Area(LEAST, MOST), frames=2, video=VideoLimits(56 * 56, 28 * 28 * 40))
NAFLEX = ImageRule(16, 1, MEAN, STD, "bilinear", Patches(36))
TILED = ImageRule(8, 2, MEAN, STD, "bicubic", Tiles(32))

sides = st.integers(1, 400)


def noise(height: int, width: int, seed: int = 0, levels: tuple[int, int] = (0, 256)) -> EncodedImage:
    file = io.BytesIO()
    Pillow.fromarray(np.random.default_rng(seed).integers(*levels, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return EncodedImage(f"{height}x{width}", file.getvalue())


def normalised(image: Image) -> np.ndarray:
    """Patches as the model sees them: [P, channel, the rest]."""
    pixels_P3c = image.patches_PC.reshape(len(image.patches_PC), 3, -1) / 255
    return (pixels_P3c - np.array(MEAN)[:, None]) / np.array(STD)[:, None]


def shown(image: EncodedImage) -> Pillow.Image:
    return Pillow.fromarray(decode(image))


ODD = [
    (70, 70),
    (1, 1),
    (1, 150),
    (27, 28),
    (28, 29),
    (41, 42),
    (42, 43),
    (13, 14),
    (97, 31),
    (300, 2),
    (255, 257),
    (56, 56),
    (196, 12),
    (333, 100),
]


@pytest.mark.parametrize("size", ODD)
def test_qwen_pixels_and_grids_equal_the_reference(size: tuple[int, int]) -> None:
    encoded = noise(*size)
    (image,) = image_patches(encoded, QWEN)
    theirs = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, image_mean=MEAN, image_std=STD, size={"shortest_edge": LEAST, "longest_edge": MOST}
    )(shown(encoded), return_tensors="np")
    assert [1, *image.grid] == theirs["image_grid_thw"][0].tolist()
    np.testing.assert_allclose(normalised(image).reshape(theirs["pixel_values"].shape), theirs["pixel_values"], atol=1e-6)
    assert image.tokens == image.grid.patches // 4


@pytest.mark.parametrize("size", ODD)
def test_naflex_pixels_and_grids_equal_the_reference(size: tuple[int, int]) -> None:
    encoded = noise(*size)
    (image,) = image_patches(encoded, NAFLEX)
    reference = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=36, image_mean=MEAN, image_std=STD)
    theirs = reference(shown(encoded), return_tensors="np")
    assert list(image.grid) == theirs["spatial_shapes"][0].tolist()
    wanted = theirs["pixel_values"][0][theirs["pixel_attention_mask"][0] > 0]
    channels_last = normalised(image).reshape(-1, 3, 16, 16).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(channels_last.reshape(wanted.shape), wanted, atol=1e-6)


@pytest.mark.parametrize("size", [(50, 50), (20, 20), (64, 64), (65, 64), (30, 100), (200, 40), (33, 64), (1, 300), (46, 45)])
def test_tiles_equal_the_reference(size: tuple[int, int]) -> None:
    """The reference writes the whole last; we write it first, as nanoVLM does."""
    encoded = noise(*size)
    whole, *tiles = image_patches(encoded, TILED)
    reference = GotOcr2ImageProcessorPil(
        crop_to_patches=True, max_patches=4, size={"height": 32, "width": 32}, image_mean=MEAN, image_std=STD
    )
    theirs = reference(shown(encoded), return_tensors="np")
    assert theirs["num_patches"][0] == 1 + len(tiles)
    for image, wanted in zip([*tiles, whole], theirs["pixel_values"], strict=True):
        whole_image = np.empty((3, 32, 32))
        for patch, (row, column) in zip(normalised(image), image.places_P2, strict=True):
            whole_image[:, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = patch.reshape(3, 8, 8)
        np.testing.assert_allclose(whole_image, wanted, atol=1e-6)


def test_tiles_say_where_they_are() -> None:
    assert [unit.mark for unit in TILED.units(20, 100)] == ["<|global_image|>", *(f"<row_1_col_{n}>" for n in (1, 2, 3, 4))]
    square = ["<|global_image|>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"]
    assert [unit.mark for unit in TILED.units(100, 100)] == square
    assert [unit.mark for unit in TILED.units(10, 10)] == square[:1]
    assert len(ImageRule(8, 2, MEAN, STD, "bicubic", Tiles(32, most=3)).units(100, 100)) == 1
    written = {unit.mark for height in range(1, 300, 7) for width in range(1, 300, 7) for unit in TILED.units(height, width)}
    assert written == set(TILED.marks)
    assert NAFLEX.marks == ()


@settings(max_examples=300, deadline=None)
@given(sides, sides)
@example(200, 1)
@example(41, 43)
@example(70, 98)
def test_any_size_becomes_what_the_references_say(height: int, width: int) -> None:
    reference = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2)
    if max(height, width) <= 200 * min(height, width):
        wanted = reference.get_number_of_image_patches(height, width, {"min_pixels": LEAST, "max_pixels": MOST})
        assert QWEN.units(height, width)[0].grid.patches == wanted
    (naflex,) = NAFLEX.units(height, width)
    assert naflex.grid.patches <= 36
    (merged,) = ImageRule(16, 3, MEAN, STD, "bilinear", Patches(81)).units(height, width)
    assert merged.grid.rows % 3 == merged.grid.columns % 3 == 0
    assert merged.grid.patches <= 81
    tiles = TILED.units(height, width)
    reference = GotOcr2ImageProcessorPil(crop_to_patches=True, max_patches=4, size={"height": 32, "width": 32})
    assert len(tiles) == reference.get_number_of_image_patches(height, width)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), sides, sides)
@example(2, 70, 98)
def test_any_video_becomes_what_the_reference_says(frames: int, height: int, width: int) -> None:
    assume(max(height, width) <= 150 * min(height, width))
    units = QWEN.slices(frames, height, width)
    wanted = video_resize(max(frames, 2), height, width, 2, 28, QWEN.video.least, QWEN.video.most)
    assert {(unit.height, unit.width) for unit in units} == {wanted}
    assert len(units) == -(-frames // 2)


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (2, 999)])
def test_very_long_images_are_rejected_by_name(size: tuple[int, int]) -> None:
    for take in (lambda: QWEN.units(*size), lambda: QWEN.slices(2, *size), lambda: image_patches(noise(*size), QWEN)):
        with pytest.raises(BadSample, match="over 200 times the other") as caught:
            take()
        assert caught.value.cause == "aspect_ratio"
    assert NAFLEX.units(*size)
    assert TILED.units(*size)


# Videos


def video(frames: int, height: int = 40, width: int = 50, levels: tuple[int, int] = (0, 256)) -> Video:
    return Video("f", tuple(noise(height, width, n, levels) for n in range(frames)), tuple(n / 2 for n in range(frames)))


@pytest.mark.parametrize("frames", [1, 2, 3, 6])
def test_slices_hold_the_frames_in_the_reference_order(frames: int) -> None:
    """Cutting into patches alone: frames here already have their size."""
    clip = video(frames, 56, 84)
    images = image_patches(clip, QWEN)
    pixels = torch.from_numpy(np.stack([decode(frame) for frame in clip.frames])).permute(0, 3, 1, 2)[None]
    patchify = Qwen3VLVideoProcessor.patchify
    wanted, slices, rows, columns = patchify(None, pixels, patch_size=14, merge_size=2, temporal_patch_size=2)  # type: ignore[arg-type]
    assert (len(images), images[0].grid) == (slices, (rows, columns))
    assert (np.concatenate([image.patches_PC for image in images]) == wanted[0].numpy()).all()
    assert len({image.key for image in images}) == slices


@pytest.fixture
def video_processor(monkeypatch: pytest.MonkeyPatch) -> Qwen3VLVideoProcessor:
    """transformers' own processor with three functions of torchvision's in its place, as torchvision 0.26 writes them: a bicubic uint8
    image on a CPU is resized by torch's antialiasing `interpolate` as it is, without a detour over float32."""

    def resize(video: torch.Tensor, size: tuple[int, int], interpolation: str, antialias: bool) -> torch.Tensor:
        assert video.dtype == torch.uint8
        return F.interpolate(video.flatten(0, -4), size, mode=interpolation, antialias=antialias).unflatten(0, video.shape[:-3])

    def normalize(video: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, inplace: bool) -> torch.Tensor:
        assert inplace
        return video.sub_(mean[:, None, None]).div_(std[:, None, None])

    stand_in = SimpleNamespace(resize=resize, normalize=normalize, InterpolationMode=SimpleNamespace(LANCZOS="lanczos"))
    monkeypatch.setattr(image_processing_backends, "tvF", stand_in, raising=False)
    monkeypatch.setattr(image_processing_backends, "pil_torch_interpolation_mapping", {BICUBIC: "bicubic"}, raising=False)
    return object.__new__(Qwen3VLVideoProcessor)  # its __init__ asks for torchvision


@pytest.mark.parametrize("frames", [1, 2, 5])
@pytest.mark.parametrize("size", [(40, 50), (56, 84), (97, 31), (13, 200), (255, 257), (600, 333)], ids=str)
def test_video_pixels_equal_the_reference(frames: int, size: tuple[int, int], video_processor: Qwen3VLVideoProcessor) -> None:
    """Everything that the reference does between frames and pixel values runs here, but torchvision's thin cover over torch. Ours are
    resized by Pillow, as stills are by both sides. Pillow and torch round to whole levels after each pass over rows or columns, in
    another order: they may part by a level of 255, seldom by two. Frames are of middling contrast, since what overshoots is cut after
    each pass."""
    clip = video(frames, *size, levels=(70, 186))
    images = image_patches(clip, QWEN)
    frames_TCHW = torch.from_numpy(np.stack([decode(frame) for frame in clip.frames])).permute(0, 3, 1, 2)
    theirs = video_processor._preprocess(
        [frames_TCHW if frames > 1 else frames_TCHW.repeat(2, 1, 1, 1)],  # it refuses a single frame; ours repeats it
        do_resize=True,
        size=SizeDict(shortest_edge=QWEN.video.least, longest_edge=QWEN.video.most),
        resample=BICUBIC,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=MEAN,
        image_std=STD,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        cap_pixels_per_frame=False,
        return_tensors="np",
    )
    assert theirs["video_grid_thw"].tolist() == [[len(images), *images[0].grid]]
    ours = np.concatenate([normalised(image) for image in images])
    levels = (ours - theirs["pixel_values_videos"].reshape(ours.shape)) * np.array(STD)[:, None] * 255
    parted = np.abs(levels).round()
    assert np.abs(levels - levels.round()).max() < 1e-3
    assert (parted.max() <= 2, (parted > 1).mean() < 1e-3, (parted == 0).mean() > 0.6) == (True, True, True)


def test_a_still_is_repeated_over_the_frames_of_a_patch() -> None:
    (image,) = image_patches(noise(56, 84), QWEN)
    pixels = image.patches_PC.reshape(-1, 3, 2, 14 * 14)
    assert (pixels[:, :, 0] == pixels[:, :, 1]).all()


def test_frames_of_different_sizes_are_rejected() -> None:
    mixed = Video("mixed", (noise(40, 50), noise(40, 50, 1), noise(50, 40, 2)), (0.0, 0.5, 1.0))
    for take in (lambda video, _: size_of(video), image_patches):
        with pytest.raises(BadSample, match="frame 2 is 40×50 pixels, and the first one 50×40") as caught:
            take(mixed, QWEN)
        assert caught.value.cause == "frame_size"


def test_a_model_without_videos_rejects_them() -> None:
    with pytest.raises(BadSample, match="takes no videos"):
        image_patches(video(2), NAFLEX)


def test_videos_are_told_apart_by_their_frames() -> None:
    """The first frames of a longer video are taken at another size: another key."""
    assert media_key(video(2)) == media_key(video(2))
    assert media_key(video(2)) != media_key(video(3))
    assert media_key(video(1)) != media_key(video(1).frames[0])


# Sizes before pixels


def turned(format: str, place: str) -> Callable[[], EncodedImage]:
    def make() -> EncodedImage:
        file = io.BytesIO()
        exif = Pillow.Exif()
        exif[0x0112] = 6
        Pillow.fromarray(np.zeros((30, 80, 3), np.uint8)).save(file, format, exif=exif)
        data = file.getvalue()
        if place == "after the pixels":  # PNG allows it there
            start = data.index(b"eXIf") - 4
            chunk = data[start : start + 12 + int.from_bytes(data[start : start + 4], "big")]
            data = data.replace(chunk, b"")
            data = data[: data.index(b"IEND") - 4] + chunk + data[data.index(b"IEND") - 4 :]
        return EncodedImage("turned", data)

    return make


@pytest.mark.parametrize(
    "make",
    [turned("JPEG", ""), turned("WEBP", ""), turned("PNG", ""), turned("PNG", "after the pixels"), lambda: noise(80, 30)],
    ids=["jpeg", "webp", "png", "png, late", "upright"],
)
def test_the_size_that_is_planned_is_the_size_that_is_made(make: Callable[[], EncodedImage]) -> None:
    image = make()
    assert size_of(image) == (80, 30)
    assert decode(image).shape[:2] == (80, 30)
    for rule in (QWEN, NAFLEX, TILED):
        planned = units_of(size_of(image), rule)
        assert [(i.grid, i.tokens, i.mark) for i in image_patches(image, rule)] == [(u.grid, u.tokens, u.mark) for u in planned]
