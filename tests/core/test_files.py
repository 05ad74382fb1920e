"""Files appear whole."""

import errno
import os
from pathlib import Path

import pytest

from eyeline.core.errors import StorageFailed
from eyeline.core.files import write_atomically


@pytest.mark.parametrize("durable", [True, False])
def test_who_reads_a_file_that_is_replaced_reads_the_old_one(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with open(path, encoding="utf-8") as reader:
        write_atomically(path, "new and longer", durable)
        assert reader.read() == "old"
    assert path.read_text(encoding="utf-8") == "new and longer"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(
            StorageFailed, match=r"could not write .*file \(3 bytes\): No space left on device; [\d,]+ bytes are free there"
        ):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
