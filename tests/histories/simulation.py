"""Clients as threads of which one runs at a time, and a disk that stops them at each of its calls.

A scheduler with a seed chooses which client runs next, so that one seed gives one interleaving. A
client that crashes makes no further call: no cleanup of it reaches the disk. A power loss crashes
all clients, and drops what was not synced. Commits of SQLite are durable.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sqlite3
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from visavis.core.storage.disk import Disk

MAX_STEPS = 100_000
"""Calls of a history after which it counts as hung."""
CHANGES = (
    "write",
    "sync",
    "replace",
    "unlink",
    "mkdir",
    "map",
    "BEGIN IMMEDIATE",
    "COMMIT",
    "changed",
)
"""Calls after which clients crash more often."""
TICK_NS = 4_000_000
"""Resolution of the times of files, as of Linux."""


class Crash(BaseException):
    """A client or the machine has stopped. It is not an Exception, so that no handler keeps it."""


class Client:
    """A process of the simulation, run by one thread.

    Args:
        name: Name for messages.
        scheduler: Chooses when it runs.
        run: The work of one life. After a crash it is called again.
    """

    def __init__(self, name: str, scheduler: Scheduler, run: Callable[[Client], None]):
        self.name = name
        self.scheduler = scheduler
        self.run = run
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.is_dead = False
        self.is_done = False
        self.crash_at: int | None = None
        # A call, and how often it is made before the crash.
        self.crash_after = ("", 0)
        self.steps = 0
        # The progress of others at which it found a lock taken.
        self.blocked_at: int | None = None
        self.deadline = 0
        self.connections = list[SimulatedConnection]()
        self.files = list[SimulatedFile]()
        self.locks = list[SimulatedLock]()
        self.num_crashes = 0

    def _main(self) -> None:
        self.turn.acquire()
        _local.client = self
        scheduler = self.scheduler
        try:
            while True:
                try:
                    if self.is_dead:  # before its first step
                        raise Crash
                    self.run(self)
                    break
                except BaseException as error:
                    # After its crash, an error is a consequence of it.
                    if not self.is_dead:
                        raise
                    del error
                    self.num_crashes += 1
                    scheduler.progress += 1
                    self.restart()
        except BaseException:  # noqa: BLE001 - reported by the history
            scheduler.fail(f"{self.name}: {traceback.format_exc()}")
        finally:
            self.release()
            self.is_done = True
            scheduler.progress += 1
            _local.client = None
            scheduler.hand_over()

    def restart(self) -> None:
        """Begin a new life."""
        self.release()
        self.is_dead = False
        self.blocked_at = None
        self.steps = 0
        self.scheduler.choose_crash(self)

    def die(self) -> None:
        """Stop the client: the system closes its files and gives up its locks."""
        self.is_dead = True
        self.release()

    def release(self) -> None:
        """Do what the system does at the end of a process."""
        for connection in self.connections:
            connection.close_at_once()
        for file in self.files:
            file.opened.close()
        for lock in self.locks:
            lock.lock.release(force=True)
        for held in (self.connections, self.files, self.locks):
            held.clear()


_local = threading.local()


def current_client() -> Client | None:
    """The client whose thread this is."""
    return getattr(_local, "client", None)


class Scheduler:
    """Chooses by a seed which client runs, when one crashes, and when the power fails.

    Args:
        seed: Seed of all choices.
        crashes: Whether clients crash.
    """

    def __init__(self, seed: int, *, crashes: bool = True):
        self.random = random.Random(seed)
        self.clients = list[Client]()
        self.problems = list[str]()
        self.finished = threading.Event()
        self.steps = self.calls = self.progress = 0
        self.now_ns = 1_700_000_000_000_000_000
        self.crashes = crashes
        self.num_power_losses = 0
        self.on_power_loss: Callable[[], None] = lambda: None
        # Histories with rare switches run long parts of one client, others mix all.
        self.switch_share = self.random.choice([0.03, 0.1, 0.3, 0.7, 1.0])
        self.crash_share = self.random.choice([0.0, 0.5, 0.9]) if crashes else 0.0
        loses_power = crashes and self.random.random() < 0.3
        self.power_loss_at = self.random.randrange(1, 1200) if loses_power else None
        self.log: Callable[[str], None] | None = None

    def choose_crash(self, client: Client) -> None:
        """Choose the step at which a client crashes, or a call after which it does."""
        client.crash_at = None
        client.crash_after = ("", 0)
        if self.random.random() >= self.crash_share:
            return
        if self.random.random() < 0.5:
            client.crash_at = int(2 ** self.random.uniform(0, 8.5))
        else:
            client.crash_after = (self.random.choice(CHANGES), self.random.randrange(1, 9))

    def add(self, name: str, run: Callable[[Client], None]) -> Client:
        """Add a client."""
        client = Client(name, self, run)
        self.choose_crash(client)
        self.clients.append(client)
        return client

    def run_all(self) -> None:
        """Run all clients to their end."""
        for client in self.clients:
            client.thread.start()
        self.hand_over()
        if not self.finished.wait(120):
            self.fail("the clients hang")
        for client in self.clients:
            client.thread.join(10)

    def fail(self, problem: str) -> None:
        """Record a violation."""
        self.problems.append(problem)

    def _choose(self) -> Client | None:
        """The client that runs next. None: all are done."""
        waiting = [client for client in self.clients if not client.is_done]
        if not waiting:
            return None
        ready = [
            client
            for client in waiting
            if client.is_dead or client.blocked_at is None or client.blocked_at != self.progress
        ]
        if not ready:
            # Each waits for another one: time passes until the first gives up.
            first = min(waiting, key=lambda client: client.deadline)
            self.now_ns = max(self.now_ns, first.deadline)
            return first
        return self.random.choice(ready)

    def hand_over(self) -> None:
        """Let another client run after the end of this one."""
        client = self._choose()
        if client is None:
            self.finished.set()
        else:
            client.turn.release()

    def step(self, client: Client, call: str, path: object = "", *, blocked: bool = False) -> None:
        """A call of the disk: others may run before it, and the client may crash."""
        if client.is_dead:
            raise Crash
        if blocked:
            client.blocked_at = self.progress
        else:
            client.blocked_at = None
            self.steps += 1
            client.steps += 1
        self.now_ns += self.random.randrange(200_000)
        self.calls += 1
        if self.calls > MAX_STEPS:
            client.die()
            self.fail("more steps than a history has")
            raise Crash
        if blocked or self.random.random() < self.switch_share:
            following = self._choose()
            if following is not None and following is not client:
                following.turn.release()
                client.turn.acquire()
        if self.log is not None:
            self.log(f"{self.steps:5} {client.name:10} {call:8} {os.path.basename(str(path))[:90]}")
        if self.power_loss_at is not None and self.steps >= self.power_loss_at:
            self.power_loss_at = None
            self.num_power_losses += 1
            for each in self.clients:
                if not each.is_done:
                    each.die()
            self.on_power_loss()
        name, count = client.crash_after
        if (client.crash_at is not None and client.steps >= client.crash_at) or (
            name and not count
        ):
            client.die()
        if name in {call, str(path)} and not blocked:
            client.crash_after = (name, count - 1)
        if client.is_dead:
            if self.log is not None:
                self.log(f"{self.steps:5} {client.name:10} CRASH")
            raise Crash
        if not blocked:
            # Clients that wait may try again.
            self.progress += 1


class SimulatedFile(io.BufferedIOBase):
    """A file that is open for writing. Its buffer is lost in a crash."""

    def __init__(self, disk: SimulatedDisk, path: Path, mode: str):
        super().__init__()
        self.disk = disk
        self.path = path
        mode = mode.replace("b", "")
        self.opened = open(path, f"{mode}b", buffering=0)  # noqa: SIM115 - closed below
        self.buffer = bytearray()

    def write(self, data: Any) -> int:
        """Keep data in the buffer."""
        content = bytes(data)
        self.buffer += content
        return len(content)

    def flush(self) -> None:
        """Write the buffer. A crash may write a part of it."""
        if not self.buffer:
            return
        if self.opened.closed:
            raise Crash
        content = bytes(self.buffer)
        self.buffer.clear()
        self.disk.keep_synced(self.path)
        position = self.opened.tell()
        num_power_losses = self.disk.scheduler.num_power_losses
        try:
            self.disk.step("write", self.path)
        except Crash:
            # The system has written a part of it.
            if num_power_losses == self.disk.scheduler.num_power_losses and self.path.exists():
                part = content[: self.disk.scheduler.random.randrange(len(content) + 1)]
                with open(self.path, "r+b") as file:
                    file.seek(position)
                    file.write(part)
            raise
        self.opened.write(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move the position."""
        self.flush()
        return self.opened.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        """Read from the position."""
        self.flush()
        return self.opened.read(size) or b""

    def truncate(self, size: int | None = None) -> int:
        """Cut the file."""
        self.flush()
        self.disk.step("truncate", self.path)
        self.disk.keep_synced(self.path)
        return self.opened.truncate(size)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.opened.fileno()

    def close(self) -> None:
        """Write the buffer and close the file."""
        # The end of the object closes it again.
        if not self.opened.closed:
            self.flush()
            self.opened.close()
            self.disk.stamp(self.path)

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self.opened.closed


