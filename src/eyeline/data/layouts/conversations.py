"""Conversations: a function `row -> Sample` for each layout of turns. BadSample says what a row has that cannot be used."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from eyeline.core.batch import EncodedImage, Message, Role, Sample, Text, Video
from eyeline.core.errors import BadSample, closest, nearest
from eyeline.core.locations import Location
from eyeline.data.layouts.likely import with_likely
from eyeline.data.layouts.marks import refuse_marked_part, supervised_turns
from eyeline.data.layouts.media import (
    IMAGE,
    IMAGE_COLUMNS,
    PLACEHOLDERS,
    VIDEO,
    VIDEO_COLUMNS,
    as_text,
    clean,
    describe_value,
    image_of,
    media_of,
    parse_list,
    video_of,
    without_escapes,
)


def named_kind(row: Any) -> str:
    kind = row.get("kind", row.get("category", "")) if isinstance(row, dict) else ""
    return kind if isinstance(kind, str) else ""


def sample_in_turns(id: str, messages: list[Message], kind: str) -> Sample:
    """The sample, if its turns are: perhaps one system message, then user and assistant in turn, an answer last."""
    start = 1 if messages and messages[0].role == "system" else 0
    if not any(m.role == "assistant" for m in messages):
        raise BadSample("no_target", "messages", "there is no answer to train on")
    for n, message in enumerate(messages[start:], start):
        wanted = ("user", "assistant")[(n - start) % 2]
        if message.role == "system":
            raise BadSample("role_order", f"messages[{n}]", "a system message is only allowed once, at the start")
        if message.role != wanted:
            raise BadSample("role_order", f"messages[{n}]", f"user and assistant must take turns, user first; got {message.role}")
        if wanted == "assistant" and not all(isinstance(p, Text) for p in message.parts):
            raise BadSample("image_in_answer", f"messages[{n}]", "an answer must be text; the model does not generate images")
    if messages[-1].role != "assistant":
        raise BadSample("role_order", f"messages[{len(messages) - 1}]", "the last turn is a question without an answer")
    return Sample(id, tuple(messages), kind)


_PLACES = re.compile(rf"(?<!\\)({'|'.join(PLACEHOLDERS)})")  # with a backslash before it, it is text
Media = dict[str, Iterator[EncodedImage | Video]]  # placeholder -> what stands there, in order


def _split(text: str, role: Role, media: Media) -> tuple[Text | EncodedImage | Video, ...]:
    """Text with its placeholders replaced, wherever they stand in a question; in an answer they are text. Newlines that set a
    placeholder off are dropped: the template says what surrounds an image."""
    if role == "assistant":
        return (Text(without_escapes(text)),) if text else ()
    pieces = _PLACES.split(text)
    parts: list[Text | EncodedImage | Video] = []
    for n, piece in enumerate(pieces):
        if n % 2:
            parts.append(next(media[piece]))
            continue
        piece = piece.removeprefix("\n") if n else piece
        piece = piece.removesuffix("\n") if n < len(pieces) - 1 else piece
        if piece:
            parts.append(Text(without_escapes(piece)))
    return tuple(parts)


def _places_in(texts: Iterable[str]) -> Counter[str]:
    """The number of each placeholder in texts, but for those with a backslash before them."""
    return Counter(found for text in texts if "<" in text for found in _PLACES.findall(text))


def _refuse_to_draw(media: dict[str, list[EncodedImage | Video]], places: Counter[str], answers: Sequence[tuple[str, str]]) -> None:
    """BadSample where placeholders in answers, (text, field), are not text: images are left that only they would give a place."""
    for placeholder in PLACEHOLDERS:
        said = [(text, field) for text, field in answers if placeholder in text]
        there = _places_in(text for text, _ in said)[placeholder]
        if there and len(media[placeholder]) == places[placeholder] + there:
            why = f"{placeholder} is in an answer, where one of the row's {PLACEHOLDERS[placeholder]} would go, and an answer must be text"
            remedy = f"Move it to the turn before, or write it as \\{placeholder} where it is text"
            raise BadSample("image_in_answer", said[0][1], f"{why}. {remedy}")


def _media_for_places(row: dict[str, Any], places: Counter[str], media: dict[str, list[EncodedImage | Video]], field: str) -> Media:
    """The media in order, if there are exactly as many as places for them."""
    for placeholder, columns in ((IMAGE, IMAGE_COLUMNS), (VIDEO, VIDEO_COLUMNS)):
        if places[placeholder] != len(media[placeholder]):
            count = f"{places[placeholder]} {placeholder} in the text for {len(media[placeholder])} {PLACEHOLDERS[placeholder]}"
            guesses = [f"; {key!r} is not a column of them.{guess}" for key in row if (guess := nearest(key, columns[:2]))]
            if not media[placeholder] and not guesses:
                guesses = [f". Where it is meant as text, write \\{placeholder}"]
            raise BadSample("placeholder_count", field, count + (guesses[0] if guesses and not media[placeholder] else ""))
    return {placeholder: iter(found) for placeholder, found in media.items()}


def checked_object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadSample("wrong_type", "row", f"wanted an object, got {describe_value(row)}")
    return row


def checked_objects(row: Any, field: str) -> list[dict[str, Any]]:
    """The row's list of messages, each an object."""
    turns = parse_list(checked_object(row).get(field), field)
    if not isinstance(turns, list):
        raise BadSample("wrong_type", field, f"wanted a list of messages, got {describe_value(turns)}")
    for n, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadSample("wrong_type", f"{field}[{n}]", f"wanted an object, got {describe_value(turn)}")
    return turns


