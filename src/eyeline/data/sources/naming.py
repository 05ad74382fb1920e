"""Find names of images and videos: a value of a column, a passage of a text, and the placeholders of other trainers. Nothing is decoded."""

import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

from eyeline.core.batch import EncodedImage
from eyeline.core.errors import BadSample
from eyeline.core.locations import Location, Remote, inside
from eyeline.data.images.image_files import image_key
from eyeline.data.layouts.media import PLACEHOLDERS, VIDEO_FILES, image_of

IMAGE_FILES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jp2", ".jxl"),
    *(".ppm", ".pgm"),
)
MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*", b"\xff\x0a", b"\0\0\0\x0cJXL ", b"\0\0\0\x0cjP  ")
LONGEST_NAME = 1024  # characters of a path
LONGEST_TEXT = 1 << 16  # characters of a text that are looked at
State = Literal["here", "there", "outside", "absent", "url"]


class Named(NamedTuple):
    """One image or video that is named."""

    name: str  # as a message shows it
    state: State  # here: in the row itself; there: an existing file; outside: one that is not below the folder of the images
    key: str = ""  # of its pixels, as `image_key` has it, where it could be read
    video: bool = False
    form: str = ""  # how a text says it


def _file(name: str, root: Location) -> tuple[State, str]:
    """Return whether a path leads to a file, and its key. Of a store nothing is asked: what looks like a path is one."""
    if re.match(r"[a-z][a-z0-9+.-]*://", name, re.IGNORECASE) and not (isinstance(root, Remote) and name.startswith(f"{root.store}/")):
        local = name[7:] if name[:7].lower() == "file://" else ""
        return ("outside" if local and _exists(local) else "url"), ""
    if "\0" in name or not name:
        return "absent", ""
    found = inside(root, name)
    if isinstance(root, Remote):
        return ("absent" if found is None else "there"), str(found)
    if found is None:
        return ("outside" if _exists(os.path.join(root, name)) else "absent"), ""
    return ("there" if _exists(str(found)) else "absent"), str(found)