class SimulatedLock:
    """A lock of a file that the end of its client gives up."""

    def __init__(self, disk: SimulatedDisk, lock: Any):
        self.disk = disk
        self.lock = lock

    def release(self) -> None:
        """Give up the lock."""
        self.disk.step("unlock")
        self.lock.release(force=True)


class SimulatedConnection(sqlite3.Connection):
    """A connection that waits for locks at a step of the scheduler."""

    disk: SimulatedDisk
    client: Client
    path: Path
    timeout_ns = 0

    @property
    def in_transaction(self) -> bool:  # type: ignore[override]
        """Whether a transaction has begun."""
        if self.client.is_dead:
            raise Crash
        return bool(super().in_transaction)

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:  # type: ignore[override]
        """Execute a statement."""
        return self._run(super().execute, sql, parameters)

    def executemany(self, sql: str, parameters: Any) -> sqlite3.Cursor:  # type: ignore[override]
        """Execute a statement with several values."""
        return self._run(super().executemany, sql, parameters)

    def _run(
        self, call: Callable[..., sqlite3.Cursor], sql: str, parameters: Any
    ) -> sqlite3.Cursor:
        scheduler = self.disk.scheduler
        client = self.client
        if sql.startswith("PRAGMA busy_timeout"):
            self.timeout_ns = int(sql.rpartition("=")[2]) * 1_000_000
            return super().cursor()
        if client.is_dead:
            raise Crash
        # Other clients cannot see what happens in a change before its commit.
        if not self.is_changing or sql == "COMMIT":
            scheduler.step(client, "sqlite", sql)
        deadline = scheduler.now_ns + self.timeout_ns
        while True:
            try:
                cursor = call(sql, parameters)
                break
            except sqlite3.OperationalError as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code != sqlite3.SQLITE_BUSY or scheduler.now_ns >= deadline:
                    raise
            client.deadline = deadline
            scheduler.step(client, "waits", sql, blocked=True)
        was_changing = self.is_changing
        self.is_changing = super().in_transaction and (was_changing or sql == "BEGIN IMMEDIATE")
        if sql == "COMMIT" and was_changing:
            self.disk.stamp(self.path)
            # A crash directly after the commit: it is not acknowledged.
            scheduler.step(client, "changed", self.path)
        return cursor

    is_changing = False

    def close(self) -> None:
        """Close the connection."""
        if self.client.is_dead:
            raise Crash
        self.close_at_once()

    def close_at_once(self) -> None:
        """Close the connection of a client, as its end does."""
        super().close()


