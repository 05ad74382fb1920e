"""A teacher behind the OpenAI API: `POST /chat/completions`, with images as data URLs."""

import base64
import io
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from PIL import Image as Pillow

from eyeline.core.batch import EncodedImage, Message, Text
from eyeline.core.errors import BadSample, Refused
from eyeline.data.images.decode import upright
from eyeline.data.images.image_files import in_memory
from eyeline.distill.http import Denied, Servers
from eyeline.distill.settings import Distill, ServerTeacher
from eyeline.distill.teacher import Finish, Request, Said
from eyeline.parallel.secrets import secret_named

AS_THEY_ARE = {b"\xff\xd8": "jpeg", b"\x89P": "png", b"RI": "webp"}  # formats that servers take, by how they begin
NEWER_LIMIT = "max_completion_tokens"  # in place of max_tokens, which some hosted models refuse by naming this
ORIENTATION = 0x0112  # in EXIF
FINISHES: dict[Any, Finish] = {"stop": "stop", "length": "length", "content_filter": "filtered", "end_turn": "stop", None: "stop"}


@dataclass(frozen=True, eq=False)
class OpenAITeacher:
    """A teacher behind servers. The key is read from the environment where it runs, and is not in its pickle."""

    teacher: ServerTeacher
    settings: Distill

    @property
    def name(self) -> str:
        return self.teacher.model

    @property
    def identity(self) -> Any:
        return {"model": self.teacher.model, "extra": self.teacher.extra, "seeds": self.teacher.seeds, "max_side": self.teacher.max_side}

    @property
    def tokenizer(self) -> str | None:
        return None

    @property
    def keeps_seeds(self) -> bool:
        return self.teacher.seeds

    @property
    def accelerated(self) -> bool:
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {"teacher": self.teacher, "settings": self.settings}

    @cached_property
    def _servers(self) -> Servers:
        teacher = self.teacher
        key = None if teacher.key_env is None else secret_named(teacher.key_env)
        return Servers(teacher.urls, key, teacher.timeout, teacher.retries)

    def answers(self, requests: Sequence[Request]) -> list[Said]:
        """The answers, in order. The first failure that ends the job also ends what has not begun."""
        answers = in_parallel(self._answer, requests, self.teacher.concurrency)
        refused = [one.why for one in answers if one.finish == "failed" and not one.cause]
        if refused and len(refused) == sum(not one.cause for one in answers):
            raise Refused(
                f"the server refused all {len(refused):,} requests of a partition: {refused[0]}. Look at distill.teacher and "
                "max_new_tokens; some servers take no seed (seeds: false)"
            )
        return answers

    def _answer(self, request: Request) -> Said:
        teacher, settings = self.teacher, self.settings
        try:
            messages = [self._message(message) for message in request.messages]
        except BadSample as bad:
            return Said("", "failed", why=str(bad), cause=bad.cause)
        body: dict[str, Any] = {
            "model": teacher.model,
            "messages": messages,
            "temperature": settings.temperature,
            **({"top_p": settings.top_p} if settings.top_p < 1 else {}),
            **({"seed": request.seed} if teacher.seeds else {}),
            **teacher.extra,
        }
        try:
            return self._completion(body)
        except Denied as denied:
            return Said("", "failed", why=str(denied))

    def _completion(self, body: dict[str, Any]) -> Said:
        """The answer to a request, with the limit of its tokens by the name that the server takes. A server that refuses one name and
        names the other is asked by that from then on. Denied as of `post`."""
        servers, limit = self._servers, self.settings.max_new_tokens
        name = servers.limit_name
        try:
            return servers.post("chat/completions", body | {name: limit}, said_in)
        except Denied as denied:
            if name == NEWER_LIMIT or NEWER_LIMIT not in str(denied):
                raise
        found = servers.post("chat/completions", body | {NEWER_LIMIT: limit}, said_in)
        servers.limit_name = NEWER_LIMIT
        return found

    def _message(self, message: Message) -> dict[str, Any]:
        texts = [part for part in message.parts if isinstance(part, Text)]
        if len(texts) == len(message.parts):
            return {"role": message.role, "content": "".join(part.text for part in texts)}
        return {"role": message.role, "content": [self._part(part) for part in message.parts]}

    def _part(self, part: Any) -> dict[str, Any]:
        match part:
            case Text(text):
                return {"type": "text", "text": text}
            case EncodedImage():
                return {"type": "image_url", "image_url": {"url": data_url(part, self.teacher.max_side)}}
            case _:
                raise BadSample("unsupported", "video", "servers of the OpenAI API take images, not videos")

    def close(self) -> None:
        servers = self.__dict__.pop("_servers", None)
        if isinstance(servers, Servers):
            servers.stopped.set()


