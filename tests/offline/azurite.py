"""An Azure store on this machine: Microsoft's emulator azurite, where npm has installed it (`npm install --global azurite`)."""

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

import pytest

ACCOUNT, CONTAINER = "devstoreaccount1", "jobs"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # azurite's, which its documents print
START_S = 60


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Start it, create a container, and yield its endpoint. The test is skipped where it is not installed."""
    program = shutil.which(os.environ.get("AZURITE_BLOB", "azurite-blob"))
    if program is None:
        pytest.skip("azurite is not installed: npm install --global azurite, or AZURITE_BLOB=the path of azurite-blob")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = (program, "--blobPort", str(port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
    process = subprocess.Popen(asked, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while (status := _container_status(port)) is None:
            assert time.monotonic() < end and process.poll() is None, "azurite does not answer"
            time.sleep(0.2)
        assert status == 201
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        process.terminate()
        process.wait()


def _container_status(port: int) -> int | None:
    """Ask for a container; None where nothing answers yet."""
    date, version = formatdate(usegmt=True), "2021-12-02"
    said = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signed = base64.b64encode(hmac.new(base64.b64decode(KEY), said.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signed}", "Content-Length": "0"}
    with suppress(OSError):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("PUT", f"/{ACCOUNT}/{CONTAINER}?restype=container", headers=headers)
        return connection.getresponse().status
    return None
