"""`eyeline watch`: what it answers over HTTP, of runs that are written by hand and grow."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import Refused
from eyeline.study.watch import PAGE, POINTS, Followed, curves, runs_in, server_of
from tests.study.test_report import PNG, step_line

START = {"kind": "start", "hardware": "a machine", "precision": "fp32", "resumed_from": None, "attempt": 1}
STAGE = {"kind": "stage", "stage": "align", "steps": 12, "attempt": 1}


def write(folder: Path, *lines: dict[str, Any], tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


@contextmanager
def served(*folders: Path) -> Iterator[int]:
    """The port of a server of run folders."""
    with server_of([Followed(folder) for folder in folders], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, json.loads(body) if answer.getheader("Content-Type") == "application/json" else body


def test_a_run_is_followed_while_it_grows(tmp_path: Path) -> None:
    """A line that is half written is read when it is whole; a resumed run has its own steps."""
    whole = json.dumps(step_line(2, loss=3.0)) + "\n"
    run = write(tmp_path / "run", START, STAGE, step_line(1), tail=whole[:30])
    with served(run) as port:
        assert get(port, "/api/runs") == (200, [str(run)])
        state = get(port, "/api/runs/0")[1]
        assert (state["last"]["global_step"], state["steps"], state["curves"]["loss"]) == (1, 12, [[1, 2.0]])
        write(run, tail=whole[30:])
        write(run, {"kind": "validation", "stage": "align", "global_step": 2, "loss": 1.5, "supervised": 4})
        state = get(port, "/api/runs/0")[1]
        assert (state["curves"]["loss"], state["validations"], state["ended"]) == ([[1, 2.0], [2, 3.0]], [[2, 1.5]], None)
        write(
            run,
            START | {"resumed_from": 1, "attempt": 2},
            step_line(2, loss=4.0, attempt=2),
            {"kind": "end", "outcome": "done", "attempt": 2},
        )
        state = get(port, "/api/runs/0")[1]
        assert (state["curves"]["loss"], state["validations"], state["ended"]) == ([[1, 2.0], [2, 4.0]], [], "done")
        assert (state["attempts"], state["stamps"]["hardware"]) == (2, "a machine")
        assert dict(state["ledger"]["rows"])["lost_work"] == 1.0
        (run / "metrics.jsonl").unlink()
        write(run, START, step_line(1, loss=9.0))
        assert get(port, "/api/runs/0")[1]["curves"]["loss"] == [[1, 9.0]]


def test_samples_are_served_by_step(tmp_path: Path) -> None:
    run = write(tmp_path / "run", START, step_line(1))
    (run / "samples").mkdir()
    sample = {"stage": "align", "global_step": 12, "answers": [{"question": "which?", "images": [PNG]}]}
    (run / "samples" / "step-00000012.json").write_text(json.dumps(sample))
    (run / "samples" / ".step-00000013.json.1234.tmp").write_text("half")
    with served(run) as port:
        assert get(port, "/api/runs/0")[1]["samples"] == [12]
        assert get(port, "/api/runs/0/samples/12") == (200, sample)
        assert get(port, "/api/runs/0/samples/13")[0] == 404


def test_nothing_but_the_runs_can_be_read_and_nothing_written(tmp_path: Path) -> None:
    run = write(tmp_path / "run", START, step_line(1))
    (tmp_path / "secret.json").write_text("{}")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with served(run) as port:
        for path in (
            "/../secret.json",
            "/api/runs/1",
            "/api/runs/0/samples/../../../secret",
            "/metrics.jsonl",
            "/api/runs/-1",
            "/api/runs/0/",
        ):
            assert get(port, path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE"):
            assert get(port, "/api/runs", method)[0] == 501, method
        assert get(port, "/api/runs", host="evil.example:80")[0] == 403  # a name of another site that leads here
        assert get(port, "/api/runs", host=f"localhost:{port}")[0] == 200
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_the_page_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    with served(write(tmp_path / "run", START)) as port:
        status, body = get(port, "/")
    text = body.decode()
    assert status == 200 and body == PAGE.read_bytes()
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", text) and "@import" not in text and "innerHTML" not in text
    assert not [url for url in re.findall(r"https?://[^\s\"']+", text) if "www.w3.org" not in url]  # the name of a format


def test_a_long_curve_is_thinned_to_means() -> None:
    found = curves([step_line(n, loss=float(n)) for n in range(1, 2 * POINTS + 1)])["loss"]
    assert len(found) == POINTS and found[0] == [2, 1.5] and found[-1] == [2 * POINTS, 2 * POINTS - 0.5]


def test_folders_with_runs_are_looked_into(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, START) for name in ("b", "a")]
    (tmp_path / "other").mkdir()
    assert runs_in([tmp_path]) == sorted(runs)
    assert runs_in([runs[0], tmp_path]) == [runs[0], runs[1]]
    with pytest.raises(Refused, match="holds no run"):
        runs_in([tmp_path / "other"])
    with pytest.raises(Refused, match="is not a directory"):
        runs_in([tmp_path / "nowhere"])


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with served(write(tmp_path / "run", START)) as port, pytest.raises(Refused, match=f"port {port} cannot be used: .*--port {port + 1}"):
        server_of([], port)


@pytest.mark.slow
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no browser here")
    runs = [write(tmp_path / name, START, STAGE, step_line(1), step_line(2, loss=3.0)) for name in ("one", "two")]
    (runs[0] / "samples").mkdir()
    answers = [{"question": "<b>which?</b>", "prediction": "blue", "answer": "red", "correct": False, "images": [PNG]}]
    (runs[0] / "samples" / "step-00000002.json").write_text(json.dumps({"answers": answers}))
    with served(*runs) as port:
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--virtual-time-budget=3000", "--dump-dom", f"http://127.0.0.1:{port}/"]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert page.count("<polyline") >= 2 * 5  # two runs in each chart
    assert "align: step 2 of 12" in page and "goodput 50.0%" in page
    assert "&lt;b&gt;which?&lt;/b&gt;" in page and 'class="wrong">blue' in page
    assert "updated" in page
