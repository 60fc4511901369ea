"""Recording of the operations with which a command changes a folder, and failures of single ones.

``record_writes.c`` is loaded into the command. It sees the calls of the C library, of all threads and
child processes. That a recording is complete is checked: the operations, applied to a copy of the
folder before the command, give the folder after it.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Literal

from tests.crashes.crash_states import CrashState, Node, read_tree, simulate

SOURCE = Path(__file__).with_name("record_writes.c")
PROJECT = SOURCE.parents[2]
KINDS = {
    "C": "create",
    "T": "truncate",
    "W": "write",
    "A": "allocate",
    "R": "rename",
    "N": "rename by a library",
    "L": "link",
    "S": "symlink",
    "U": "unlink",
    "M": "mkdir",
    "D": "rmdir",
    "F": "sync",
    "G": "sync folder",
    "K": "ack",
    "X": "mapped content",
}
NEEDS_SPACE = ("create", "write", "allocate", "mkdir", "link", "symlink")
"""Kinds of operations that a full disk fails."""
_HEADER = struct.Struct("<IIQQqqQIIII")
_MAGIC = 0x56495341
Failure = Literal["ENOSPC", "full", "EIO", "kill"]


@dataclass(frozen=True)
class RecordedOperation:
    """One operation on a file or folder.

    Attributes:
        number: Number in the order of all threads and processes, starting at 1.
        kind: One of ``KINDS``.
        path: Path below the folder. "stdout" for an acknowledgment.
        target: New name of a rename or link, or the target of a symbolic link.
        inode: Number of the file.
        offset: Place of a write, or the new size.
        content: Bytes of a write.
        modified_ns: Time of change of the file after it.
        failed: Number of the injected error. 0: it succeeded.
    """

    number: int
    kind: str
    path: str
    target: str = ""
    inode: int = 0
    offset: int = 0
    content: bytes = field(default=b"", repr=False)
    modified_ns: int = 0
    failed: int = 0

    @property
    def size(self) -> int:
        """Number of bytes that are written."""
        return len(self.content)

    @property
    def acknowledged(self) -> str:
        """Text that the command printed by this operation."""
        return self.content.decode(errors="replace") if self.kind == "ack" else ""


@dataclass(frozen=True)
class Trace:
    """Operations of a command on a folder.

    Attributes:
        operations: All operations in their order.
        inodes: Path of each file before the command by its inode.
        after: The folder after the command.
        process: Exit code and output of the command.
    """

    operations: Sequence[RecordedOperation]
    inodes: Mapping[int, str] = field(repr=False)
    after: Mapping[str, Node] = field(repr=False)
    process: subprocess.CompletedProcess[str]

    @property
    def writes(self) -> int:
        """Number of operations that change the folder."""
        return sum(
            operation.kind not in ("ack", "sync", "sync folder") for operation in self.operations
        )

    def crash_states(self, before: Path) -> Iterator[CrashState]:
        """Return the states in which a stop at any time leaves the folder.

        Args:
            before: A copy of the folder before the command.
        """
        return simulate(self.operations, self.inodes, read_tree(before), self.after)


def missing_reason() -> str:
    """Return why writes cannot be recorded on this machine. Empty: they can."""
    if sys.platform != "linux":
        return "writes are recorded on Linux only"
    if shutil.which("gcc") is None:
        return "the recorder of writes needs gcc"
    return ""


@cache
def temporary_folder() -> Path:
    """Create the folder of this process for recordings, which is removed at its end."""
    folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="visavis-crashes-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def recorder() -> Path:
    """Compile the library, once for each process."""
    library = temporary_folder() / "record_writes.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


class _ForkServer:
    """Process that starts commands."""

    def __init__(self) -> None:
        # The recorder is in memory, and records nothing until a command asks for it.
        environment = {
            **os.environ,
            "LD_PRELOAD": str(recorder()),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), *sys.path))),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crashes.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=PROJECT,
        )
        atexit.register(self.close)
        assert self._answer() == "ready"

    def _answer(self) -> str:
        output: IO[str] | None = self.process.stdout
        assert output is not None
        return output.readline().strip()

    def run(self, request: dict[str, object]) -> int:
        """Run a command and return its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        assert answer, "the fork server ended"
        return int(answer)

    def close(self) -> None:
        """End the server."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


_fork_server = cache(_ForkServer)


def _run(
    command: Sequence[str], folder: Path, log: Path, env: Mapping[str, str] | None, fail: str = ""
) -> subprocess.CompletedProcess[str]:
    folder = Path(os.path.realpath(folder))
    assert folder not in log.resolve().parents, "the log is outside the folder"
    files = {name: log.with_name(f"{log.name}.{name}") for name in ("stdout", "stderr", "control")}
    for path in (log, *files.values()):
        path.write_bytes(b"")
    files["control"].write_bytes(bytes(4096))
    status = files["stdout"].stat()
    variables = {
        **os.environ,
        "LD_PRELOAD": str(recorder()),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **(env or {}),
        "RECORD_WRITES_FOLDER": str(folder),
        "RECORD_WRITES_LOG": str(log),
        "RECORD_WRITES_CONTROL": str(files["control"]),
        "RECORD_WRITES_STDOUT": f"{status.st_dev}:{status.st_ino}",
        "RECORD_WRITES_FAIL": fail,
    }
    if command[0] == "visavis" or list(command[:2]) == ["python", "-m"]:
        code = _fork_server().run(
            {
                "command": list(map(str, command)),
                "environment": variables,
                "cwd": os.getcwd(),
                "stdout": str(files["stdout"]),
                "stderr": str(files["stderr"]),
            }
        )
    else:
        with open(files["stdout"], "ab") as output, open(files["stderr"], "ab") as errors:
            code = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=variables,
                start_new_session=True,
            ).returncode
    output_text, error_text = (files[name].read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(command, code, output_text, error_text)


def record(
    command: Sequence[str], folder: Path, log: Path, env: Mapping[str, str] | None = None
) -> Trace:
    """Run a command and record its operations on a folder.

    Args:
        command: ``visavis`` or ``python -m MODULE`` with arguments, which start fast, or another one.
        folder: Folder whose changes are recorded.
        log: File of the log, outside the folder.
        env: More environment variables.
    """
    folder = Path(os.path.realpath(folder))
    inodes = {
        path.lstat().st_ino: path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    }
    process = _run(command, folder, log, env)
    return Trace(list(read_log(log, folder)), inodes, read_tree(folder), process)


def run_with_failure(
    command: Sequence[str],
    folder: Path,
    number: int,
    failure: Failure,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command whose operation of a number fails.

    Args:
        command: As for ``record``.
        folder: Folder whose operations are counted.
        number: Number of the operation.
        failure: ``ENOSPC`` or ``EIO`` fail this operation. ``full`` also fails all later ones that
            need space, and cuts a write to half of its bytes. ``kill`` ends the processes before it.
        env: More environment variables.

    Raises:
        AssertionError: If nothing failed, because the command had fewer operations.
    """
    codes = {"ENOSPC": (errno.ENOSPC, 0), "full": (errno.ENOSPC, 1), "EIO": (errno.EIO, 0)}
    code, mode = codes.get(failure, (0, 0))
    log = temporary_folder() / "failure.log"
    process = _run(command, folder, log, env, f"{number}:{code}:{mode}")
    has_failed = failure == "kill" or any(
        operation.failed for operation in read_log(log, Path(os.path.realpath(folder)))
    )
    assert has_failed, f"operation {number}: no {failure} was injected"
    return process


def read_log(log: Path, folder: Path) -> Iterator[RecordedOperation]:
    """Read the operations of a log."""
    content = log.read_bytes()
    start = 0
    while start < len(content):
        magic, kind, number, inode, offset, modified, size, failed, *lengths, _ = (
            _HEADER.unpack_from(content, start)
        )
        assert magic == _MAGIC, "damaged log"
        start += _HEADER.size
        parts = list[bytes]()
        for length in (*lengths, size):
            parts.append(content[start : start + length])
            start += length
        path, target = (os.fsdecode(part) for part in parts[:2])
        name = KINDS[chr(kind)]
        if name != "ack":
            path = _below(path, folder)
        if name in ("rename", "rename by a library", "link"):
            target = _below(target, folder)
        yield RecordedOperation(
            number, name, path, target, inode, offset, parts[2], modified, failed
        )


def _below(path: str, folder: Path) -> str:
    """Path below the folder. An absolute path is outside."""
    path = path.removesuffix(" (deleted)")
    inside = Path(path).is_relative_to(folder)
    return Path(path).relative_to(folder).as_posix() if inside else path
