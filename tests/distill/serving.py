"""`transformers serve` on this machine."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 120
PROGRAM = "from transformers.cli.transformers import app; app()"  # its own command asks a registry for a newer version first


@dataclass(frozen=True)
class Served:
    """A server, and the file that it logs to."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def asked(self) -> int:
        """The requests that it has received."""
        return self.log.read_text().count("[Request received]")

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False


@contextmanager
def served(folder: Path, count: int, pinned: bool = True) -> Iterator[list[Served]]:
    """Several servers of the model in a folder, which is the only one that they serve if they are `pinned` to it."""
    servers: list[Served] = []
    try:
        for number in range(count):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            asked = ["serve", *([str(folder)] if pinned else []), "--device", "cpu", "--dtype", "float32", "--port", str(port)]
            log = folder.parent / f"{folder.name}-{number}-{port}.log"
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            with open(log, "wb") as file:
                command = [sys.executable, "-c", PROGRAM, *asked, "--host", "127.0.0.1"]
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
            servers.append(Served(process, port, log))
        end = time.monotonic() + START_S
        for server in servers:
            while not server.answers():
                assert time.monotonic() < end and server.process.poll() is None, server.log.read_text()[-2000:]
                time.sleep(0.2)
        yield servers
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()
