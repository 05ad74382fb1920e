"""Where samples come from. A layout is one function `row -> Sample`; which one fits is detected, not declared."""

import base64
import binascii
import hashlib
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from eyeline.core.batch import Message, Picture, Role, Sample, Text, Video
from eyeline.core.errors import BadSample, Refused, nearest
from eyeline.core.settings import Positive, Settings
from eyeline.data.containers import Container, Place, Shard
from eyeline.data.images import picture_key
from eyeline.data.json_rows import open_lines, open_list

MAX_DATA_URL = 64 << 20  # characters
IMAGE, VIDEO = "<image>", "<video>"  # where a picture or a film of a column stands in a text
PLACEHOLDERS = {IMAGE: "pictures", VIDEO: "films"}
SAMPLED_FPS = 2.0  # of frames that are given without times, as qwen-vl-utils takes them (vision_process.py: FPS)
MAX_FRAMES = 2_048


class Source(Settings):
    """One set of samples."""

    path: str  # a file; a folder of easy-VQA; or package:NAME/folder for one inside an installed Python package
    images: str | None = None  # the folder that picture paths start from; by default the one that the file lies in
    kinds: tuple[str, ...] | None = None  # keep only samples of these kinds
    repeat: Positive = 1  # visits an epoch
    limit: Positive | None = None  # keep only the first so many


@dataclass(frozen=True)
class Layout:
    name: str
    why: str  # how it was recognised
    read: Callable[[Any, str, Path], Sample]  # (row, id, root of the images); BadSample for what it cannot use
    kind: Callable[[Any], str]


@dataclass(frozen=True)
class Rows:
    """An opened source: a list of shards, each read in order, and any row by its place. Pickles small.

    Every row is given, whatever `kinds` and `limit` say: they choose among what was read.
    """

    source: Source
    path: Path
    root: Path  # of the images
    layout: Layout
    container: Container

    @property
    def shards(self) -> tuple[Shard, ...]:
        """In the order of the files."""
        return self.container.shards

    def rows_in(self, shard: int) -> Iterator[tuple[Place, str, Sample | BadSample]]:
        """(place, kind, the sample or why there is none) of every row of a shard, in order."""
        for place, row in self.container.rows(shard):
            yield place, "" if isinstance(row, BadSample) else self.layout.kind(row), self._sample(place, row)

    def read(self, place: Place) -> Sample:
        """One row as a Sample. Raises BadSample, and StorageFailed when its file has changed."""
        return self.layout.read(self.container.row(place), self.named(place)[0], self.root)

    def named(self, place: Place) -> tuple[str, str, int]:
        """Id, file and row number in the file (in its shard, where nobody has counted the rows before), for messages."""
        return self.container.named(place)

    def _sample(self, place: Place, row: Any) -> Sample | BadSample:
        try:
            return row if isinstance(row, BadSample) else self.layout.read(row, self.named(place)[0], self.root)
        except BadSample as bad:
            return bad

    # The rows that `kinds` and `limit` keep, as one list

    @cached_property
    def listed(self) -> tuple[tuple[Place, str, tuple[str, ...]], ...]:
        """Place, kind and picture keys of each kept row. A row that cannot be parsed is of every kind: it is to be counted as a reject."""
        out: list[tuple[Place, str, tuple[str, ...]]] = []
        known: set[str] = set()
        for shard in range(len(self.shards)):
            for place, row in self.container.rows(shard):
                if self.source.limit is not None and len(out) >= self.source.limit:
                    return tuple(out)
                kind = "" if isinstance(row, BadSample) else self.layout.kind(row)
                if not isinstance(row, BadSample):
                    known.add(kind)
                if self.source.kinds is None or kind in self.source.kinds or isinstance(row, BadSample):
                    sample = self._sample(place, row)
                    keys = () if isinstance(sample, BadSample) else tuple(picture_key(p) for p in sample.pictures)
                    out.append((place, kind, keys))
        absent = [kind for kind in self.source.kinds or () if kind not in known] if self.source.limit is None else []
        if absent:
            has = ", ".join(sorted(k or "(none)" for k in known))
            raise Refused(f"{self.source.path} has no samples of kind {', '.join(absent)}; it has {has}")
        return tuple(out)

    def __len__(self) -> int:
        return len(self.listed)

    def id(self, i: int) -> str:
        return self.named(self.listed[i][0])[0]

    def place(self, i: int) -> tuple[str, int]:
        """File and row number, for messages."""
        return self.named(self.listed[i][0])[1:]

    def sample(self, i: int) -> Sample:
        """Kept row i as a Sample. Raises BadSample."""
        return self.read(self.listed[i][0])

    @property
    def shown(self) -> tuple[tuple[str, ...], ...]:
        return tuple(keys for _, _, keys in self.listed)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for _, kind, _ in self.listed)

    def image_key(self, i: int) -> str | None:
        """Equal for rows that look at the same pictures; None for rows without any."""
        return "\n".join(self.listed[i][2]) or None

    def kind(self, i: int) -> str:
        return self.listed[i][1]

    @property
    def fingerprint(self) -> str:
        """What these rows are, for states that must not be used with others: content and choice, not the place."""
        content = [shard.fingerprint for shard in self.shards]
        chosen = [content, self.layout.name, self.source.kinds, self.source.repeat, self.source.limit, len(self)]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]


