"""Random histories of a folder: parts become unreadable, unmounted, moved, replaced or damaged
between updates of its index.

A model of the folder knows which files exist, also where nobody can read them. After each update
the index contains exactly the files that exist and can be decoded, and those that may still exist.
A history runs in a process of an ordinary user, because root ignores permissions.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.permissions import as_ordinary_user
from tests.processes import Command

import visavis
from visavis.models.retriever import Retriever
from visavis.retrieval.index_folder import is_index, read_manifest
from visavis.retrieval.stores.catalog import open_store

FOLDERS = ("", "a", "a/b", "a/c", "d", "d/e", "d/e/f", "g")


def png(number: int) -> bytes:
    """A small image. Many have the same size in bytes."""
    file = io.BytesIO()
    Image.new(
        "RGB",
        (24, 24),
        tuple(int(value) for value in np.random.default_rng(number).integers(0, 255, 3)),
    ).save(file, "PNG")
    return file.getvalue()


def content_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of some folders or below one. ``""`` is the whole folder."""
    return any(folder in ("", path) or path.startswith(f"{folder}/") for folder in folders)


@dataclass
class World:
    """A folder, and what is true about it."""

    root: Path
    drives: Path
    random: random.Random
    files: dict[str, bytes] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    locked_files: set[str] = field(default_factory=set)
    locked: dict[str, list[str] | None] = field(default_factory=dict)
    """Folders without permission, and the names in them that can still be listed."""
    unmounted: dict[str, Path] = field(default_factory=dict)
    clock: int = 10**18
    number: int = 0

    @property
    def hidden(self) -> set[str]:
        """Folders that nobody can look into."""
        return {*self.locked, *self.unmounted}

    def visible_files(self) -> list[str]:
        return sorted(path for path in self.files if not is_below(path, self.hidden))

    def visible_folders(self) -> list[str]:
        return [
            folder
            for folder in FOLDERS
            if not is_below(folder, self.hidden) and (self.root / folder).is_dir()
        ]

    def write(self, path: str, content: bytes) -> None:
        self.clock += 10**9
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        if path in self.locked_files:
            os.chmod(self.root / path, 0o644)
            self.locked_files.discard(path)
        (self.root / path).write_bytes(content)
        os.utime(self.root / path, ns=(self.clock, self.clock))
        self.files[path] = content
        self.damaged.discard(path)

    def new_image(self) -> bytes:
        """Usually a new one, sometimes a copy."""
        if self.files and self.random.random() < 0.15:
            path = self.random.choice(sorted(self.files))
            if path not in self.damaged:
                return self.files[path]
        self.number += 1
        return png(self.number)

    def forget(self, path: str) -> None:
        self.files.pop(path)
        self.damaged.discard(path)
        self.locked_files.discard(path)

    def add(self) -> None:
        folders = [folder for folder in FOLDERS if not is_below(folder, self.hidden)]
        for _ in range(self.random.randint(1, 3) if folders else 0):
            self.write(
                os.path.join(self.random.choice(folders), f"{self.random.randint(0, 30)}.png"),
                self.new_image(),
            )

    def replace(self) -> None:
        if files := self.visible_files():
            self.write(self.random.choice(files), self.new_image())

    def truncate(self) -> None:
        if files := [path for path in self.visible_files() if path not in self.damaged]:
            path = self.random.choice(files)
            self.write(path, self.files[path][: self.random.choice((0, 20, 60))])
            self.damaged.add(path)

    def delete(self) -> None:
        files = self.visible_files()
        for path in self.random.sample(files, min(len(files), self.random.randint(1, 3))):
            (self.root / path).unlink()
            self.forget(path)

    def delete_folder(self) -> None:
        folder = self.random.choice(FOLDERS[1:])
        if folder in self.visible_folders() and not any(
            is_below(other, [folder]) for other in self.hidden
        ):
            shutil.rmtree(self.root / folder)
            for path in [path for path in self.files if is_below(path, [folder])]:
                self.forget(path)

    def rename(self) -> None:
        if files := self.visible_files():
            old = self.random.choice(files)
            new = os.path.join(
                self.random.choice(self.visible_folders()), f"{self.random.randint(0, 40)}.png"
            )
            if old != new:
                self._move(old, new)

    def _move(self, old: str, new: str) -> None:
        if new in self.files:
            self.forget(new)
        os.rename(self.root / old, self.root / new)
        for known in (self.damaged, self.locked_files):
            if old in known:
                known.discard(old)
                known.add(new)
        self.files[new] = self.files.pop(old)

    def rename_folder(self) -> None:
        old, new = self.random.sample(FOLDERS[1:], 2)
        contains_hidden = any(is_below(other, [old]) for other in self.hidden)
        is_possible = (
            old in self.visible_folders()
            and not contains_hidden
            and not is_below(new, [old, *self.hidden])
        )
        if is_possible and not (self.root / new).exists():
            (self.root / new).parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.root / old, self.root / new)
            for path in [path for path in self.files if is_below(path, [old])]:
                moved = new + path[len(old) :]
                for known in (self.damaged, self.locked_files):
                    if path in known:
                        known.discard(path)
                        known.add(moved)
                self.files[moved] = self.files.pop(path)

    def lock(self) -> None:
        """Take the permission to list a folder, or only that to open its files."""
        folder = self.random.choice(FOLDERS)
        if folder in self.visible_folders():
            mode = self.random.choice((0o000, 0o444, 0o111))
            self.locked[folder] = os.listdir(self.root / folder) if mode == 0o444 else None
            os.chmod(self.root / folder, mode)

    def unlock(self) -> None:
        for folder in sorted(self.locked):
            if not is_below(folder, self.hidden - {folder}):
                os.chmod(self.root / folder, 0o755)
                del self.locked[folder]

    def lock_file(self) -> None:
        if files := self.visible_files():
            path = self.random.choice(files)
            os.chmod(self.root / path, 0o000)
            self.locked_files.add(path)

    def unmount(self) -> None:
        folder = self.random.choice(FOLDERS)
        contains_hidden = any(is_below(other, [folder]) for other in self.hidden)
        if (
            folder in self.visible_folders()
            and not contains_hidden
            and any(is_below(path, [folder]) for path in self.files)
        ):
            drive = self.drives / f"{self.random.random()}"
            drive.mkdir()
            for child in (self.root / folder).iterdir():
                os.rename(child, drive / child.name)
            self.unmounted[folder] = drive

    def mount(self) -> None:
        for folder, drive in list(self.unmounted.items()):
            if not is_below(folder, self.hidden - {folder}):
                for child in drive.iterdir():
                    os.rename(child, self.root / folder / child.name)
                del self.unmounted[folder]

    def link(self) -> None:
        for folder in self.random.sample(
            self.visible_folders(), k=min(1, len(self.visible_folders()))
        ):
            link = (
                self.root
                / folder
                / f"link{self.random.randint(0, 10**6)}{self.random.choice(('', '.png'))}"
            )
            link.symlink_to(self.random.choice((link.parent, self.root, link, "nowhere", "/etc")))

    def junk(self) -> None:
        for folder in self.random.sample(
            self.visible_folders(), k=min(1, len(self.visible_folders()))
        ):
            for name in ("@eaDir/1.png", ".thumbnails/2.png", "._3.png", "$Recycle.Bin/4.png"):
                path = self.root / folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(png(1000))

    def expected(
        self, before: dict[str, str], *, remove_missing: bool
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The content of each path in the index after an update, and the reason why a file is kept
        that was not read.
        """
        now, kept = dict[str, str](), dict[str, str]()
        for path in self.visible_files():
            content = content_hash(self.files[path])
            if path in self.damaged and path not in self.locked_files:
                continue
            if path not in self.locked_files or before.get(path) == content:
                now[path] = content
            elif path in before:
                now[path], kept[path] = before[path], path
        new = {content for path, content in now.items() if before.get(path) != content}
        missing = []
        for path, content in before.items():
            if path in now or (path in self.files and not is_below(path, self.hidden)):
                continue
            if (folder := self.locked_folder(path)) is not None:
                now[path], kept[path] = content, folder or "."
            elif content not in new:
                missing.append(path)
        for path in missing:
            if not remove_missing and (
                len(missing) * 2 > len(before) or self.empty_folder(path) is not None
            ):
                now[path], kept[path] = before[path], self.empty_folder(path) or ""
        return now, kept

    def locked_folder(self, path: str) -> str | None:
        """The place because of which nobody knows whether a file exists."""
        for folder, names in sorted(self.locked.items()):
            if is_below(path, [folder]):
                name = path.removeprefix(f"{folder}/").split("/")[0]
                if names is None or name in names:
                    return folder if names is None else f"{folder}/{name}".removeprefix("/")
        return None

    def empty_folder(self, path: str) -> str | None:
        """The first folder above a path without visible content."""
        parents = [parent.as_posix() for parent in Path(path).parents]
        for parent in parents:
            with suppress(OSError):
                if all(name[0] in ".@$" for name in os.listdir(self.root / parent)):
                    return parent
        return None


OPERATIONS = (
    *(World.add,) * 3,
    World.replace,
    World.truncate,
    World.delete,
    World.delete_folder,
    *(World.rename,) * 2,
    World.rename_folder,
    *(World.lock,) * 2,
    World.unlock,
    World.lock_file,
    *(World.unmount,) * 2,
    World.mount,
    World.link,
    World.junk,
)


def read_index(folder: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Content and vector of each path."""
    store = open_store(str(folder), None, index_id=read_manifest(folder).index_id)
    items = store.table().items()
    vectors = store.vectors([item.key for item in items])
    store.close()
    return {item.path: item.content for item in items}, dict(
        zip((item.path for item in items), vectors, strict=True)
    )


def check_history(seed: int, folder: Path, vector_of) -> int:
    """Run a history. Returns the number of updates."""
    world = World(folder / "photos", folder / "drives", random.Random(seed))
    world.root.mkdir()
    world.drives.mkdir()
    for _ in range(3):
        world.add()
    done, before = ["start"], dict[str, str]()
    for step in range(5):
        if step:
            for operation in world.random.choices(OPERATIONS, k=world.random.randint(1, 3)):
                operation(world)
                done.append(operation.__name__)
        if step == 4:
            # Everything can be read again, in the order of nesting.
            for _ in range(3):
                world.unlock()
                world.mount()
            for path in world.locked_files:
                os.chmod(world.root / path, 0o644)
            world.locked_files.clear()
        remove_missing = step == 4 or world.random.random() < 0.1
        if step == 4 and world.random.random() < 0.5 and world.visible_files():
            world.root = world.root.rename(folder / "moved")
            done.append("moved")
        done.append(f"update{' --remove-missing' if remove_missing else ''}")
        if not before and not world.visible_files():
            continue
        try:
            index = folder / "index"
            if done[-2] == "moved":
                report = visavis.indexes_move(index, world.root, remove_missing=remove_missing)
            elif remove_missing and is_index(index):
                report = visavis.indexes_prune(index)
            else:
                report = visavis.index("model", world.root, out=index)
            now, vectors = read_index(index)
            expected, kept = world.expected(before, remove_missing=remove_missing)
            assert now == expected, f"{now.items() ^ expected.items()}, hidden: {world.hidden}"
            # No item is lost that still exists or may exist, unless its content was found under a
            # new name.
            for path in before:
                if path in world.files and is_below(
                    path, world.locked if remove_missing else world.hidden
                ):
                    assert path in now or before[path] in now.values()
            for path, vector in vectors.items():
                assert np.abs(vector - vector_of(now[path])).max() < 1e-4
            assert report.num_items == len(now)
            assert report.num_kept == len(kept)
            assert {*report.removed, *report.moved_from} == before.keys() - now.keys()
            for place in set(kept.values()):
                shown = {"": "files are missing", ".": str(world.root)}.get(place, place)
                assert any(shown in warning for warning in report.warnings), (
                    place,
                    report.warnings,
                )
            for path in world.damaged - world.locked_files:
                if not is_below(path, world.hidden):
                    assert any(path in problem for problem in report.skipped), (
                        path,
                        report.skipped,
                    )
            assert not any("@eaDir" in path or ".thumbnails" in path for path in now)
            before = now
        except Exception as error:
            error.add_note(", ".join(done))
            raise
    return len(done)


def run_histories() -> None:
    """Check the histories of the seeds from the first to the second argument, with the model of the
    third one, as an ordinary user.
    """
    model = visavis.load(sys.argv[3])
    vectors = {content_hash(png(number)): None for number in range(1, 200)}
    numbers = {content_hash(png(number)): number for number in range(1, 200)}

    def vector_of(content: str) -> np.ndarray:
        if vectors[content] is None:
            [vectors[content]] = model.encode_images(
                [Image.open(io.BytesIO(png(numbers[content])))]
            ).numpy()
        return vectors[content]

    # One model serves all updates.
    Retriever.load = functools.partial(lambda *_, **__: model)
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        with tempfile.TemporaryDirectory() as folder, as_ordinary_user():
            try:
                check_history(seed, Path(folder), vector_of)
            except Exception as error:
                error.add_note(f"history {seed}")
                raise
            finally:
                for parent, folders, _ in os.walk(folder):
                    for name in folders:
                        os.chmod(Path(parent, name), 0o755)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
@pytest.mark.parametrize(
    ("first", "last"), [(0, 20), pytest.param(20, 300, marks=pytest.mark.long)]
)
def test_index_keeps_files_that_may_exist(run, tmp_path, first, last):
    command = Command(tmp_path / "output", first, last, run, program=run_histories)
    code = command.wait(3600)
    assert code == 0, command.output_text[-5000:]
