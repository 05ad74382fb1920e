"""Where samples come from. A layout is one function `row -> Sample`; which one fits is detected, not declared."""

import base64
import binascii
import hashlib
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from eyeline.core.batch import Message, Picture, Role, Sample, Text
from eyeline.core.errors import BadSample, Refused, nearest
from eyeline.core.settings import Positive, Settings
from eyeline.data.json_rows import Container, open_container

MAX_DATA_URL = 64 << 20  # characters
PLACEHOLDER = "<image>"


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
    shows: Callable[[Any], list[str]]  # the picture names in a row, as far as they can be told without checking it
    kind: Callable[[Any], str]


@dataclass(frozen=True)
class Rows:
    """An opened source: its rows, each by number. The numbers are positions among the rows that are kept."""

    source: Source
    path: Path
    root: Path  # of the images
    layout: Layout
    container: Container
    kept: tuple[int, ...]  # row numbers in the file
    shown: tuple[tuple[str, ...], ...]  # of each kept row, the keys of its pictures
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kept)

    def id(self, i: int) -> str:
        return f"{self.path.name}#{self.kept[i]}"

    def place(self, i: int) -> tuple[str, int]:
        """File and row number, for messages."""
        return str(self.path), self.kept[i]

    def sample(self, i: int) -> Sample:
        """Row i as a Sample. Raises BadSample."""
        return self.layout.read(self.container.raw(self.kept[i]), self.id(i), self.root)

    def image_key(self, i: int) -> str | None:
        """Equal for rows that look at the same pictures; None for rows without any."""
        return "\n".join(self.shown[i]) or None

    def kind(self, i: int) -> str:
        return self.kinds[i]

    @property
    def fingerprint(self) -> str:
        """What these rows are, for states that must not be used with others: content and choice, not the place."""
        chosen = [self.container.digest, self.layout.name, self.source.kinds, self.source.repeat, self.source.limit, len(self)]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]


def open_source(source: Source) -> Rows:
    """Find the file, recognise its layout and list its rows. Refused, with what was found, when that cannot be done."""
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
    layout = _recognised(path, container)
    kept, shown, kinds = _listed(source, container, layout, root)
    return Rows(source, path, root, layout, container, kept, shown, kinds)


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


def _rows_of(container: Container) -> Iterator[tuple[int, Any]]:
    """Every row that can be parsed at all, with its number; a row that cannot is None."""
    for n in range(container.count):
        try:
            yield n, container.raw(n)
        except BadSample:
            yield n, None


def _recognised(path: Path, container: Container) -> Layout:
    """The layout of the first of some rows that has a known shape."""
    found: list[str] = []
    for n, row in _rows_of(container):
        if n >= 100:
            break
        if isinstance(row, dict):
            if "conversations" in row:
                return Layout("llava", f"{container.what}; row {n} has conversations", llava_sample, _llava_shows, _named_kind)
            if "messages" in row:
                return Layout("openai", f"{container.what}; row {n} has messages", openai_sample, _openai_shows, _named_kind)
            found += [key for key in row if key not in found]
        elif isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], str):
            return Layout("easy-vqa", f"{container.what}; row {n} is [question, answer, picture]", easy_vqa_sample, _vqa_shows, _vqa_kind)
    if not container.count:
        raise Refused(f"{path} holds no rows")
    columns = f"its rows have {', '.join(found[:20])}" if found else "none of its first rows is an object"
    raise Refused(
        f"{path}: no known layout. Found: a {container.what} of {container.count} rows; {columns}. Wanted: conversations (LLaVA), "
        "messages (OpenAI), or [question, answer, picture] rows (easy-VQA). Rename the columns, or convert the file"
    )


