"""Layouts: functions `row -> Sample`. Which one fits is detected from the first rows, and said."""

import base64
import binascii
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from eyeline.core.batch import Message, Picture, Role, Sample, Text, Video
from eyeline.core.errors import BadSample, Refused
from eyeline.data.containers import Container

MAX_DATA_URL = 64 << 20  # characters
IMAGE, VIDEO = "<image>", "<video>"  # where a picture or a film of a column stands in a text
PLACEHOLDERS = {IMAGE: "pictures", VIDEO: "films"}
SAMPLED_FPS = 2.0  # of frames that are given without times, as qwen-vl-utils takes them (vision_process.py: FPS)
MAX_FRAMES = 2_048
CAPTIONS = ("caption", "text")  # columns of captions
CAPTION_PROMPT = "Describe the image."  # what they are answers to
COLUMNS = (  # that a layout may read
    *("conversations", "messages", "texts", *CAPTIONS, "kind", "category"),
    *("image", "images", "video", "videos", "timestamps", "sample_fps", "fps"),
)


@dataclass(frozen=True)
class Layout:
    name: str
    why: str  # how it was recognised
    read: Callable[[Any, str, Path], Sample]  # (row, id, root of the images); BadSample for what it cannot use
    kind: Callable[[Any], str]


def recognised(path: Path, container: Container) -> Layout:
    """The layout of the first of some rows that has a known shape."""
    found: list[str] = []
    count, why = 0, ""
    for row in islice((row for shard in range(len(container.shards)) for _, row in container.rows(shard)), 100):
        n, count = count, count + 1
        if isinstance(row, BadSample):
            why = why or f" (the first that cannot be read: {row})"
        elif isinstance(row, dict):
            if "conversations" in row:
                return Layout("llava", f"{container.what}; row {n} has conversations", llava_sample, _named_kind)
            if "messages" in row:
                return Layout("openai", f"{container.what}; row {n} has messages", openai_sample, _named_kind)
            if "texts" in row:
                return Layout("cauldron", f"{container.what}; row {n} has texts", cauldron_sample, _named_kind)
            column = next((c for c in CAPTIONS if isinstance(row.get(c), str)), None)
            if column and any(row.get(c) is not None for c in ("image", "images")):
                why = f"{container.what}; row {n} has a picture and {column}, which is the answer to {CAPTION_PROMPT!r}"
                return Layout("captions", why, caption_sample, _named_kind)
            found += [key for key in row if key not in found]
        elif isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], str):
            return Layout("easy-vqa", f"{container.what}; row {n} is [question, answer, picture]", easy_vqa_sample, _vqa_kind)
    if not count:
        raise Refused(f"{path} holds no rows")
    columns = f"its rows have {', '.join(found[:20])}" if found else f"none of its first rows is an object{why}"
    raise Refused(
        f"{path}: no known layout. Found: a {container.what}; {columns}. Wanted: conversations (LLaVA), messages (OpenAI), texts (The "
        "Cauldron), caption or text beside image (captions), or [question, answer, picture] rows (easy-VQA). Rename the columns, or "
        "convert the file"
    )


def _named_kind(row: Any) -> str:
    kind = row.get("kind", row.get("category", "")) if isinstance(row, dict) else ""
    return kind if isinstance(kind, str) else ""


# Pictures


_URL = re.compile(r"[a-z][a-z0-9+.-]*:(//|\\\\)|(https?|ftp|file|s3|gs|hf):", re.IGNORECASE)


def picture_of(name: Any, root: Path, field: str) -> Picture:
    """A picture as a row gives it: a path inside `root`, a data: URL, its bytes, or {bytes, path} as Hugging Face stores it.

    Nothing is opened, and no URL is fetched.
    """
    match name:
        case Picture():
            return name  # a member of an archive
        case bytes():
            return Picture(field, name)
        case {"bytes": bytes(data)}:
            return Picture(name["path"] if isinstance(name.get("path"), str) else field, data)
        case {"path": str(path)}:
            name = path
        case _:
            pass
    if not isinstance(name, str):
        raise BadSample("wrong_type", field, f"a path was wanted, got {_shown(name)}")
    _clean(name, field)
    if name[:5].lower() == "data:":
        return _data_url(name, field)
    return _file_of(name, str(root), field)


