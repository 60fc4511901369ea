"""Simulated file system: the states in which a stop of the machine or the process leaves a folder.

A killed process leaves what it wrote. A power loss also loses what was not synced: the content of a
file since its last sync, and names in a folder since the last sync of the folder. File systems differ
in which of both survives, so that several variants are made of each point in time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.crashes.recording import RecordedOperation

MAX_SINGLE_LOSSES = 4
"""Number of files with unsynced data up to which each one is also lost alone."""


@dataclass(frozen=True)
class Node:
    """A file, folder or symbolic link of a tree.

    Attributes:
        kind: "file", "folder" or "link".
        content: Bytes of a file, or the target of a link.
        modified_ns: Time of change of a file.
    """

    kind: str
    content: bytes = field(default=b"", repr=False)
    modified_ns: int = field(default=0, compare=False)


Tree = Mapping[str, Node]


@dataclass(frozen=True)
class CrashState:
    """A folder after a stop.

    Attributes:
        number: Number of the operation at which the command stopped.
        kind: Kind of this operation.
        path: Path of this operation.
        variant: The loss.
        label: All of this as a text.
        acknowledged: Text that the command had printed.
        tree: Files and folders by path.
    """

    number: int
    kind: str
    path: str
    variant: str
    label: str
    acknowledged: str
    tree: Tree = field(repr=False)

    def write_to(self, folder: Path) -> None:
        """Write the state into a folder, whose content it replaces."""
        write_tree(self.tree, folder)


def read_tree(folder: Path) -> dict[str, Node]:
    """Read all files, folders and links below a folder."""
    tree = dict[str, Node]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            tree[name] = Node("link", os.fsencode(os.readlink(path)))
        elif path.is_dir():
            tree[name] = Node("folder")
        elif path.is_file():
            tree[name] = Node("file", path.read_bytes(), path.stat().st_mtime_ns)
    return tree


def write_tree(tree: Tree, folder: Path) -> None:
    """Write a tree into a folder, whose content it replaces."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, node in tree.items():
        path = folder / name
        if node.kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
        elif node.kind == "link":
            path.symlink_to(os.fsdecode(node.content))
        else:
            path.write_bytes(node.content)
            if node.modified_ns:
                os.utime(path, ns=(node.modified_ns, node.modified_ns))


class _File:
    """A file, or a symbolic link."""

    def __init__(self, node: Node, *, is_synced: bool):
        self.kind = node.kind
        self.content = node.content
        self.modified_ns = node.modified_ns
        self.synced = node.content if is_synced else b""
        self.synced_ns = node.modified_ns
        # Content with only the last write since the last sync.
        self.last_only = self.synced

    @property
    def is_lost(self) -> bool:
        return self.kind == "file" and self.content != self.synced

    def sync(self) -> None:
        self.synced = self.last_only = self.content
        self.synced_ns = self.modified_ns


class _Folder:
    def __init__(self) -> None:
        self.names = dict[str, _File | _Folder]()
        self.durable = dict[str, _File | _Folder]()

    def sync(self) -> None:
        self.durable = dict(self.names)


def _written(content: bytes, offset: int, part: bytes) -> bytes:
    """Content after a write. A hole is filled with zeros."""
    return content[:offset].ljust(offset, b"\0") + part + content[offset + len(part) :]


def _resized(content: bytes, size: int) -> bytes:
    return content[:size].ljust(size, b"\0")


