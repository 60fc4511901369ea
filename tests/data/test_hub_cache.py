"""The cache of the hub during and after downloads: markers, read-only caches, other processes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from visavis.core import storage
from visavis.core.errors import StorageError
from visavis.data.hub_files import (
    fetch_hub_files,
    finish_download,
    hub_errors,
    unfinished_download,
)

constants = pytest.importorskip("huggingface_hub.constants")


class ReadOnlyDisk(storage.Disk):
    """A disk that refuses each change, as a read-only mount does, also of a missing file."""

    def unlink(self, path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open(self, path, mode, buffering=-1):
        return self.unlink(path)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The folder of a repository in the cache, with one file."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = unfinished_download("tiny/model", "model").parent
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "a").write_text("a")
    return folder


def test_complete_cache_may_be_read_only(cached):
    complete = SimpleNamespace(will_download=False, filename="a", file_size=1)
    with storage.replaced_disk(ReadOnlyDisk()), hub_errors("tiny/model", "a model"):
        fetch_hub_files("tiny/model", "model", [complete])
        finish_download("tiny/model", "model")
    assert (cached / "blobs" / "a").exists()


def test_full_disk_during_a_download_is_not_an_error_of_the_hub():
    with (
        pytest.raises(StorageError, match="no space"),
        hub_errors("tiny/model", "a model", is_download=True),
    ):
        raise StorageError("no space")


@pytest.mark.parametrize("lost", ["a", "a.part.lock"])
def test_download_ends_while_another_process_removes_files(cached, lost):
    class OtherProcess(storage.Disk):
        def sync_path(self, path):
            if path.name == lost:
                Path(path).unlink()
            super().sync_path(path)

    (cached / "blobs" / lost).write_text("")
    unfinished_download("tiny/model", "model").write_text("")
    with storage.replaced_disk(OtherProcess()):
        finish_download("tiny/model", "model")
    assert not unfinished_download("tiny/model", "model").exists()