def _role(turn: dict[str, Any], ours: str, field: str) -> Role:
    """The role of a turn, by the key `ours` or its equivalent."""
    key = key_of(turn, ours)
    value, field = turn.get(key), f"{field}.{key}"
    if key not in turn:
        raise BadSample("role", field, f"the turn has no {key}, but {_keys(turn, key)}")
    if value in TOOL_ROLES:
        remedy = "Drop such conversations, or write the turns as text"
        raise BadSample("tool_turn", field, f"{value!r}: turns of tools are not supported. {remedy}")
    if not isinstance(value, str) or value not in ROLES:
        raise BadSample("role", field, f"got {describe_value(value)}, wanted one of {', '.join(ROLES)}")
    return ROLES[value]


SAME_KEYS = {"from": "role", "role": "from", "value": "content", "content": "value"}  # of turns: LLaVA's and OpenAI's, often mixed


def key_of(turn: dict[str, Any], ours: str) -> str:
    """The key of a turn that says what `ours` says: itself, or the other one where that alone is there."""
    other = SAME_KEYS[ours]
    return other if turn.get(ours) is None and turn.get(other) is not None else ours


TOOL_ROLES = ("tool", "tool_call", "tool_response", "function", "function_call", "observation", "ipython")


class Turn(NamedTuple):
    role: Role
    text: str
    field: str  # that says it
    object: dict[str, Any] | None = None  # that may mark it as left out of the loss


def sample_of_turns(row: dict[str, Any], id: str, root: Location, turns: Sequence[Turn], column: str, implied: bool = True) -> Sample:
    """The sample of turns that are text with placeholders for what the columns have. Where `implied`, and there is no placeholder at
    all, images and videos come before the first question."""
    _refuse_other_training(row, [turn.text for turn in turns])
    media = media_of(row, root)
    places = _places_in(turn.text for turn in turns if turn.role != "assistant")
    _refuse_to_draw(media, places, [(turn.text, turn.field) for turn in turns if turn.role == "assistant"])
    first: list[Text | EncodedImage | Video] = []
    if implied and not any(places.values()):
        first = [item for found in media.values() for item in found]
        media = {p: [] for p in PLACEHOLDERS}
    standing = _media_for_places(row, places, media, column)
    messages = _system(row)
    kept = supervised_turns(row, [(turn.role, turn.field.rpartition(".")[0], turn.object) for turn in turns])
    for (role, text, _, _), in_loss in zip(turns, kept, strict=True):
        parts = _split(text, role, standing)
        if first and role == "user":
            parts, first = (*first, *parts), []
        messages.append(Message(role, parts, in_loss))
    return sample_in_turns(id, messages, named_kind(row))


COMPARED = ("chosen", "rejected", "rejected_response", "kto_tag", "label")  # columns of data for preference training
SOUNDS = ("audio", "audios")
BOXES = ("<bbox>", "<ref-object>")  # places of what the column `objects` has