def _listed(
    source: Source, container: Container, layout: Layout, root: Path
) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Numbers, picture keys and kinds of the rows that `kinds` and `limit` keep. A row that cannot be parsed is kept: it is to
    be counted as a reject."""
    kept: list[int] = []
    shown: list[tuple[str, ...]] = []
    kinds: list[str] = []
    known: set[str] = set()
    for n, row in _rows_of(container):
        if source.limit is not None and len(kept) >= source.limit:
            break
        kind = layout.kind(row)
        if row is not None:
            known.add(kind)
        if source.kinds is None or kind in source.kinds or row is None:
            kept.append(n)
            shown.append(tuple(_key(name, root) for name in layout.shows(row)))
            kinds.append(kind)
    absent = [kind for kind in source.kinds or () if kind not in known] if source.limit is None else []
    if absent:
        raise Refused(f"{source.path} has no samples of kind {', '.join(absent)}; it has {', '.join(sorted(k or '(none)' for k in known))}")
    return tuple(kept), tuple(shown), tuple(kinds)


def _key(name: str, root: Path) -> str:
    """Names one picture over all sources."""
    if name.startswith("data:"):
        return "data:" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return os.path.normpath(os.path.join(root, name))


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


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
        if wanted == "assistant" and any(isinstance(p, Picture) for p in message.parts):
            raise BadSample("image_in_answer", f"messages[{n}]", "an answer is text; this model cannot draw")
    if messages[-1].role != "assistant":
        raise BadSample("role_order", f"messages[{len(messages) - 1}]", "the last turn asks and is not answered")
    return Sample(id, tuple(messages), kind)


def _split(text: str, role: Role, pictures: Iterator[Picture], field: str) -> tuple[Text | Picture, ...]:
    """Text with its `<image>` placeholders replaced, wherever they stand. Newlines that set a placeholder off are dropped:
    the template says what surrounds a picture."""
    if role == "assistant" and PLACEHOLDER in text:
        raise BadSample("image_in_answer", field, f"{PLACEHOLDER} in an answer")
    pieces = text.split(PLACEHOLDER)
    parts: list[Text | Picture] = []
    for n, piece in enumerate(pieces):
        if n:
            parts.append(next(pictures))
            piece = piece.removeprefix("\n")
        if n < len(pieces) - 1:
            piece = piece.removesuffix("\n")
        if piece:
            parts.append(Text(piece))
    return tuple(parts)


def _counted(texts: Sequence[str], pictures: list[Picture], field: str) -> Iterator[Picture]:
    """The pictures in order, if there are exactly as many as placeholders."""
    places = sum(text.count(PLACEHOLDER) for text in texts)
    if places != len(pictures):
        raise BadSample("placeholder_count", field, f"{places} {PLACEHOLDER} in the text for {len(pictures)} pictures")
    return iter(pictures)


def _column(row: dict[str, Any], root: Path) -> list[Picture]:
    """Pictures from the column `image` or `images`: absent, null, one path, or a list of paths."""
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
    if not isinstance(value, str) or value not in roles:
        raise BadSample("role", field, f"got {_shown(value)}, wanted one of {', '.join(roles)}")
    return roles[value]


LLAVA_ROLES: dict[str, Role] = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def llava_sample(row: Any, id: str, root: Path) -> Sample:
    """LLaVA: {image: path or paths, conversations: [{from: human|gpt|system, value: text with <image>}]}."""
    turns = _objects(row, "conversations")
    texts: list[str] = []
    roles: list[Role] = []
    for n, turn in enumerate(turns):
        roles.append(_role(turn.get("from"), LLAVA_ROLES, f"conversations[{n}].from"))
        value = turn.get("value")
        if not isinstance(value, str):
            raise BadSample("wrong_type", f"conversations[{n}].value", f"text was wanted, got {_shown(value)}")
        texts.append(_clean(value, f"conversations[{n}].value"))
    if row.get("video") is not None:
        raise BadSample("unsupported", "video", "films are not read yet")
    pictures = _counted(texts, _column(row, root), "conversations")
    messages = [
        Message(role, _split(text, role, pictures, f"conversations[{n}].value"))
        for n, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]
    return _checked(id, messages, _named_kind(row))


def _llava_shows(row: Any) -> list[str]:
    return (_strings(row.get("image")) or _strings(row.get("images"))) if isinstance(row, dict) else []


OPENAI_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def openai_sample(row: Any, id: str, root: Path) -> Sample:
    """OpenAI messages: {messages: [{role, content}]}, content a string or a list of text and image parts.

    Strings may hold `<image>` for the pictures of a column `image` or `images`; parts of type image without a path take
    theirs from that column too.
    """
    turns = _objects(row, "messages")
    column = _column(row, root)
    strings = [turn["content"] for turn in turns if isinstance(turn.get("content"), str)]
    bare = sum(_is_bare(part) for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"])
    places = sum(text.count(PLACEHOLDER) for text in strings) + bare
    if places != len(column):
        raise BadSample("placeholder_count", "messages", f"{places} places for pictures of a column, which has {len(column)}")
    pictures = iter(column)
    messages: list[Message] = []
    for n, turn in enumerate(turns):
        role = _role(turn.get("role"), OPENAI_ROLES, f"messages[{n}].role")
        field = f"messages[{n}].content"
        content = turn.get("content")
        if turn.get("tool_calls"):
            raise BadSample("unsupported", f"messages[{n}].tool_calls", "calls of tools are not read yet")
        match content:
            case str():
                parts = _split(_clean(content, field), role, pictures, field)
            case list():
                parts = tuple(_openai_part(part, root, pictures, f"{field}[{m}]") for m, part in enumerate(content))
            case _:
                raise BadSample("wrong_type", field, f"text or a list of parts was wanted, got {_shown(content)}")
        messages.append(Message(role, parts))
    return _checked(id, messages, _named_kind(row))


def _is_bare(part: Any) -> bool:
    """An image part that does not say which."""
    return isinstance(part, dict) and part.get("type") == "image" and all(part.get(k) is None for k in ("image", "path", "url"))


def _openai_part(part: Any, root: Path, pictures: Iterator[Picture], field: str) -> Text | Picture:
    if not isinstance(part, dict):
        raise BadSample("wrong_type", field, f"an object was wanted, got {_shown(part)}")
    match part.get("type"):
        case "text" | "input_text":
            text = part.get("text")
            if not isinstance(text, str):
                raise BadSample("wrong_type", f"{field}.text", f"text was wanted, got {_shown(text)}")
            if PLACEHOLDER in text:
                raise BadSample(
                    "placeholder_count", f"{field}.text", f"{PLACEHOLDER} inside a text part; pictures are parts of their own here"
                )
            return Text(_clean(text, f"{field}.text"))
        case "image_url" | "input_image":
            url = part.get("image_url")
            return picture_of(url.get("url") if isinstance(url, dict) else url, root, f"{field}.image_url")
        case "image":
            if _is_bare(part):
                return next(pictures)
            return picture_of(next(part[k] for k in ("image", "path", "url") if part.get(k) is not None), root, f"{field}.image")
        case other:
            raise BadSample("unsupported", f"{field}.type", f"got {_shown(other)}, wanted text, image_url or image")


def _openai_shows(row: Any) -> list[str]:
    names = _llava_shows(row)
    turns = row.get("messages") if isinstance(row, dict) else None
    for turn in turns if isinstance(turns, list) else []:
        parts = turn.get("content") if isinstance(turn, dict) else None
        for part in parts if isinstance(parts, list) else []:
            match part.get("type") if isinstance(part, dict) else None:
                case "image_url" | "input_image":  # the very picture that `_openai_part` reads: rows of equal names share one
                    url = part.get("image_url")
                    names += _strings(url.get("url") if isinstance(url, dict) else url)
                case "image":
                    names += _strings([part[k] for k in ("image", "path", "url") if part.get(k) is not None][:1])
    return names


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


def _vqa_shows(row: Any) -> list[str]:
    return [f"images/{row[2]}.png"] if isinstance(row, list) and len(row) == 3 else []


def _vqa_kind(row: Any) -> str:
    """yes/no, shape or color: what easy-VQA's 13 answers are."""
    answer = row[1] if isinstance(row, list) and len(row) == 3 else ""
    return "yes/no" if answer in ("yes", "no") else "shape" if answer in _SHAPES else "color"
