"""The calls that change files of our own formats, and the clock, in one object that a test can
replace.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np
    from filelock import BaseFileLock


# Some file systems cannot flush folders, and a folder may be writable but not readable.
_UNFLUSHABLE_FOLDER = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM}


class Disk:
    """Calls of the operating system and of SQLite. A subclass may observe, delay or refuse each of
    them, and the writes of the files that it opens.
    """

    def open(self, path: str | Path, mode: str, buffering: int = -1) -> BinaryIO:
        """Open a file for writing."""
        return open(path, mode, buffering)  # type: ignore[return-value]

    def map_array(self, path: Path) -> np.ndarray:
        """Map the array of a ``.npy`` file for writing."""
        from numpy.lib.format import open_memmap

        return open_memmap(path, mode="r+")

    def allocate(self, file: BinaryIO, num_bytes: int) -> None:
        """Append zeros to an open file, and reserve their disk space."""
        file.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, max(file.tell() + num_bytes, 1))
        else:
            file.writelines(bytes(min(num_bytes - i, 2**20)) for i in range(0, num_bytes, 2**20))

    def sync_file(self, file: BinaryIO) -> None:
        """Flush an open file to the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_path(self, path: Path) -> None:
        """Flush a file to the disk, or the names in a folder."""
        # Windows flushes only files that are open for writing, and opens no folders.
        opens_folders = hasattr(os, "O_DIRECTORY")
        if not opens_folders and os.path.isdir(path):
            return
        try:
            descriptor = os.open(path, os.O_RDONLY if opens_folders else os.O_RDWR)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _UNFLUSHABLE_FOLDER or not os.path.isdir(path):
                raise

    def mkdir(self, path: Path, *, exist_ok: bool = True) -> None:
        """Create a folder. With ``exist_ok``, it may exist, and folders above may be missing."""
        path.mkdir(parents=exist_ok, exist_ok=exist_ok)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file over an existing one, or a folder over an empty one."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file, which may be missing."""
        path.unlink(missing_ok=True)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def rmtree(self, path: Path) -> None:
        """Remove a folder with its content. What cannot be removed stays."""
        shutil.rmtree(path, ignore_errors=True)

    def chmod(self, path: Path, mode: int) -> None:
        """Set the permissions of a file."""
        path.chmod(mode)

    def touch(self, path: Path) -> None:
        """Set the times of a file to now."""
        os.utime(path)

    def lock(self, path: Path, *, wait: bool) -> BaseFileLock | None:
        """Lock a file until ``release`` is called. None: another process holds the lock."""
        from filelock import FileLock, Timeout

        lock = FileLock(path, timeout=-1 if wait else 0)
        try:
            lock.acquire()
        except Timeout:
            return None
        return lock

    def connect(self, path: str | Path, **options: Any) -> sqlite3.Connection:
        """Open a database of SQLite. Its statements and commits are methods of the connection."""
        return sqlite3.connect(path, **options)

    def time_ns(self) -> int:
        """Return the time in ns since 1970."""
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


_disks = [Disk()]


def current_disk() -> Disk:
    """Return the object through which all files of our own formats are changed."""
    return _disks[-1]


@contextmanager
def replaced_disk(disk: Disk) -> Iterator[None]:
    """Within this block, another object changes the files of all threads of this process."""
    _disks.append(disk)
    try:
        yield
    finally:
        _disks.remove(disk)
