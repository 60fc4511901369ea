"""The recorder sees the writes of all libraries, and the simulated file system loses what a disk may
lose.
"""

from __future__ import annotations

import errno
import signal
import sys

import pytest
from tests.crashes.crash_states import read_tree, simulate
from tests.crashes.recording import RecordedOperation, missing_reason, record, run_with_failure

needs_recorder = pytest.mark.skipif(bool(missing_reason()), reason=missing_reason())

LIBRARIES = """
import mmap, os, shutil, sqlite3, subprocess, sys, threading
import numpy as np
from safetensors.numpy import save_file
os.makedirs("folder/below")
open("text", "w").write("text")
with open("text", "r+") as file:
    file.truncate(2)
    file.seek(6)
    file.write("end")
print("first", flush=True)
array = np.arange(1000.0)
np.save("array.npy", array)
array.tofile("folder/raw")
mapped = np.lib.format.open_memmap("mapped.npy", mode="w+", shape=(10,), dtype="f4")
mapped[:] = 3
mapped.flush()
mapped[2] = 4
del mapped
save_file({"a": array}, "tensors.safetensors")
shutil.copyfile("array.npy", "folder/copy.npy")
os.link("text", "linked")
os.symlink("text", "symbolic")
os.rename("folder/raw", "folder/below/raw")
os.replace("folder/below", "moved")
connection = sqlite3.connect("items.db")
connection.execute("CREATE TABLE items (name)")
connection.execute("INSERT INTO items VALUES ('one')")
connection.commit()
threads = [threading.Thread(target=open(f"thread-{i}", "wb").write, args=(b"x" * i,)) for i in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
code = "import os; open('child', 'a').write('child'); os.posix_fallocate(os.open('child', 1), 0, 99)"
subprocess.run([sys.executable, "-c", code], check=True)
os.writev(os.open("vector", os.O_CREAT | os.O_WRONLY), [b"a", b"b"])
os.pwrite(os.open("vector", os.O_WRONLY), b"c", 1)
shutil.rmtree("folder")
os.fsync(os.open(".", os.O_RDONLY))
print("second", flush=True)
"""


@needs_recorder
@pytest.mark.slow
def test_recorder_sees_writes_of_all_libraries(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    trace = record([sys.executable, "-c", LIBRARIES], work, tmp_path / "log")
    assert trace.process.returncode == 0, trace.process.stderr
    (tmp_path / "before").mkdir()
    # Raises an error if the operations do not give the folder.
    states = list(trace.crash_states(tmp_path / "before"))
    assert dict(states[-1].tree).keys() == read_tree(work).keys()
    assert "".join(each.acknowledged for each in trace.operations) == "first\nsecond\n"
    numbers = [operation.number for operation in trace.operations]
    assert numbers == list(range(1, len(numbers) + 1))
    states[len(states) // 2].write_to(tmp_path / "written")
    assert read_tree(tmp_path / "written") == states[len(states) // 2].tree


WRITES = """
import os
for name in ("a", "b", "c"):
    os.write(os.open(name, os.O_CREAT | os.O_WRONLY), name.encode() * 4)
"""


@needs_recorder
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("ENOSPC", {"a": b"aaaa", "b": b""}),
        ("EIO", {"a": b"aaaa", "b": b""}),
        ("full", {"a": b"aaaa", "b": b"bb"}),
        ("kill", {"a": b"aaaa", "b": b""}),
    ],
)
def test_one_write_fails(failure, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-S", "-E", "-c", WRITES]
    process = run_with_failure(command, tmp_path, 4, failure)
    left = {name: node.content for name, node in read_tree(tmp_path).items()}
    assert left == expected
    if failure == "kill":
        assert process.returncode == -signal.SIGKILL
    else:
        code = errno.EIO if failure == "EIO" else errno.ENOSPC
        assert f"[Errno {code}]" in process.stderr
    with pytest.raises(AssertionError, match="no EIO was injected"):
        run_with_failure(command, tmp_path, 99, "EIO")


def states(*operations: tuple[object, ...]) -> dict[str, list[dict[str, bytes]]]:
    """Files of all states of some operations by the name of the variant."""
    recorded = []
    for number, (kind, path, *more) in enumerate(operations, 1):
        values = dict(more)
        recorded.append(RecordedOperation(number, kind, path, **values))
    found: dict[str, list[dict[str, bytes]]] = {}
    try:
        for state in simulate(recorded, {}, {}, {}):
            files = {name: node.content for name, node in state.tree.items()}
            found.setdefault(state.variant, []).append(files)
    except AssertionError:
        # The folder at the end is not given.
        pass
    return found


def replaced(*, is_synced: bool) -> list[dict[str, bytes]]:
    """Files of all states of a file that gets its name by a rename."""
    new = ("inode", 1)
    writes = [
        ("create", "part", new),
        ("write", "part", new, ("content", b"content")),
        *([("sync", "part", new)] if is_synced else []),
        ("rename", "part", ("target", "file"), new),
        ("sync folder", "."),
    ]
    return [files for group in states(*writes).values() for files in group]


def test_unsynced_file_may_be_empty_after_rename():
    assert {"file": b""} in replaced(is_synced=False)
    assert {"part": b"con"} in replaced(is_synced=False)
    contents = [files["file"] for files in replaced(is_synced=True) if "file" in files]
    assert contents and set(contents) == {b"content"}


def test_names_are_lost_without_sync_of_their_folder():
    new = ("inode", 1)
    found = states(
        ("mkdir", "folder"),
        ("create", "folder/file", new),
        ("write", "folder/file", new, ("content", b"ab")),
        ("sync", "folder/file", new),
        ("sync folder", "folder"),
        ("ack", "stdout", ("content", b"saved\n")),
    )
    assert {} in found["all that was not synced is lost"]
    assert {"folder": b"", "folder/file": b"ab"} in found["stopped after it"]


def test_unsynced_writes_may_be_reordered():
    new = ("inode", 1)
    found = states(
        ("create", "file", new),
        ("sync folder", "."),
        ("write", "file", new, ("content", b"first")),
        ("write", "file", new, ("content", b"last"), ("offset", 5)),
    )
    [name] = [name for name in found if "only the last write" in name]
    assert {"file": b"\0\0\0\0\0last"} in found[name]
    assert {"file": bytes(9)} in found["data that was not synced reads as zeros"]