@lru_cache(maxsize=1 << 13)  # many rows show the same picture, and pathlib is slow
def _file_of(name: str, root: str, field: str) -> Picture:
    if _URL.match(name):
        what = f"{name[:100]!r} is a URL; nothing is fetched while training"
        raise BadSample("remote_url", field, f"{what}. Download it first and give the path of the file")
    if not name or "\0" in name or len(name.encode()) > 4096:
        raise BadSample("bad_path", field, f"{name[:40]!r} cannot name a file")
    path = os.path.normpath(os.path.join(root, name))
    if not path.startswith(root if root.endswith("/") else root + "/"):
        raise BadSample("outside_root", field, f"{name[:200]!r} is not inside {root}. Set images: to a folder that holds all pictures")
    return Picture(name, Path(path))


def film_of(frames: Any, timing: dict[str, Any], root: Path, field: str, timed: str) -> Video:
    """A film by the list of its frames, each named as `picture_of` takes it. Every frame is used.

    `timing` may say when they are shown: `timestamps` in seconds, one a frame, or `sample_fps` or `fps`, how many frames there are
    to a second; 2 if nothing does. A film file is BadSample `video_file`. `timed` is the field that a fault of the times is laid to.
    """
    if isinstance(frames, str):
        raise BadSample(
            "video_file", field, f"{frames[:100]!r} is a film in one file, and films are read as frames. Extract them first, for example "
            "with: ffmpeg -i clip.mp4 -vf fps=2 clip/%05d.jpg, and give the list of their paths"
        )  # fmt: skip
    if not isinstance(frames, list) or not frames:
        raise BadSample("film", field, f"a list of frames was wanted, got {_shown(frames)}")
    if len(frames) > MAX_FRAMES:
        raise BadSample("film", field, f"{len(frames):,} frames, over {MAX_FRAMES:,}. Take fewer of them")
    pictures = tuple(picture_of(frame, root, f"{field}[{n}]") for n, frame in enumerate(frames))
    times = timing.get("timestamps")
    if times is None:
        fps = next((timing[key] for key in ("sample_fps", "fps") if timing.get(key) is not None), SAMPLED_FPS)
        if not _is_number(fps) or not 1e-3 <= fps <= 1e3:
            raise BadSample("film", timed, f"frames a second from 0.001 to 1,000 were wanted, got {_shown(fps)}")
        times = [n / fps for n in range(len(pictures))]
    if not isinstance(times, list) or len(times) != len(pictures) or not all(_is_number(t) and 0 <= t <= 1e6 for t in times):
        raise BadSample("film", timed, f"a time in seconds, 0 or more, for each of {len(pictures)} frames was wanted, got {_shown(times)}")
    if any(later < earlier for earlier, later in pairwise(times)):
        raise BadSample("film", timed, "the times of the frames do not grow. Put the frames in order")
    return Video(f"{pictures[0].name} and {len(pictures) - 1} more", pictures, tuple(map(float, times)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _data_url(url: str, field: str) -> Picture:
    head, comma, body = url.partition(",")
    if len(url) > MAX_DATA_URL:
        raise BadSample("data_url", field, f"a data: URL of {len(url):,} characters, over {MAX_DATA_URL:,}")
    if not comma or not re.fullmatch(r"data:image/[\w.+-]+(;[\w=.-]+)*;base64", head, re.IGNORECASE):
        raise BadSample("data_url", field, f"{head[:60]!r}: wanted data:image/...;base64,...")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadSample("data_url", field, f"its base64 is damaged: {error}") from error
    return Picture(head + ",…", data)


def _clean(text: str, field: str) -> str:
    """The text, if it is all Unicode. Invalid UTF-8 and escaped halves of surrogate pairs both arrive as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample("bad_unicode", field, f"character {error.start} is half of a surrogate pair, or not UTF-8") from error
    return text


_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{_JSON_TYPES.get(type(value), 'null')} ({text[:40]}{'…' if len(text) > 40 else ''})"


# Conversations


def _checked(id: str, messages: list[Message], kind: str) -> Sample:
    """The sample, if its turns are: perhaps one system message, then user and assistant in turn, an answer last."""
    begin = 1 if messages and messages[0].role == "system" else 0
    if not any(m.role == "assistant" for m in messages):
        raise BadSample("no_target", "messages", "there is no answer to learn")
    for n, message in enumerate(messages[begin:], begin):
        wanted = ("user", "assistant")[(n - begin) % 2]
        if message.role == "system":
            raise BadSample("role_order", f"messages[{n}]", "a system message is only allowed once, at the start")
        if message.role != wanted:
            raise BadSample("role_order", f"messages[{n}]", f"user and assistant must take turns, user first; got {message.role}")
        if wanted == "assistant" and not all(isinstance(p, Text) for p in message.parts):
            raise BadSample("image_in_answer", f"messages[{n}]", "an answer is text; the model cannot draw")
    if messages[-1].role != "assistant":
        raise BadSample("role_order", f"messages[{len(messages) - 1}]", "the last turn asks and is not answered")
    return Sample(id, tuple(messages), kind)


Media = dict[str, Iterator[Picture | Video]]  # placeholder -> what stands there, in order


def _split(text: str, role: Role, media: Media, field: str) -> tuple[Text | Picture | Video, ...]:
    """Text with its placeholders replaced, wherever they stand. Newlines that set a placeholder off are dropped: the template
    says what surrounds a picture."""
    pieces = re.split(f"({'|'.join(PLACEHOLDERS)})", text)
    if role == "assistant" and len(pieces) > 1:
        raise BadSample("image_in_answer", field, f"{pieces[1]} in an answer")
    parts: list[Text | Picture | Video] = []
    for n, piece in enumerate(pieces):
        if n % 2:
            parts.append(next(media[piece]))
            continue
        piece = piece.removeprefix("\n") if n else piece
        piece = piece.removesuffix("\n") if n < len(pieces) - 1 else piece
        if piece:
            parts.append(Text(piece))
    return tuple(parts)


def _counted(places: dict[str, int], media: dict[str, list[Picture | Video]], field: str) -> Media:
    """The media in order, if there are exactly as many as places for them."""
    for placeholder, what in PLACEHOLDERS.items():
        if places[placeholder] != len(media[placeholder]):
            count = f"{places[placeholder]} {placeholder} in the text for {len(media[placeholder])} {what}"
            raise BadSample("placeholder_count", field, count)
    return {placeholder: iter(found) for placeholder, found in media.items()}


def _columns(row: dict[str, Any], root: Path) -> dict[str, list[Picture | Video]]:
    """What stands at each kind of placeholder: pictures from the column `image` or `images` (absent, null, one path, or a list of
    paths), films from `video` (the list of its frames, or a list of such lists) or `videos` (a list of such lists)."""
    return {IMAGE: _pictures(row, root), VIDEO: _films(row, root)}


def _pictures(row: dict[str, Any], root: Path) -> list[Picture | Video]:
    for field in ("image", "images"):
        value = row.get(field)
        if value is None:
            continue
        if isinstance(value, str | bytes | dict | Picture):
            return [picture_of(value, root, field)]
        if isinstance(value, list):
            return [picture_of(name, root, f"{field}[{n}]") for n, name in enumerate(value)]
        raise BadSample("wrong_type", field, f"a path or a list of paths was wanted, got {_shown(value)}")
    return []


def _films(row: dict[str, Any], root: Path) -> list[Picture | Video]:
    for field in ("video", "videos"):
        value = row.get(field)
        if value is None:
            continue
        if isinstance(value, list) and (field == "videos" or (value and isinstance(value[0], list))):
            each = {key: row[key] for key in ("timestamps", "sample_fps", "fps") if row.get(key) is not None}
            timing = [{k: v[n] if isinstance(v, list) and n < len(v) else v for k, v in each.items()} for n in range(len(value))]
            return [film_of(v, timing[n], root, f"{field}[{n}]", "timestamps, sample_fps or fps") for n, v in enumerate(value)]
        return [film_of(value, row, root, field, "timestamps, sample_fps or fps")]
    return []


def _objects(row: Any, field: str) -> list[dict[str, Any]]:
    """The row's list of messages, each an object."""
    if not isinstance(row, dict):
        raise BadSample("wrong_type", "row", f"an object was wanted, got {_shown(row)}")
    turns = row.get(field)
    if not isinstance(turns, list):
        raise BadSample("wrong_type", field, f"a list of messages was wanted, got {_shown(turns)}")
    for n, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadSample("wrong_type", f"{field}[{n}]", f"an object was wanted, got {_shown(turn)}")
    return turns


def _role(value: Any, roles: dict[str, Role], field: str) -> Role:
    if value in TOOL_ROLES:
        raise BadSample("tool_turn", field, f"{value!r}: turns of tools are not read. Leave such conversations out, or tell them in text")
    if not isinstance(value, str) or value not in roles:
        raise BadSample("role", field, f"got {_shown(value)}, wanted one of {', '.join(roles)}")
    return roles[value]


TOOL_ROLES = ("tool", "function", "function_call", "observation", "ipython")
LLAVA_ROLES: dict[str, Role] = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def llava_sample(row: Any, id: str, root: Path) -> Sample:
    """LLaVA: {image: path or paths, video: frames, conversations: [{from: human|gpt|system, value: text with <image>, <video>}]}."""
    turns = _objects(row, "conversations")
    texts: list[str] = []
    roles: list[Role] = []
    for n, turn in enumerate(turns):
        roles.append(_role(turn.get("from"), LLAVA_ROLES, f"conversations[{n}].from"))
        value = turn.get("value")
        if not isinstance(value, str):
            raise BadSample("wrong_type", f"conversations[{n}].value", f"text was wanted, got {_shown(value)}")
        texts.append(_clean(value, f"conversations[{n}].value"))
    media = _counted({p: sum(text.count(p) for text in texts) for p in PLACEHOLDERS}, _columns(row, root), "conversations")
    messages = [
        Message(role, _split(text, role, media, f"conversations[{n}].value"))
        for n, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]
    return _checked(id, messages, _named_kind(row))


OPENAI_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def openai_sample(row: Any, id: str, root: Path) -> Sample:
    """OpenAI messages: {messages: [{role, content}]}, content a string or a list of text, image and video parts.

    Strings may hold `<image>` and `<video>` for what the columns have; parts of these types that do not say which take theirs
    from there too.
    """
    turns = _objects(row, "messages")
    strings = [turn["content"] for turn in turns if isinstance(turn.get("content"), str)]
    parts = [part for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"]]
    places = {p: sum(text.count(p) for text in strings) + sum(_bare(part) == p for part in parts) for p in PLACEHOLDERS}
    media = _counted(places, _columns(row, root), "messages")
    messages: list[Message] = []
    for n, turn in enumerate(turns):
        role = _role(turn.get("role"), OPENAI_ROLES, f"messages[{n}].role")
        field = f"messages[{n}].content"
        content = turn.get("content")
        if turn.get("tool_calls"):
            raise BadSample("tool_turn", f"messages[{n}].tool_calls", "calls of tools are not read. Leave such conversations out")
        match content:
            case str():
                parts = _split(_clean(content, field), role, media, field)
            case list():
                parts = tuple(_openai_part(part, root, media, f"{field}[{m}]") for m, part in enumerate(content))
            case _:
                raise BadSample("wrong_type", field, f"text or a list of parts was wanted, got {_shown(content)}")
        messages.append(Message(role, parts))
    return _checked(id, messages, _named_kind(row))


def _bare(part: Any) -> str | None:
    """The placeholder that a part is equal to: an image or video part that does not say which."""
    match part:
        case {"type": "image"} if all(part.get(k) is None for k in ("image", "path", "url")):
            return IMAGE
        case {"type": "video"} if part.get("video") is None:
            return VIDEO
        case _:
            return None


def _openai_part(part: Any, root: Path, media: Media, field: str) -> Text | Picture | Video:
    if not isinstance(part, dict):
        raise BadSample("wrong_type", field, f"an object was wanted, got {_shown(part)}")
    bare = _bare(part)
    if bare is not None:
        return next(media[bare])
    match part.get("type"):
        case "text" | "input_text":
            text = part.get("text")
            if not isinstance(text, str):
                raise BadSample("wrong_type", f"{field}.text", f"text was wanted, got {_shown(text)}")
            for placeholder, what in PLACEHOLDERS.items():
                if placeholder in text:
                    why = f"{placeholder} inside a text part; {what} are parts of their own here"
                    raise BadSample("placeholder_count", f"{field}.text", why)
            return Text(_clean(text, f"{field}.text"))
        case "image_url" | "input_image":
            url = part.get("image_url")
            return picture_of(url.get("url") if isinstance(url, dict) else url, root, f"{field}.image_url")
        case "image":
            return picture_of(next(part[k] for k in ("image", "path", "url") if part.get(k) is not None), root, f"{field}.image")
        case "video":
            return film_of(part["video"], part, root, f"{field}.video", field)
        case "video_url":
            url = part.get("video_url")
            return film_of(url.get("url") if isinstance(url, dict) else url, part, root, f"{field}.video_url", field)
        case other:
            raise BadSample("unsupported", f"{field}.type", f"got {_shown(other)}, wanted text, image_url, image or video")


def cauldron_sample(row: Any, id: str, root: Path) -> Sample:
    """The Cauldron and FineVision: {images: pictures, texts: [{user, assistant}]}; all pictures come before the first question."""
    turns = _objects(row, "texts")
    parts: list[Text | Picture | Video] = list(_pictures(row, root))
    messages: list[Message] = []
    for n, turn in enumerate(turns):
        said = [_text_of(turn, key, f"texts[{n}]") for key in ("user", "assistant")]
        messages.append(Message("user", (*parts, Text(said[0]))))
        messages.append(Message("assistant", (Text(said[1]),)))
        parts = []
    return _checked(id, messages, _named_kind(row))


def caption_sample(row: Any, id: str, root: Path) -> Sample:
    """A picture (or several) and a caption: {image or images, caption or text}, and nothing is asked but CAPTION_PROMPT."""
    if not isinstance(row, dict):
        raise BadSample("wrong_type", "row", f"an object was wanted, got {_shown(row)}")
    pictures = _pictures(row, root)
    if not pictures:
        raise BadSample("placeholder_count", "image", "a caption without a picture")
    column = next((c for c in CAPTIONS if row.get(c) is not None), CAPTIONS[0])
    caption = _text_of(row, column, "row")
    return _checked(
        id, [Message("user", (*pictures, Text(CAPTION_PROMPT))), Message("assistant", (Text(caption.strip()),))], _named_kind(row)
    )


def _text_of(value: dict[str, Any], key: str, field: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise BadSample("wrong_type", f"{field}.{key}", f"text was wanted, got {_shown(text)}")
    return _clean(text, f"{field}.{key}")


# easy-VQA

_SHAPES = {"circle", "rectangle", "triangle"}


def easy_vqa_sample(row: Any, id: str, root: Path) -> Sample:
    """easy-VQA: [question, answer, number of the picture], the picture at images/NUMBER.png."""
    match row:
        case [str(question), str(answer), int(number)] if not isinstance(number, bool):
            picture = picture_of(f"images/{number}.png", root, "image")
            asked = Message("user", (picture, Text(_clean(question, "question"))))
            return _checked(id, [asked, Message("assistant", (Text(_clean(answer, "answer")),))], _vqa_kind(row))
        case _:
            raise BadSample("wrong_type", "row", f"[question, answer, number of the picture] was wanted, got {_shown(row)}")


def _vqa_kind(row: Any) -> str:
    """yes/no, shape or color: what easy-VQA's 13 answers are."""
    answer = row[1] if isinstance(row, list) and len(row) == 3 else ""
    return "yes/no" if answer in ("yes", "no") else "shape" if answer in _SHAPES else "color"