def open_source(source: Source) -> Rows:
    """Find the file, recognise its layout and list its shards. Refused, with what was found, when that cannot be done."""
    path = _located(source.path)
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        path = path / "questions.json"
        if not path.is_file():
            files = sorted(p.name for p in folder.iterdir() if p.suffix in (".json", ".jsonl"))
            raise Refused(
                f"{folder} is a folder without a questions.json (easy-VQA's layout). "
                + (f"Give one of its files: {', '.join(files[:10])}" if files else "It holds no .json or .jsonl file either")
            )
    root = Path(os.path.abspath(source.images)) if source.images is not None else folder
    if not os.path.isdir(root):
        raise Refused(f"the folder of the images, {root}, does not exist. Set images: to the folder that picture paths start from")
    container = open_container(path)
    rows = Rows(source, path, root, _recognised(path, container), container)
    assert rows.listed is not None
    return rows


def _located(path: str) -> Path:
    if not path.startswith("package:"):
        found = Path(os.path.abspath(os.path.expanduser(path)))
        try:
            if not os.path.lexists(found):
                beside = sorted(os.listdir(found.parent)) if os.path.isdir(found.parent) else []
                raise Refused(f"{found} does not exist.{nearest(found.name, beside)}")
            mode = os.stat(found).st_mode
        except (OSError, ValueError) as error:  # ValueError: half a surrogate pair, or NUL
            raise Refused(f"{str(found)[:300]} cannot be opened: {getattr(error, 'strerror', None) or error}. Give another path") from error
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait for ever
            raise Refused(f"{found} is neither a file nor a folder. Give the path of a file that stays, or of a folder")
        return found
    package, _, inside = path.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(package) if re.fullmatch(r"[A-Za-z_]\w*", package) else None
    except ValueError:  # of a module without a spec, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise Refused(f"the Python package {package!r}, which {path} names, is not installed. Try: pip install {package.replace('_', '-')}")
    base = Path(next(iter(spec.submodule_search_locations)))
    found = Path(os.path.normpath(base / inside))
    if not found.is_relative_to(base) or not os.path.exists(found):
        raise Refused(f"{path}: there is no {inside} inside {base}")
    return found


def open_container(path: Path) -> Container:
    """What the file is, told by its first bytes. Refused when it holds no rows that can be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from error
    if head.startswith(b"["):
        return open_list(path)
    if head.startswith(b"{"):
        return open_lines(path)
    kinds = {b"PAR1": "a Parquet file", b"\x1f\x8b": "gzip", b"PK": "a zip archive", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
    what = next((name for magic, name in kinds.items() if head.startswith(magic)), f"something that begins with {head[:12]!r}")
    raise Refused(f"{path} is {what if head else 'empty'}; wanted: a JSON list of rows, or JSON lines (UTF-8)")


def _recognised(path: Path, container: Container) -> Layout:
    """The layout of the first of some rows that has a known shape."""
    found: list[str] = []
    count = 0
    for row in islice((row for shard in range(len(container.shards)) for _, row in container.rows(shard)), 100):
        n, count = count, count + 1
        if isinstance(row, dict):
            if "conversations" in row:
                return Layout("llava", f"{container.what}; row {n} has conversations", llava_sample, _named_kind)
            if "messages" in row:
                return Layout("openai", f"{container.what}; row {n} has messages", openai_sample, _named_kind)
            found += [key for key in row if key not in found]
        elif isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], str):
            return Layout("easy-vqa", f"{container.what}; row {n} is [question, answer, picture]", easy_vqa_sample, _vqa_kind)
    if not count:
        raise Refused(f"{path} holds no rows")
    columns = f"its rows have {', '.join(found[:20])}" if found else "none of its first rows is an object"
    raise Refused(
        f"{path}: no known layout. Found: a {container.what}; {columns}. Wanted: conversations (LLaVA), "
        "messages (OpenAI), or [question, answer, picture] rows (easy-VQA). Rename the columns, or convert the file"
    )


def _named_kind(row: Any) -> str:
    kind = row.get("kind", row.get("category", "")) if isinstance(row, dict) else ""
    return kind if isinstance(kind, str) else ""


# Pictures


_URL = re.compile(r"[a-z][a-z0-9+.-]*:(//|\\\\)|(https?|ftp|file|s3|gs|hf):", re.IGNORECASE)


def picture_of(name: Any, root: Path, field: str) -> Picture:
    """A picture by the name a row gives it: a path inside `root`, or a data: URL. Nothing is opened, and no URL is fetched."""
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
        raise BadSample("film", timed, f"a time in seconds for each of {len(pictures)} frames was wanted, got {_shown(times)}")
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
        if isinstance(value, str):
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