def _exists(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # half a surrogate pair
        return False


def named_by(value: Any, root: Location, key: str, looks: bool) -> Named | None:
    """The image or video that a value of a column is or names; None for anything else. With `looks`, also a file without an ending of
    images is opened, to see whether it is one. `key` is the name of the column."""
    match value:
        case EncodedImage():
            return Named(value.name, "here", image_key(value))
        case bytes():
            what = kind_of(value)
            return Named(f"bytes of {what}", "here", image_key(EncodedImage(key, value)), what == "a video") if what else None
        case {"bytes": bytes(data)}:
            return named_by(data, root, key, looks)
        case str():
            return _by_text(value, root, key, looks)
        case _:
            return None


def _by_text(value: str, root: Location, key: str, looks: bool) -> Named | None:
    text = value.strip()
    if len(text) > LONGEST_NAME or text[:5].lower() == "data:":
        try:  # base64 of an image, bare or in a data: URL
            found = image_of(text, root, key)
        except BadSample:
            return Named("a data: URL of an image", "here") if text[:11].lower() == "data:image/" else None
        return Named(found.name[:60], "here", image_key(found)) if isinstance(found.source, bytes) else None
    if not text or "\n" in text:
        return None
    end = text.lower().partition("?")[0]
    state, found_key = _file(text, root)
    if end.endswith((*IMAGE_FILES, *VIDEO_FILES)) or (state == "url" and _SPEAKING.search(key)):
        if state == "absent" and (one := next(_paths_in(text, root), None)) is not None:
            return one
        sentence = state == "absent" and text.count(" ") > 2  # that ends in a name
        return None if sentence else Named(text, state, found_key, end.endswith(VIDEO_FILES))
    try:
        encoded = image_of(text, root, key)
    except BadSample:
        return None
    if isinstance(encoded.source, bytes):
        return Named(encoded.name, "here", image_key(encoded))
    if looks and state == "there" and not isinstance(root, Remote) and _starts_as_image(found_key):
        return Named(text, state, found_key)
    return next(_paths_in(text, root), None)


_SPEAKING = re.compile(r"ima?ge?|photo|pict?(ure)?|pixel|thumb", re.IGNORECASE)  # names of columns that hold images


def kind_of(data: bytes) -> Literal["an image", "a video"] | None:
    """The kind of a file, by its first bytes."""
    if data.startswith(MAGIC) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP") or (data[:2] == b"BM" and data[6:10] == bytes(4)):
        return "an image"
    if data[4:8] == b"ftyp":
        return "an image" if data[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1") else "a video"
    return "a video" if data.startswith(b"\x1a\x45\xdf\xa3") or (data[:4] == b"RIFF" and data[8:12] == b"AVI ") else None


def _starts_as_image(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return kind_of(file.read(16)) == "an image"
    except OSError:
        return False


# Texts

_ENDS = "|".join(re.escape(end[1:]) for end in (*IMAGE_FILES, *VIDEO_FILES))
_ENDED = re.compile(rf"\.(?:{_ENDS})(?![\w/-]|\.\w)", re.IGNORECASE)
_STOPS = " \t\n\r\"'`<>()[]{}|,;:="  # characters that a path without anything around it does not go over
_PATHS = 64  # of a text
_TAGGED = re.compile(r"<(img|image|picture|photo|pic|video)>([^<>\n]{1,1024}+)</\1>", re.IGNORECASE)
_LINKED = re.compile(r"!\[[^\]\n]{0,512}+\]\(\s{0,8}+([^)\s]{1,1024}+)[^)\n]{0,256}+\)")
_SOURCED = re.compile(r"<img\b[^<>]{0,512}?\bsrc\s?=\s?[\"']?([^\"'<>\s]{1,1024}+)[^<>]{0,512}+>", re.IGNORECASE)
_BRACKETED = re.compile(r"\[img\]([^\[\]\n]{1,1024}+)\[/img\]", re.IGNORECASE)
_DATA = re.compile(r"data:(image|video)/[\w.+-]{1,32};base64,[A-Za-z0-9+/=]{8}", re.IGNORECASE)
_BARE_DATA = re.compile(r"(?<![A-Za-z0-9+/,])(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR)[A-Za-z0-9+/]{200}")
FORMS = (("<img>…</img>", _TAGGED, 2), ("![…](…)", _LINKED, 1), ('<img src="…">', _SOURCED, 1), ("[img]…[/img]", _BRACKETED, 1))


def named_in(text: str, root: Location) -> tuple[list[Named], str]:
    """The images that a text names, and the text without the passages that do: what is left may hold placeholders."""
    text = text[:LONGEST_TEXT]
    found = [Named(f"{match[0][:30]}…", "here", form="a data: URL", video=match[1].lower() == "video") for match in _DATA.finditer(text)]
    found += [Named(f"{match[0][:30]}…", "here", form="base64") for match in _BARE_DATA.finditer(text)]
    for form, pattern, group in FORMS:
        for match in pattern.finditer(text):
            name = match[group].strip()
            state, key = ("here", "") if name[:5].lower() == "data:" else _file(name, root)
            video = name.lower().endswith(VIDEO_FILES)
            ends = name.partition("?")[0].lower().endswith((*IMAGE_FILES, *VIDEO_FILES))
            if (
                state in ("here", "there", "outside")
                or (pattern not in (_SOURCED, _LINKED) and ends)
                or (pattern is _LINKED and state == "url")
            ):
                found.append(Named(name[:80], state, key, video, form.replace("img", match[1]) if pattern is _TAGGED else form))
        text = pattern.sub(" ", text)
    found += _paths_in(text, root)
    return found, text


def _paths_in(text: str, root: Location) -> Iterator[Named]:
    """Files that exist, which a text names without anything around them."""
    for match in islice(_ENDED.finditer(text), _PATHS):
        piece = text[max(match.start() - LONGEST_NAME, 0) : match.end()]
        word = piece[max(piece.rfind(stop, 0, -1) for stop in _STOPS) + 1 :]
        line = piece[piece.rfind("\n") + 1 :].strip()
        for name in dict.fromkeys((word, line)):  # a name may have spaces in it
            state, key = _file(name, root)
            if state == "outside" or (state == "there" and not isinstance(root, Remote)):
                yield Named(name, state, key, name.lower().endswith(VIDEO_FILES), "its path")
                break


# Placeholders

_MEDIA = re.compile(r"images?|imgs?|im|pictures?|pics?|photos?|vision|visual|media|multimodal|videos?|vid|frames?|audios?")
_AROUND = re.compile(
    r"\d+|start|begin|end|of|[be]os|pad(ding)?|tokens?|placeholder|plh|context|here|patch(es)?|new|line|newline|soft|fake|around|row|col|"
    r"global|local|id|idx|index|content|features?|embed(s|ding)?|sep|break|slot|tile|thumbnail|input|special|path|url|file|name|sentinel|"
    r"unk|the|default"
)
_TOKEN = re.compile(
    r"<[|｜](?P<pipe>[^<>|｜\n]{1,48})[|｜]>|(?<!\w)</?(?P<tag>[A-Za-z_][\w .-]{0,47})>|\[/?(?P<bracket>[A-Za-z_][\w .-]{0,47})\]"
    r"|\{\{? ?(?P<brace>[A-Za-z_]\w{0,47}) ?\}?\}"
)
_PIECES = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def placeholders_in(text: str, answer: bool) -> list[str]:
    """Placeholders of other trainers in a text, each once. Of an `answer` only those that are nothing else: `<img>` and `[Image 1]`
    may be what it is to say."""
    found: dict[str, None] = {}
    for match in _TOKEN.finditer(text[:LONGEST_TEXT]):
        kind = match.lastgroup or ""
        if match[0] not in PLACEHOLDERS and _is_placeholder(match[kind], kind, answer):
            found[match[0]] = None
    return list(found)


def _is_placeholder(name: str, kind: str, answer: bool) -> bool:
    pieces = [piece.lower() for piece in _PIECES.findall(name)]
    media = [piece for piece in pieces if _MEDIA.fullmatch(piece)]
    if kind == "pipe":
        return any(piece != "im" for piece in media)  # <|im_start|> is ChatML's, and no image
    around = [piece for piece in pieces if _AROUND.fullmatch(piece)]
    if answer and (not around or kind != "tag" or " " in name):
        return False
    if kind == "tag" and re.fullmatch(r"row_\d+_col_\d+", name):
        return True
    return bool(media) and len(media) + len(around) == len(pieces)