def _refuse_other_training(row: dict[str, Any], texts: list[str]) -> None:
    """BadSample for a row that has columns of another kind of training: read without them it would teach something else."""
    for column in COMPARED:
        if row.get(column) is not None and (column != "label" or isinstance(row[column], bool)):
            why = "answers that are compared or rated are not trained on. Keep good answers alone, and leave this column out"
            raise BadSample("preference", column, why)
    if row.get("tools") not in (None, "", "[]", []):
        raise BadSample("tool_turn", "tools", "conversations that use tools are not supported. Drop such rows")
    for column in SOUNDS:
        if row.get(column) not in (None, "", "[]", []):
            raise BadSample("unsupported", column, "audio is not supported. Drop such rows")
    if row.get("objects") and any(box in text for text in texts for box in BOXES):
        raise BadSample("unsupported", "objects", f"{' and '.join(BOXES)} are not filled in. Write boxes as the text to train on")


def _system(row: dict[str, Any]) -> list[Message]:
    """The system message of a row that has it in a column of its own."""
    return [Message("system", (Text(text_of(row, "system", "row")),))] if row.get("system") else []


def text_of(value: dict[str, Any], key: str, field: str) -> str:
    text = as_text(value.get(key), f"{field}.{key}")
    if not isinstance(text, str):
        got = f"got {describe_value(text)}" if key in value else f"and there is no {key}, but {_keys(value, key)}"
        raise BadSample("wrong_type", f"{field}.{key}", f"wanted text, {got}")
    return clean(text, f"{field}.{key}")


def _keys(value: dict[str, Any], key: str) -> str:
    """The keys of an object that lacks a key, as part of a message."""
    close = closest(key, list(value))
    return f"{', '.join(list(value)[:10]) or 'nothing'}" + (f". Rename {close}, or say columns: {{{key}: {close}}}" if close else "")


ROLES: dict[str, Role] = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"system": "system", "developer": "system"},
}


def llava_sample(row: Any, id: str, root: Location) -> Sample:
    """LLaVA: {image: path or paths, video: frames, conversations: [{from: human|gpt|system, value: text with <image>, <video>}]}. Turns
    may be OpenAI's messages ({role, content}), too."""
    return sample_of_conversation(row, id, root, checked_objects(row, "conversations"), "conversations")


def sample_of_conversation(row: dict[str, Any], id: str, root: Location, items: list[dict[str, Any]], column: str) -> Sample:
    """The sample of turns in LLaVA's words or in OpenAI's, or in a mixture. Only in OpenAI's may images have no place in the text."""
    if any(isinstance(item.get(key_of(item, "value")), list) for item in items):
        return sample_of_messages(row, id, root, [(column, n, item) for n, item in enumerate(items)])
    implied = any(key_of(item, "from") == "role" for item in items)
    return sample_of_turns(row, id, root, _turns_of_columns(items, column), column, implied)


def _turns_of_columns(items: list[dict[str, Any]], column: str) -> list[Turn]:
    turns: list[Turn] = []
    for n, turn in enumerate(items):
        role, key = _role(turn, "from", f"{column}[{n}]"), key_of(turn, "value")
        refuse_unread_keys(turn, role, f"{column}[{n}]")
        turns.append(Turn(role, text_of(turn, key, f"{column}[{n}]"), f"{column}[{n}].{key}", turn))
    return turns


def refuse_unread_keys(turn: dict[str, Any], role: Role, field: str) -> None:
    """BadSample for a turn that has tool calls, or reasoning in a field of its own."""
    if turn.get("tool_calls"):
        raise BadSample("tool_turn", f"{field}.tool_calls", "calls of tools are not supported. Drop such conversations")
    for key in REASONING if role == "assistant" else ():
        if turn.get(key):
            why = "reasoning in a field of its own is not read: write it into the content, between <think> and </think>"
            raise BadSample("unsupported", f"{field}.{key}", why)


TEXT_PARTS = ("text", "input_text")
REASONING = ("reasoning_content", "reasoning", "thinking")


def openai_sample(row: Any, id: str, root: Location) -> Sample:
    """OpenAI messages: {messages: [{role, content}]}, content a string or a list of text, image and video parts.

    Strings may hold `<image>` and `<video>` for what the columns have; parts of these types that do not say which take theirs
    from there too. Where there is neither, images and videos of the columns come before the first question.
    """
    return sample_of_messages(row, id, root, [("messages", n, turn) for n, turn in enumerate(checked_objects(row, "messages"))])