def in_parallel(ask: Callable[[Request], Said], requests: Sequence[Request], count: int) -> list[Said]:
    """Ask for each with `count` threads. Raise the first error, after which no more is asked.

    The threads are daemons, which the standard library's pools are not: a request may take minutes, and Ctrl-C must not wait for it.
    """
    waiting: list[Future[Said]] = [Future() for _ in requests]
    left = iter(zip(waiting, requests, strict=True))
    lock, failed = threading.Lock(), threading.Event()

    def work() -> None:
        while not failed.is_set():
            with lock:
                one = next(left, None)
            if one is None:
                return
            future, request = one
            try:
                future.set_result(ask(request))
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                failed.set()
                future.set_exception(error)
        with lock:
            for future, _ in left:
                future.cancel()

    for n in range(min(count, len(requests))):
        threading.Thread(target=work, name=f"teacher {n}", daemon=True).start()
    wait(waiting, return_when=FIRST_EXCEPTION)
    for future in waiting:
        if future.done() and not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in waiting]


def data_url(image: EncodedImage, max_side: int | None) -> str:
    """The image as a data URL: its own bytes where a server takes them, else, or where it is larger than that, as PNG or JPEG. BadSample
    where it cannot be read."""
    data = in_memory(image)
    assert isinstance(data, EncodedImage) and isinstance(data.source, bytes)
    rgb = upright(data)  # also finds out what is damaged, before money is spent on it
    form = AS_THEY_ARE.get(data.source[:2])
    with Pillow.open(io.BytesIO(data.source)) as stored:
        turned = stored.getexif().get(ORIENTATION, 1) != 1  # which servers may overlook
    if form is not None and not turned and (max_side is None or max(rgb.size) <= max_side):
        return f"data:image/{form};base64,{base64.b64encode(data.source).decode()}"
    if max_side is not None:
        rgb.thumbnail((max_side, max_side), Pillow.Resampling.LANCZOS)
    out = io.BytesIO()
    form = "jpeg" if form == "jpeg" else "png"
    rgb.save(out, form, **({"quality": 95} if form == "jpeg" else {}))
    return f"data:image/{form};base64,{base64.b64encode(out.getvalue()).decode()}"


def said_in(answer: dict[str, Any]) -> Said:
    """What a completion says. ValueError, with what it has, where it is not one."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise ValueError(f"an answer that is not a chat completion: {json.dumps(answer, ensure_ascii=False)[:200]}")
    content = message.get("content")
    if isinstance(content, list):  # parts
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    reasoning = next((text for key in ("reasoning_content", "reasoning") if isinstance(text := message.get(key), str)), "")
    if not isinstance(content, str | None):
        raise ValueError(f"an answer whose content is not text: {str(content)[:200]}")
    usage = answer.get("usage")
    counts = [usage.get(key) if isinstance(usage, dict) else None for key in ("prompt_tokens", "completion_tokens")]
    prompt, made = (count if isinstance(count, int) else None for count in counts)
    refusal = message.get("refusal")
    finish = "filtered" if isinstance(refusal, str) and refusal else FINISHES.get(choice.get("finish_reason"), "stop")
    return Said(_unicode(content or ""), finish, _unicode(reasoning), prompt, made)


def _unicode(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON may hold and files may not."""
    return text.encode("utf-8", "replace").decode()
