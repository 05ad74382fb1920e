"""`eyeline watch RUN…`: a live page of one or several runs, served on this machine alone. It reads run folders, and writes nothing.

/                      the page (watch.html): it asks for the rest every two seconds
/api/runs              the runs, by number
/api/runs/N            what is known of run N: where it stands, curves, validations, the ledger, its stamps
/api/runs/N/samples/S  the answers of the validation at step S, with their images
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eyeline.core.errors import Refused
from eyeline.core.log import say
from eyeline.core.run_folder import SAMPLES
from eyeline.study.history import LINE_LIMIT, resumed_from
from eyeline.study.ledger import ledger_of

HOST = "127.0.0.1"
POINTS = 600  # of a curve
PAGE = Path(__file__).with_name("watch.html")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
CURVES = ("loss", "grad_norm", "real_tokens_per_s", "mfu", "padding", "memory_bytes", "step_s", "data_wait_s")


class Followed:
    """The lines of a metrics.jsonl that grows: each is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()  # a browser asks for several things at once
        self._reset()

    def _reset(self) -> None:
        self._read = 0  # bytes
        self.lines: list[dict[str, Any]] = []
        self._steps: dict[int, dict[str, Any]] = {}
        self._validations: dict[int, dict[str, Any]] = {}

    def state(self) -> dict[str, Any]:
        """What the page shows of the run now."""
        with self._lock:
            self._follow()
            steps = [self._steps[number] for number in sorted(self._steps)]
            starts = [line for line in self.lines if line.get("kind") == "start"]
            stages = {line.get("stage"): line for line in self.lines if line.get("kind") == "stage"}
            last = steps[-1] if steps else None
            ledger = ledger_of(self.lines)
            return {
                "name": str(self.folder),
                "last": last,
                "steps": stages.get(last["stage"], {}).get("steps") if last else None,
                "ended": self.lines[-1].get("outcome") if self.lines and self.lines[-1].get("kind") == "end" else None,
                "curves": curves(steps),
                "validations": [[number, self._validations[number].get("loss")] for number in sorted(self._validations)],
                "ledger": {"rows": ledger.rows(), "wall_s": ledger.wall_s, "goodput": ledger.goodput, "remarks": ledger.remarks()},
                "stamps": {name: value for name, value in starts[-1].items() if name != "kind"} if starts else {},
                "attempts": len(starts),
                "samples": sample_steps(self.folder),
            }

    def _follow(self) -> None:
        """Read the lines that are new. What follows the last newline is not whole yet."""
        path = self.folder / "metrics.jsonl"
        try:
            size = path.stat().st_size
            if size < self._read:  # a resumed run cuts what a kill has torn, and another run may be in the folder
                self._reset()
            with open(path, "rb") as file:
                file.seek(self._read)
                new = file.read(size - self._read)
        except FileNotFoundError:
            return self._reset()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for raw in whole.split(b"\n"):
            try:
                line = json.loads(raw) if len(raw) < LINE_LIMIT else None
            except ValueError:
                continue
            if isinstance(line, dict):
                self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        match line.get("kind"):
            case "step" if isinstance(line.get("global_step"), int) and "stage" in line:
                self._steps[line["global_step"]] = line
            case "validation" if isinstance(line.get("global_step"), int):
                self._validations[line["global_step"]] = line
            case "start" if (first := resumed_from(line)) is not None:
                self._steps = {number: one for number, one in self._steps.items() if number <= first}
                self._validations = {number: one for number, one in self._validations.items() if number <= first}
            case _:
                pass


def curves(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Points of each curve: (step, value), the mean of as many steps as leave at most POINTS of them."""
    found: dict[str, list[list[float]]] = {}
    every = max(1, -(-len(steps) // POINTS))
    for at in range(0, len(steps), every):
        some = steps[at : at + every]
        values = {name: [step.get(name) for step in some] for name in CURVES}
        values |= {f"lr {part}": [step.get("lr", {}).get(part) for step in some] for part in some[-1].get("lr", {})}
        for name, numbers in values.items():
            known = [float(number) for number in numbers if isinstance(number, int | float)]
            if known:
                found.setdefault(name, []).append([float(some[-1]["global_step"]), sum(known) / len(known)])
    return found


def sample_steps(folder: Path) -> list[int]:
    """The steps whose validation answered samples."""
    names = [path.name for path in (folder / SAMPLES).glob("step-*.json")]
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{8,15})\.json", name)))


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The run folders that are meant: each itself, or those in it. Refused where there is none."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise Refused(f"{folder} is not a directory. Give a run folder, such as runs/NAME, or a folder with some")
        inner = [folder] if _is_run(folder) else sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))
        if not inner:
            raise Refused(
                f"{folder} holds no run: neither it nor a folder in it has a recipe.yaml. Give a folder that `eyeline train` wrote"
            )
        found += [path for path in inner if path not in found]
    return found


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() or (folder / "metrics.jsonl").is_file()


def answer(path: str, runs: Sequence[Followed]) -> tuple[int, str, bytes]:
    """The status, type and body of what a path asks for. Nothing of the path is used as a name of a file, but for numbers."""
    if path == "/":
        return 200, "text/html; charset=utf-8", PAGE.read_bytes()
    if path == "/api/runs":
        return _json([str(run.folder) for run in runs])
    found = re.fullmatch(r"/api/runs/(\d{1,4})(?:/samples/(\d{1,15}))?", path)
    if found is None or int(found[1]) >= len(runs):
        return 404, "text/plain", b"not found\n"
    run = runs[int(found[1])]
    if found[2] is None:
        return _json(run.state())
    try:
        return 200, "application/json", (run.folder / SAMPLES / f"step-{int(found[2]):08d}.json").read_bytes()
    except FileNotFoundError:
        return 404, "text/plain", b"not found\n"


def _json(value: Any) -> tuple[int, str, bytes]:
    return 200, "application/json", json.dumps(value).encode()


def server_of(runs: Sequence[Followed], port: int) -> ThreadingHTTPServer:
    """The server, on 127.0.0.1. Refused where the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # a page of another site whose name was made to lead here must not read the runs
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                self.send_error(403)
                return
            status, kind, body = answer(self.path, runs)
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Content-Security-Policy", POLICY),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise Refused(f"port {port} cannot be used: {error.strerror}. Give another one: --port {port + 1}") from error


def watch(folders: Sequence[Path], port: int) -> None:
    """Serve the page until it is interrupted."""
    runs = [Followed(folder) for folder in runs_in(folders)]
    with server_of(runs, port) as server:
        say(f"watching {', '.join(str(run.folder) for run in runs)} on http://{HOST}:{server.server_port} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")