def sample_of_messages(row: dict[str, Any], id: str, root: Location, turns: list[tuple[str, int, dict[str, Any]]]) -> Sample:
    """The sample of OpenAI's messages; with each, the column and its number there."""
    keys = [key_of(turn, "content") for _, _, turn in turns]
    fields = [f"{column}[{n}].{key}" for key, (column, n, _) in zip(keys, turns, strict=True)]
    contents = [as_text(turn.get(key), field) for key, field, (_, _, turn) in zip(keys, fields, turns, strict=True)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    _refuse_other_training(row, [*(c for c in contents if isinstance(c, str)), *(str(p.get("text")) for p in parts if isinstance(p, dict))])
    roles: list[Role] = []
    for column, n, turn in turns:
        roles.append(_role(turn, "role", f"{column}[{n}]"))
        refuse_unread_keys(turn, roles[-1], f"{column}[{n}]")
    columns = media_of(row, root)
    places = _places_in(c for c, role in zip(contents, roles, strict=True) if isinstance(c, str) and role != "assistant")
    places.update(bare for part in parts if (bare := _bare(part)) is not None)
    said = [(c, field) for c, field, role in zip(contents, fields, roles, strict=True) if isinstance(c, str) and role == "assistant"]
    _refuse_to_draw(columns, places, said)
    columns[IMAGE] = _in_numbered_order(columns[IMAGE], [part.get("index") for part in parts if _bare(part) == IMAGE])
    first: list[Text | EncodedImage | Video] = []
    if not any(places.values()) and not any(isinstance(part, dict) and part.get("type") not in TEXT_PARTS for part in parts):
        first = [item for found in columns.values() for item in found]
        columns = {p: [] for p in PLACEHOLDERS}
    media = _media_for_places(row, places, columns, turns[0][0] if turns else "messages")
    messages = _system(row)
    kept = supervised_turns(row, [(role, f"{column}[{n}]", turn) for role, (column, n, turn) in zip(roles, turns, strict=True)])
    for content, field, role, in_loss in zip(contents, fields, roles, kept, strict=True):
        match content:
            case str():
                said = _split(clean(content, field), role, media)
            case list():
                said = tuple(_openai_part(part, role, root, media, f"{field}[{m}]") for m, part in enumerate(content))
            case _:
                raise BadSample("wrong_type", field, f"wanted text or a list of parts, got {describe_value(content)}")
        if first and role == "user":
            said, first = (*first, *said), []
        messages.append(Message(role, said, in_loss))
    return sample_in_turns(id, with_likely(messages, turns), named_kind(row))


def _in_numbered_order(images: list[EncodedImage | Video], numbers: list[Any]) -> list[EncodedImage | Video]:
    """The images in the order in which parts number them, if they do."""
    numbered = all(isinstance(n, int) for n in numbers) and set(numbers) == set(range(len(images)))
    return [images[n] for n in numbers] if numbered else images


def _bare(part: Any) -> str | None:
    """The placeholder that a part is equal to: an image or video part that does not say which."""
    match part:
        case {"type": "image"} if all(part.get(k) is None for k in ("image", "path", "url")):
            return IMAGE
        case {"type": "video"} if part.get("video") is None:
            return VIDEO
        case _:
            return None


def _openai_part(part: Any, role: Role, root: Location, media: Media, field: str) -> Text | EncodedImage | Video:
    if not isinstance(part, dict):
        raise BadSample("wrong_type", field, f"wanted an object, got {describe_value(part)}")
    refuse_marked_part(part, field)
    bare = _bare(part)
    if bare is not None:
        return next(media[bare])
    match part.get("type"):
        case "text" | "input_text":
            text = as_text(part["text"] if part.get("text") is not None else part.get("value"), f"{field}.text")
            if not isinstance(text, str):
                raise BadSample("wrong_type", f"{field}.text", f"wanted text, got {describe_value(text)}")
            for placeholder in _places_in([text]) if role != "assistant" else ():
                why = (
                    f"{placeholder} inside a text part; {PLACEHOLDERS[placeholder]} are parts of their own. Write \\{placeholder} for text"
                )
                raise BadSample("placeholder_count", f"{field}.text", why)
            return Text(without_escapes(clean(text, f"{field}.text")))
        case "image_url" | "input_image":
            url = part["image_url"] if part.get("image_url") is not None else part.get("value")
            return image_of(url.get("url") if isinstance(url, dict) else url, root, f"{field}.image_url")
        case "image":
            return image_of(next(part[k] for k in ("image", "path", "url") if part.get(k) is not None), root, f"{field}.image")
        case "video":
            return video_of(part["video"], part, root, f"{field}.video", field)
        case "video_url":
            url = part.get("video_url")
            return video_of(url.get("url") if isinstance(url, dict) else url, part, root, f"{field}.video_url", field)
        case other:
            raise BadSample("unsupported", f"{field}.type", f"got {describe_value(other)}, wanted text, image_url, image or video")
