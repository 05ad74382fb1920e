"""Read the values of a row: images, videos and texts. Nothing is opened, and no URL is fetched."""

import base64
import binascii
import math
import re
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from eyeline.core.batch import EncodedImage, Video
from eyeline.core.errors import BadSample
from eyeline.core.locations import Location, Remote, inside
from eyeline.data.containers.json_rows import parse, require_valid
from eyeline.data.files.stores import without_secrets

MAX_DATA_URL = 64 << 20  # characters
IMAGE, VIDEO = "<image>", "<video>"  # where an image or a video of a column stands in a text
PLACEHOLDERS = {IMAGE: "images", VIDEO: "videos"}
_ESCAPED = re.compile(rf"\\({'|'.join(PLACEHOLDERS)})")
SAMPLED_FPS = 2.0  # of frames that are given without times, as qwen-vl-utils takes them (vision_process.py: FPS)
MAX_FRAMES = 2_048
VIDEO_FILES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".m3u8")


_URL = re.compile(r"[a-z][a-z0-9+.-]*:(//|\\\\)|(https?|ftp|file|s3|gs|hf):", re.IGNORECASE)


def image_of(name: Any, root: Location, field: str) -> EncodedImage:
    """An image as a row gives it: a path inside `root`, a data: URL, base64, its bytes, or {bytes, path} as Hugging Face stores it."""
    match name:
        case EncodedImage():
            return name  # a member of an archive
        case bytes():
            return EncodedImage(field, name)
        case {"bytes": bytes(data)}:
            return EncodedImage(name["path"] if isinstance(name.get("path"), str) else field, data)
        case {"bytes": str(text)} if text:
            return _decoded(field, text, field)
        case {"path": str(path)}:
            name = path
        case _:
            pass
    if not isinstance(name, str):
        raise BadSample("wrong_type", field, f"wanted a path, got {describe_value(name)}")
    clean(name, field)
    if name[:64].lstrip()[:5].lower() == "data:":
        return _data_url(name.strip(), field)
    if _is_base64(name):
        return _decoded("base64", name, field)
    return _file_of(name, root, field)


@lru_cache(maxsize=1 << 13)  # many rows show the same image, and pathlib is slow
def _file_of(name: str, root: Location, field: str) -> EncodedImage:
    if _URL.match(name) and not (isinstance(root, Remote) and name.startswith(f"{root.store}/")):
        what = f"{without_secrets(name)[:100]!r} is a URL, and only objects of the store that images: names are fetched"
        raise BadSample("remote_url", field, f"{what}. Download it first and give the path of the file")
    if not name or "\0" in name or len(name.encode()) > 4096:
        raise BadSample("bad_path", field, f"{name[:40]!r} cannot name a file")
    path = inside(root, name)
    if path is None:
        what = "a folder that holds all images, such as /" if name.startswith("/") else "a folder that holds all images"
        raise BadSample("outside_root", field, f"{name[:200]!r} is not inside {root}. Set images: to {what}")
    return EncodedImage(name, path)