class _FileSystem:
    """The folder at one point in time, with the part of it that would survive a power loss."""

    def __init__(self, tree: Tree, inodes: Mapping[int, str]):
        self.root = _Folder()
        for name, node in tree.items():
            parent, last = self._parent(name)
            parent.names[last] = _Folder() if node.kind == "folder" else _File(node, is_synced=True)
        self.files = dict[int, _File]()
        for inode, name in inodes.items():
            parent, last = self._parent(name)
            found = parent.names[last]
            assert isinstance(found, _File)
            self.files[inode] = found
        for folder in self._folders(self.root):
            folder.sync()

    def _folders(self, folder: _Folder) -> Iterator[_Folder]:
        yield folder
        for child in folder.names.values():
            if isinstance(child, _Folder):
                yield from self._folders(child)

    def _parent(self, path: str) -> tuple[_Folder, str]:
        assert not path.startswith("/"), f"{path}: a file outside the recorded folder"
        *folders, last = path.split("/")
        found = self.root
        for name in folders:
            child = found.names[name]
            assert isinstance(child, _Folder), path
            found = child
        return found, last

    def _folder(self, path: str) -> _Folder:
        if path == ".":
            return self.root
        parent, last = self._parent(path)
        found = parent.names[last]
        assert isinstance(found, _Folder), path
        return found

    def apply(self, operation: RecordedOperation) -> None:
        """Make the change of an operation."""
        path = operation.path
        match operation.kind:
            case "ack":
                return
            case "create" | "symlink":
                content = os.fsencode(operation.target)
                kind = "link" if operation.kind == "symlink" else "file"
                parent, last = self._parent(path)
                file = _File(Node(kind, content, operation.modified_ns), is_synced=kind == "link")
                parent.names[last] = self.files[operation.inode] = file
            case "mkdir":
                parent, last = self._parent(path)
                parent.names[last] = _Folder()
            case "unlink" | "rmdir":
                parent, last = self._parent(path)
                del parent.names[last]
            case "rename" | "rename by a library" | "link":
                self._rename(operation)
            case "sync folder":
                self._folder(path).sync()
            case "sync":
                self.files[operation.inode].sync()
            case _:
                file = self.files[operation.inode]
                file.last_only = self._changed(file.synced, operation)
                file.content = self._changed(file.content, operation)
                file.modified_ns = operation.modified_ns

    def _rename(self, operation: RecordedOperation) -> None:
        moved: _File | _Folder
        if operation.path.startswith("/"):
            # Another process has written and synced it.
            node = Node("file", operation.content, operation.modified_ns)
            moved = self.files[operation.inode] = _File(node, is_synced=True)
        else:
            parent, last = self._parent(operation.path)
            moved = parent.names[last]
            if operation.kind != "link":
                del parent.names[last]
        # A file that leaves the folder is removed from it.
        if not operation.target.startswith("/"):
            target, name = self._parent(operation.target)
            target.names[name] = moved

    @staticmethod
    def _changed(content: bytes, operation: RecordedOperation) -> bytes:
        """Content of a file after an operation on it."""
        match operation.kind:
            case "write":
                return _written(content, operation.offset, operation.content)
            case "mapped content":
                return operation.content
            case "truncate":
                return _resized(content, operation.offset)
            case "allocate":
                return _resized(content, max(len(content), operation.offset))
        raise AssertionError(operation.kind)

    def half_written(self, operation: RecordedOperation) -> Tree | None:
        """The tree if only half of the bytes of a write are there."""
        if operation.kind != "write" or operation.size < 2:
            return None
        file = self.files[operation.inode]
        half = operation.content[: operation.size // 2]
        content = _written(file.content, operation.offset, half)
        return self.tree(lambda other: content if other is file else other.content)

    def lost_files(self) -> dict[str, _File]:
        """Files with data that was not synced, by path."""
        return {
            name: file for name, file in self._walk(self.root, "", durable=False)
            if isinstance(file, _File) and file.is_lost
        }  # fmt: skip

    def losses(self) -> Iterator[tuple[str, Tree]]:
        """What a power loss leaves, with a name for each variant."""
        lost = self.lost_files()
        yield "all that was not synced is lost", self.tree(lambda file: file.synced, durable=True)
        yield "names that were not synced are lost", self.tree(durable=True)
        if not lost:
            return
        yield "data that was not synced is lost", self.tree(lambda file: file.synced)
        yield (
            "data that was not synced reads as zeros",
            self.tree(lambda file: _resized(file.synced, len(file.content))),
        )
        yield (
            "of data that was not synced, only the last write of each file is left",
            self.tree(lambda file: file.last_only),
        )
        if 2 <= len(lost) <= MAX_SINGLE_LOSSES:
            for name, single in lost.items():
                yield f"data of {name} that was not synced is lost", self._without(single)

    def _without(self, lost: _File) -> Tree:
        """The tree if only the data of one file is lost."""
        return self.tree(lambda file: file.synced if file is lost else file.content)

    def tree(
        self, content: Callable[[_File], bytes] | None = None, *, durable: bool = False
    ) -> dict[str, Node]:
        """All files and folders, with the current or the synced names."""
        tree = dict[str, Node]()
        for name, found in self._walk(self.root, "", durable=durable):
            if isinstance(found, _Folder):
                tree[name] = Node("folder")
                continue
            text = found.content if content is None or found.kind == "link" else content(found)
            is_old = text is found.synced
            tree[name] = Node(found.kind, text, found.synced_ns if is_old else found.modified_ns)
        return tree

    def _walk(
        self, folder: _Folder, prefix: str, *, durable: bool
    ) -> Iterator[tuple[str, _File | _Folder]]:
        for name, found in (folder.durable if durable else folder.names).items():
            yield prefix + name, found
            if isinstance(found, _Folder):
                yield from self._walk(found, f"{prefix}{name}/", durable=durable)


def simulate(
    operations: Sequence[RecordedOperation],
    inodes: Mapping[int, str],
    before: Tree,
    after: Tree,
) -> Iterator[CrashState]:
    """Return all different states in which a stop leaves a folder.

    Args:
        operations: Operations of the command.
        inodes: Path of each file before the command by its inode.
        before: The folder before the command.
        after: The folder after it, by which the recording is checked at the end.
    """
    system = _FileSystem(before, inodes)
    seen = set[int]()
    acknowledged = ""

    def new_state(
        operation: RecordedOperation | None, variant: str, tree: Tree
    ) -> Iterator[CrashState]:
        names = frozenset((name, node.kind, node.content) for name, node in tree.items())
        key = hash((names, acknowledged))
        if key in seen:
            return
        seen.add(key)
        number, kind, path = (
            (operation.number, operation.kind, operation.path) if operation else (0, "start", "")
        )
        label = f"operation {number} of {len(operations)} ({kind} {path}): {variant}"
        yield CrashState(number, kind, path, variant, label, acknowledged, tree)

    yield from new_state(None, "stopped before it", system.tree())
    for operation in operations:
        if operation.failed:
            continue
        if (half := system.half_written(operation)) is not None:
            yield from new_state(operation, "stopped in the middle of it", half)
        system.apply(operation)
        acknowledged += operation.acknowledged
        yield from new_state(operation, "stopped after it", system.tree())
        for variant, tree in system.losses():
            yield from new_state(operation, variant, tree)
    left = system.tree()
    wrong = sorted(name for name in left.keys() | after.keys() if left.get(name) != after.get(name))
    assert not wrong, f"the recording is not complete. It differs from the folder: {wrong[:9]}"