class SimulatedDisk(Disk):
    """A disk on which clients of a scheduler run. Calls of other threads are made at once.

    Args:
        scheduler: Chooses which client runs at each call.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        scheduler.on_power_loss = self.lose_unsynced
        # What is on the disk of each file that was written since. SQLite syncs its own files.
        self.synced = dict[str, bytes]()
        self.databases = set[str]()
        # Changes of names that were not synced: the folder, and what undoes the change.
        self.names = list[tuple[str, Callable[[], None]]]()
        self._stamped = 0

    def step(self, call: str, path: object = "") -> None:
        """Let others run before a call."""
        client = current_client()
        if client is not None:
            self.scheduler.step(client, call, path)

    def stamp(self, path: Path) -> None:
        """Give a file the time of the simulation."""
        with suppress(FileNotFoundError):
            now = self.scheduler.now_ns // TICK_NS * TICK_NS
            os.utime(path, ns=(now, now))

    def keep_synced(self, path: Path) -> None:
        """Keep the content on the disk of a file before its first change."""
        if str(path) not in self.synced and str(path) not in self.databases:
            self.synced[str(path)] = path.read_bytes() if path.exists() else b""

    def _undo(self, folder: Path, undo: Callable[[], None]) -> None:
        self.names.append((str(folder), undo))

    def open(self, path: str | Path, mode: str, buffering: int = -1) -> Any:
        """Open a file."""
        path = Path(path)
        self.step("open", path)
        if not path.exists():
            self.synced[str(path)] = b""
            self._undo(path.parent, lambda: self._forget(path))
        elif "w" in mode:
            self.keep_synced(path)
        file = SimulatedFile(self, path, mode)
        client = current_client()
        if client is not None:
            client.files.append(file)
        return file

    def _forget(self, path: Path) -> None:
        self.synced.pop(str(path), None)
        path.unlink(missing_ok=True)

    def map_array(self, path: Path) -> Any:
        """Map an array for writing."""
        self.step("map", path)
        self.keep_synced(path)
        return super().map_array(path)

    def allocate(self, file: Any, num_bytes: int) -> None:
        """Append zeros."""
        self.step("allocate", file.path)
        file.write(bytes(num_bytes))

    def sync_file(self, file: Any) -> None:
        """Flush an open file."""
        file.flush()
        self.step("sync", file.path)
        self._record_synced(file.path)

    def sync_path(self, path: Path) -> None:
        """Flush a file or a folder."""
        self.step("sync", path)
        if os.path.isdir(path):
            self.names = [(folder, undo) for folder, undo in self.names if folder != str(path)]
        else:
            self._record_synced(path)

    def _record_synced(self, path: Path) -> None:
        if str(path) in self.synced:
            self.synced[str(path)] = path.read_bytes()
        if str(path) not in self.databases:
            self.stamp(path)

    def mkdir(self, path: Path, *, exist_ok: bool = True) -> None:
        """Create a folder."""
        self.step("mkdir", path)
        missing = [each for each in (path, *path.parents) if not each.exists()]
        super().mkdir(path, exist_ok=exist_ok)
        for each in reversed(missing):
            self._undo(each.parent, lambda each=each: self._remove_tree(each))  # type: ignore[misc]

    def _remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        for name in [name for name in self.synced if Path(name).is_relative_to(path)]:
            del self.synced[name]

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file or folder."""
        self.step("replace", f"{source.name} {target.name}")
        is_file = target.is_file()
        old = target.read_bytes() if is_file else None
        old_synced = self.synced.get(str(target))
        super().replace(source, target)
        self._rename_synced(source, target)

        def undo() -> None:
            if target.exists():
                os.replace(target, source)
                self._rename_synced(target, source)
                if old is not None:
                    target.write_bytes(old)
                if old_synced is not None:
                    self.synced[str(target)] = old_synced

        self._undo(target.parent, undo)

    def _rename_synced(self, source: Path, target: Path) -> None:
        for names in (self.synced, self.databases):
            for name in [name for name in names if Path(name).is_relative_to(source)]:
                new = str(target / Path(name).relative_to(source))
                if isinstance(names, dict):
                    names[new] = names.pop(name)
                else:
                    names.discard(name)
                    names.add(new)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        self.step("link", target)
        super().link(source, target)
        self._undo(target.parent, lambda: self._forget(target))

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        self.step("unlink", path)
        old = path.read_bytes() if path.exists() else None
        old_synced = self.synced.pop(str(path), None)
        super().unlink(path)

        def undo() -> None:
            if old is not None:
                path.write_bytes(old)
                if old_synced is not None:
                    self.synced[str(path)] = old_synced

        self._undo(path.parent, undo)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        self.step("rmdir", path)
        super().rmdir(path)

    def rmtree(self, path: Path) -> None:
        """Remove a folder, file by file."""
        for file in sorted(path.rglob("*"), reverse=True):
            with suppress(OSError):
                self.rmdir(file) if file.is_dir() else self.unlink(file)
        with suppress(OSError):
            self.rmdir(path)

    def touch(self, path: Path) -> None:
        """Set the time of a file."""
        self.step("touch", path)
        self.stamp(path)

    def lock(self, path: Path, *, wait: bool) -> Any:
        """Lock a file."""
        client = current_client()
        if client is None:
            return super().lock(path, wait=wait)
        while True:
            self.scheduler.step(client, "lock", path)
            # Not of a thread, because the end of a client is made by another one.
            held = SimulatedLock(self, FileLock(path, timeout=0, thread_local=False))
            with suppress(Timeout):
                held.lock.acquire()
                client.locks.append(held)
                return held
            if not wait:
                return None
            client.deadline = self.scheduler.now_ns + 60 * 10**9
            self.scheduler.step(client, "waits", path, blocked=True)

    def connect(self, path: str | Path, **options: Any) -> sqlite3.Connection:
        """Open a database."""
        self.step("connect", path)
        self.databases.add(str(path))
        self.synced.pop(str(path), None)
        client = current_client()
        if client is None:
            return super().connect(path, **options)
        timeout = options.pop("timeout", 5.0)
        options |= {"check_same_thread": False, "timeout": 0}
        connection = super().connect(path, factory=SimulatedConnection, **options)
        assert isinstance(connection, SimulatedConnection)
        connection.disk = self
        connection.client = client
        connection.path = Path(path)
        connection.timeout_ns = int(timeout * 1e9)
        client.connections.append(connection)
        return connection

    def time_ns(self) -> int:
        """Return the time of the simulation."""
        return self.scheduler.now_ns

    def sleep(self, seconds: float) -> None:
        """Let others run."""
        self.scheduler.now_ns += int(seconds * 1e9)
        self.step("sleep")

    def lose_unsynced(self) -> None:
        """Leave what a power loss leaves: some of the last changes of names, and any part of the
        content that was not synced.
        """
        choose = self.scheduler.random
        kept = choose.randrange(len(self.names) + 1)
        for _, undo in reversed(self.names[kept:]):
            undo()
        self.names.clear()
        for name, synced in self.synced.items():
            path = Path(name)
            if name in self.databases or not path.exists():
                continue
            written = path.read_bytes()
            if written == synced:
                continue
            padded = synced.ljust(len(written), b"\0")
            blocks = range(0, len(written), 16)
            mixed = b"".join(
                choose.choice([written, padded])[start : start + 16] for start in blocks
            )
            with open(path, "r+b") as file:
                file.write(choose.choice([synced, written, padded, mixed]))
                if choose.random() < 0.5:
                    file.truncate()
            os.utime(path, ns=(self.scheduler.now_ns, self.scheduler.now_ns))
        self.synced.clear()
