"""Servers that are slow, busy, wrong or gone, scripted: what is asked again, when, and what ends the job."""

import ssl
import threading
import time
import urllib.error
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from eyeline.core.batch import Message, Text
from eyeline.core.errors import Refused, TeacherFailed
from eyeline.distill.http import Servers, seconds_in, told_wait_s
from eyeline.distill.server import OpenAITeacher
from eyeline.distill.settings import Distill
from eyeline.distill.teacher import Request, Said
from tests.distill.recipe import server
from tests.distill.scripted import Handler, completion, cuts, drops, scripted, slow, status

KEY = "sk-canary-0123456789"


class Clock:
    """Time that passes only where something sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.slept.append(seconds)
            self.now += seconds


def servers(*urls: str, clock: Clock | None = None, key: str | None = None, retries: int = 3, timeout_s: float = 5.0) -> Servers:
    clock = clock or Clock()
    return Servers(urls, key, timeout_s, retries, clock, clock.sleep)


def text_of(answer: dict[str, Any]) -> str:
    if "choices" not in answer:
        raise ValueError("an answer without choices")
    return answer["choices"][0]["message"]["content"]


def post(these: Servers, body: dict[str, Any] | None = None) -> str:
    return these.post("chat/completions", body or {"model": "m", "messages": []}, text_of)


@pytest.mark.parametrize(
    "fault",
    [
        *(status(code) for code in (408, 429, 500, 502, 503, 504, 529)),
        *(drops, cuts, status(200, b"<html>busy</html>"), status(200, [1]), status(200, {"error": "overloaded"})),
    ],
    ids=["408", "429", "500", "502", "503", "504", "529", "reset", "cut", "html", "list", "error"],
)
def test_a_failure_that_may_pass_is_tried_again(fault: Any) -> None:
    clock = Clock()
    with scripted(lambda body: "fine") as script:
        script.faults = [fault, fault]
        assert post(servers(script.url, clock=clock)) == "fine"
    assert len(script.asked) == 3
    assert 0.75 + 1.5 <= sum(clock.slept) <= 1.25 + 2.5, clock.slept  # the second wait about twice the first


@pytest.mark.parametrize(
    ("headers", "wait"),
    [({"Retry_After": "7"}, 7.0), ({"x_ratelimit_reset_requests": "1m2s"}, 62.0), ({"Retry_After": "1000000"}, 600.0)],
    ids=["seconds", "reset", "no longer than ten minutes"],
)
def test_a_busy_server_is_left_alone_as_long_as_it_says(headers: dict[str, str], wait: float) -> None:
    clock = Clock()
    with scripted(lambda body: "fine") as script:
        script.faults = [status(429, **headers)]
        assert post(servers(script.url, clock=clock)) == "fine"
    assert sum(clock.slept) == pytest.approx(wait)


def test_retry_after_as_a_date_is_heeded() -> None:
    wait = told_wait_s({"Retry-After": formatdate(time.time() + 30, usegmt=True)})
    assert wait is not None and 27 < wait <= 30
    assert told_wait_s({"Retry-After": "soon"}) is None


@pytest.mark.parametrize(("text", "seconds"), [("1.5", 1.5), ("20ms", 0.02), ("1m30s", 90.0), ("2h", 7200.0), ("later", None)])
def test_times_of_limits_are_read(text: str, seconds: float | None) -> None:
    assert seconds_in(text) == pytest.approx(seconds)


def test_a_server_with_no_request_left_is_left_alone() -> None:
    clock = Clock()
    with scripted(lambda body: "fine") as script:
        headers = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "12s"}
        script.faults = [lambda handler: handler.answer(200, completion("fine"), headers) is None]
        these = servers(script.url, clock=clock)
        assert post(these) == "fine" and clock.slept == []
        assert post(these) == "fine"
    assert sum(clock.slept) == pytest.approx(12)


def test_a_server_that_does_not_answer_in_time_is_asked_again() -> None:
    with scripted(lambda body: "fine") as script:
        script.faults = [slow(1.0)]
        assert post(servers(script.url, timeout_s=0.3)) == "fine"
    assert len(script.asked) == 2


def test_of_two_servers_one_that_is_down_costs_no_wait() -> None:
    clock = Clock()
    with scripted(lambda body: "fine") as script:
        these = servers("http://127.0.0.1:9/v1", script.url, clock=clock)
        assert [post(these) for _ in range(4)] == ["fine"] * 4
    assert clock.slept == [] and len(script.asked) == 4


def test_requests_are_spread_over_the_servers() -> None:
    requests = [Request((Message("user", (Text(str(n)),)),), n) for n in range(40)]
    lock, now, most = threading.Lock(), [0], [0]

    def say(body: dict[str, Any]) -> str:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return "fine"

    with scripted(say) as one, scripted(say) as other:
        asked = OpenAITeacher(*settings(server(one.url, other.url, concurrency=8)))
        assert len(asked.answers(requests)) == 40
    assert min(len(one.asked), len(other.asked)) >= 10
    assert 2 <= most[0] <= 8


def test_a_teacher_that_never_answers_ends_the_job() -> None:
    with scripted(lambda body: "fine") as script:
        script.always = status(503, {"detail": "model is loading"})
        with pytest.raises(TeacherFailed, match=r"after 4 attempts .*HTTP 503: model is loading.*retries and timeout say how often"):
            post(servers(script.url))
    assert len(script.asked) == 4


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_request_that_crashes_the_server_each_time_is_its_own_failure(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyeline.distill.http.FIRST_WAIT_S", 0.001)

    def crashes(handler: Handler) -> bool:
        return "question 2" in str(handler.body) and status(500, b"Internal Server Error")(handler)

    requests = [Request((Message("user", (Text(f"question {n}"),)),), n) for n in range(3)]
    with scripted(lambda body: "fine") as script:
        script.always = crashes
        found = OpenAITeacher(*settings(server(script.url, retries=2, concurrency=concurrency))).answers(requests)
    assert [one.finish for one in found] == ["stop", "stop", "failed"]
    assert found[2].why == "HTTP 500: Internal Server Error, at each of 3 attempts, while other requests were answered"
    assert len(script.asked) <= 2 + 3 + 1


@pytest.mark.parametrize("answered", [0, 2])
def test_a_server_that_fails_at_everything_ends_the_job(answered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyeline.distill.http.FIRST_WAIT_S", 0.001)
    requests = [Request((Message("user", (Text(f"question {n}"),)),), n) for n in range(3)]
    with scripted(lambda body: "fine") as script:
        script.faults, script.always = [slow(0.0)] * answered, None
        script.faults += [status(500, b"Internal Server Error")] * 9
        with pytest.raises(TeacherFailed, match=r"HTTP 500: Internal Server Error\). The server's log says why"):
            OpenAITeacher(*settings(server(script.url, retries=2, concurrency=1))).answers(requests)
    assert len(script.asked) == (answered + 3 + 1 if answered else 3)  # the last request that was answered is tried again


@pytest.mark.parametrize(
    ("code", "said"),
    [(401, r"HTTP 401: status 401.*key_env"), (403, "HTTP 403"), (404, r"HTTP 404.*urls \(they end in /v1"), (307, "redirects elsewhere")],
)
def test_what_no_request_can_get_past_is_refused_at_once(code: int, said: str) -> None:
    with scripted(lambda body: "fine") as script:
        script.always = status(code, Location="http://127.0.0.1:9/other")
        with pytest.raises(Refused, match=said):
            post(servers(script.url))
    assert len(script.asked) == 1


def test_a_certificate_that_is_not_trusted_ends_the_job_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ssl.SSLCertVerificationError()
    error.verify_message = "self-signed certificate"

    def refuse(*some: Any, **named: Any) -> None:
        raise urllib.error.URLError(error)

    these = servers("https://127.0.0.1:9/v1")
    monkeypatch.setattr(these._opener, "open", refuse)
    with pytest.raises(Refused, match=r"self-signed certificate\. The server's certificate is not trusted here.*SSL_CERT_FILE"):
        post(these)


def test_the_key_is_sent_and_never_shown() -> None:
    with scripted(lambda body: "fine") as script:
        script.always = status(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})
        with pytest.raises(Refused, match=r"provided: \[key\]") as raised:
            post(servers(script.url, key=KEY))
    assert script.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(raised.value)


# Answers


def settings(teacher: dict[str, Any], **more: Any) -> tuple[Any, Distill]:
    found = Distill.model_validate({"sources": [{"path": "x.json"}], "teacher": teacher, **more})
    return found.teacher, found


def answers(say: Callable[[dict[str, Any]], Any], count: int = 1, faults: Any = (), **teacher: Any) -> list[Said]:
    requests = [Request((Message("user", (Text(f"question {n}"),)),), n) for n in range(count)]
    with scripted(say) as script:
        script.faults = list(faults)
        return OpenAITeacher(*settings(server(script.url, **teacher))).answers(requests)


def test_answers_come_in_order_whatever_their_own() -> None:
    def say(body: dict[str, Any]) -> str:
        number = int(body["messages"][0]["content"].split()[1])
        time.sleep((7 - number) * 0.005)
        return f"answer {number}"

    assert [one.text for one in answers(say, 8)] == [f"answer {n}" for n in range(8)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (completion("one two"), Said("one two", "stop", "", 100, 2)),
        (completion("cut off", "length"), Said("cut off", "length", "", 100, 2)),
        (completion("no", "content_filter"), Said("no", "filtered", "", 100, 1)),
        (completion("", refusal="I will not"), Said("", "filtered", "", 100, 0)),
        (completion("so", reasoning_content="because"), Said("so", "stop", "because", 100, 1)),
        ({"choices": [{"message": {"content": [{"type": "text", "text": "parts"}]}}]}, Said("parts", "stop", "", None, None)),
        ({"choices": [{"message": {"content": "half \ud83d"}}]}, Said("half ?", "stop", "", None, None)),
    ],
    ids=["plain", "cut", "filtered", "refusal", "reasoning", "parts", "half of a pair"],
)
def test_an_answer_is_read_as_the_api_has_it(answer: dict[str, Any], said: Said) -> None:
    assert answers(lambda body: answer) == [said]


@pytest.mark.parametrize("answer", [{"choices": []}, {"choices": [{"message": {"content": 3}}]}, {"object": "list"}])
def test_an_answer_of_another_shape_ends_the_job(answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyeline.distill.http.FIRST_WAIT_S", 0.01)
    with pytest.raises(TeacherFailed, match=r"an answer (that is not a chat completion|whose content is not text)"):
        answers(lambda body: answer)


def test_a_request_that_is_refused_is_an_answer_of_its_own() -> None:
    found = answers(lambda body: "fine", 3, [status(400, {"error": {"message": "image too large"}})], concurrency=1)
    assert [one.finish for one in found] == ["failed", "stop", "stop"]
    assert found[0].why == "HTTP 400: image too large"


def test_a_server_that_refuses_all_of_a_partition_ends_the_job() -> None:
    with pytest.raises(Refused, match=r"refused all 2 requests of a partition: HTTP 422: no seeds.*seeds: false"):
        answers(lambda body: "fine", 2, [status(422, {"detail": "no seeds"})] * 2)


NEWER = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."


def takes_the_newer_limit(handler: Handler) -> bool:
    return "max_tokens" in handler.body and status(400, {"error": {"message": NEWER}})(handler)


def test_a_server_that_names_the_newer_limit_is_asked_by_it_from_then_on() -> None:
    requests = [Request((Message("user", (Text(f"question {n}"),)),), n) for n in range(3)]
    with scripted(lambda body: "fine") as script:
        script.always = takes_the_newer_limit
        found = OpenAITeacher(*settings(server(script.url, concurrency=1), max_new_tokens=77)).answers(requests)
    assert [one.finish for one in found] == ["stop"] * 3
    limits = [{name: body[name] for name in body if "tokens" in name} for body in script.asked]
    assert limits == [{"max_tokens": 77}, *[{"max_completion_tokens": 77}] * 3]


def test_a_limit_that_is_too_large_by_both_names_is_refused_by_the_first() -> None:
    too_large = status(400, {"error": {"message": "'max_tokens' or 'max_completion_tokens' is too large: 77"}})
    with scripted(lambda body: "fine") as script:
        script.faults = [too_large, too_large]
        asked = OpenAITeacher(*settings(server(script.url, concurrency=1)))
        found = asked.answers([Request((Message("user", (Text("q"),)),), n) for n in range(2)])
    assert [one.finish for one in found] == ["failed", "stop"]
    assert "max_tokens" in script.asked[-1]


def test_after_a_failure_no_more_is_asked() -> None:
    with scripted(lambda body: "fine") as script:
        script.always = status(401)
        asked = OpenAITeacher(*settings(server(script.url, concurrency=2)))
        with pytest.raises(Refused):
            asked.answers([Request((Message("user", (Text("q"),)),), n) for n in range(50)])
        time.sleep(0.05)
    assert len(script.asked) <= 4


def test_a_request_says_what_the_recipe_says() -> None:
    with scripted(lambda body: "fine") as script:
        more = {"temperature": 0.25, "top_p": 0.5, "max_new_tokens": 77}
        request = Request((Message("system", (Text("s"),)), Message("user", (Text("q"),))), 12)
        OpenAITeacher(*settings(server(script.url, extra={"chat_template_kwargs": {"enable_thinking": True}}), **more)).answers([request])
        OpenAITeacher(*settings(server(script.url, seeds=False))).answers([request])
    first, second = script.asked
    wanted = {"model": "tiny-teacher", "max_tokens": 77, "temperature": 0.25, "top_p": 0.5, "seed": 12}
    wanted |= {"chat_template_kwargs": {"enable_thinking": True}}
    assert first == wanted | {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}
    assert "seed" not in second and "top_p" not in second