def video_of(frames: Any, timing: dict[str, Any], root: Location, field: str, timed: str) -> Video:
    """A video by the list of its frames, each named as `image_of` takes it. Every frame is used.

    `timing` may say when they are shown: `timestamps` in seconds, one per frame, or `sample_fps` or `fps`, how many frames there are
    to a second; 2 if nothing does. A video file is BadSample `video_file`. `timed` is the field that a fault of the times is laid to.
    """
    several = frames if isinstance(frames, list) else [frames]
    file = next((frame for frame in several if isinstance(frame, str) and frame.lower().endswith(VIDEO_FILES)), None)
    if file is not None or isinstance(frames, str):
        raise BadSample(
            "video_file", field, f"{str(file or frames)[:100]!r} is a video in one file, and videos are read as lists of frames. "
            "Extract them first, for example with: ffmpeg -i clip.mp4 -vf fps=2 clip/%05d.jpg, and give the list of their paths"
        )  # fmt: skip
    if not isinstance(frames, list) or not frames:
        raise BadSample("video_frames", field, f"wanted a list of frames, got {describe_value(frames)}")
    if len(frames) > MAX_FRAMES:
        raise BadSample("video_frames", field, f"{len(frames):,} frames, over {MAX_FRAMES:,}. Keep fewer of them")
    images = tuple(image_of(frame, root, f"{field}[{n}]") for n, frame in enumerate(frames))
    times = timing.get("timestamps")
    if times is None:
        fps = next((timing[key] for key in ("sample_fps", "fps") if timing.get(key) is not None), SAMPLED_FPS)
        if not _is_number(fps) or not 1e-3 <= fps <= 1e3:
            raise BadSample("video_frames", timed, f"wanted 0.001 to 1,000 frames per second, got {describe_value(fps)}")
        times = [n / fps for n in range(len(images))]
    if not isinstance(times, list) or len(times) != len(images) or not all(_is_number(t) and 0 <= t <= 1e6 for t in times):
        raise BadSample(
            "video_frames", timed, f"wanted a time in seconds, 0 or more, for each of {len(images)} frames, got {describe_value(times)}"
        )
    if any(later < earlier for earlier, later in pairwise(times)):
        raise BadSample("video_frames", timed, "the times of the frames do not increase. Put the frames in order")
    return Video(f"{images[0].name} and {len(images) - 1} more", images, tuple(map(float, times)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _data_url(url: str, field: str) -> EncodedImage:
    head, comma, body = url.partition(",")
    if not comma or not re.fullmatch(r"data:image/[\w.+-]+(;\s*[\w=.-]+)*;\s*base64\s*", head, re.IGNORECASE):
        raise BadSample("data_url", field, f"{head[:60]!r}: wanted data:image/...;base64,...")
    return _decoded(head, unquote(body) if "%" in body else body, field)


def _decoded(name: str, encoded: str, field: str) -> EncodedImage:
    """The image in base64, as it is found: with line breaks and spaces, with the letters of URLs, without padding."""
    if len(encoded) > MAX_DATA_URL:
        raise BadSample("data_url", field, f"an image in {len(encoded):,} characters, over {MAX_DATA_URL:,}")
    letters = "".join(encoded.split()).rstrip("=").translate(_OF_URLS)
    try:
        data = base64.b64decode(letters + "=" * (-len(letters) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadSample("data_url", field, f"its base64 is damaged: {error}") from error
    return EncodedImage(name + ",…", data)


SHORTEST_BASE64 = 64  # characters; no image is smaller
_BASE64 = re.compile(r"[A-Za-z0-9+/_\s-]++[=\s]*+")  # without going back: data may hold a million spaces and then a dot
_OF_URLS = str.maketrans("-_", "+/")
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")  # JPEG, PNG, GIF, WebP, BMP, TIFF


def _is_base64(text: str) -> bool:
    """Return whether a text is base64 of an image and no path: it has no dot, and starts as images do."""
    if len(text) < SHORTEST_BASE64 or not _BASE64.fullmatch(text):
        return False
    head = "".join(text.lstrip()[:64].split())[:8].translate(_OF_URLS)
    return len(head) == 8 and "=" not in head and base64.b64decode(head).startswith(_MAGIC)


def clean(text: str, field: str) -> str:
    """The text, if it is all Unicode. Invalid UTF-8 and escaped halves of surrogate pairs both arrive as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample("bad_unicode", field, f"character {error.start} is half of a surrogate pair, or not UTF-8") from error
    return text


def as_text(value: Any, field: str) -> Any:
    """A number as the text that JSON has for it; anything else as it is. BadSample for what could be written in several ways."""
    if isinstance(value, bool):
        said = "which may stand for yes, true or True. Write the word as text"
        raise BadSample("wrong_type", field, f"wanted text, got {describe_value(value)}, {said}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadSample("not_finite", field, f"wanted text, got {value}, which stands for a missing value. Write null, or the answer")
    return str(value) if isinstance(value, int | float) else value


def without_escapes(text: str) -> str:
    """The text with placeholders where it has them with a backslash before: so they are written where they are text."""
    return _ESCAPED.sub(r"\1", text) if "\\<" in text else text


def with_escapes(text: str) -> str:
    """The inverse of `without_escapes`."""
    for placeholder in PLACEHOLDERS:
        text = text.replace(placeholder, f"\\{placeholder}")
    return text


_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


def describe_value(value: Any) -> str:
    text = repr(value)
    what = "null" if value is None else _JSON_TYPES.get(type(value), type(value).__name__)
    return f"{what} ({text[:40]}{'…' if len(text) > 40 else ''})"


# Columns


IMAGE_COLUMNS = (  # columns of images: the first of these that a row has is used
    *("image", "images", "file_name", "file_names", "image_file_name", "image_file_names", "image_path", "image_paths"),
)
VIDEO_COLUMNS = ("video", "videos")
TIMES = ("timestamps", "sample_fps", "fps")


def parse_list(value: Any, field: str) -> Any:
    """A list that is written as JSON text, as a cell of a table holds it, or as an object of lists, as `datasets` stores a Sequence
    of objects; anything else as it is."""
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()) and len({*map(len, value.values())}) == 1:
        return [dict(zip(value, item, strict=True)) for item in zip(*value.values(), strict=True)]
    if not (isinstance(value, str) and value[:1] == "[" and value.rstrip()[-1:] == "]"):
        return value
    try:
        found, flawed = parse(value)
        return require_valid(found) if flawed else found
    except BadSample as bad:
        hint = ". It looks like a printed Python list; write the column with json.dumps" if value[1:2] in ("'", "{") else ""
        raise BadSample(bad.cause, field, f"wanted a list in JSON: {bad.message}{hint}") from bad


def media_of(row: dict[str, Any], root: Location) -> dict[str, list[EncodedImage | Video]]:
    """The media for each kind of placeholder: images from one of the columns IMAGE_COLUMNS (absent, null, one image, or a list),
    videos from `video` (the list of its frames, or a list of such lists) or `videos` (a list of such lists)."""
    return {IMAGE: images_of(row, root), VIDEO: videos_of(row, root)}


def _present(row: dict[str, Any], field: str) -> Any:
    """The value of a column of media, without what stands for none: an empty text, list or object, null, or NaN as pandas has it."""
    value = row.get(field)
    if _is_none(value):
        return None
    value = parse_list(value, field)
    if isinstance(value, list):
        value = [item for item in value if not _is_none(item)]
    return None if _is_none(value) else value


def _is_none(value: Any) -> bool:
    match value:
        case None | [] | b"":
            return True
        case dict() if not value:
            return True
        case str():
            return not value.strip()
        case float():
            return math.isnan(value)
        case {"bytes": None | b"" | "", "path": None | ""} | {"url": None | ""}:
            return True
        case _:
            return False


def images_of(row: dict[str, Any], root: Location) -> list[EncodedImage | Video]:
    for field in IMAGE_COLUMNS:
        value = _present(row, field)
        if value is None:
            continue
        if isinstance(value, str | bytes | dict | EncodedImage):
            return [image_of(value, root, field)]
        if isinstance(value, list):
            return [image_of(name, root, f"{field}[{n}]") for n, name in enumerate(value)]
        raise BadSample("wrong_type", field, f"wanted a path or a list of paths, got {describe_value(value)}")
    return []


def videos_of(row: dict[str, Any], root: Location) -> list[EncodedImage | Video]:
    for field in VIDEO_COLUMNS:
        value = _present(row, field)
        if value is None:
            continue
        if isinstance(value, list) and (field == "videos" or (value and isinstance(value[0], list))):
            each = {key: row[key] for key in TIMES if row.get(key) is not None}
            timing = [{k: v[n] if isinstance(v, list) and n < len(v) else v for k, v in each.items()} for n in range(len(value))]
            return [video_of(v, timing[n], root, f"{field}[{n}]", "timestamps, sample_fps or fps") for n, v in enumerate(value)]
        return [video_of(value, row, root, field, "timestamps, sample_fps or fps")]
    return []
