"""Faults that are planted in a copy of the code, to measure how many seeds find each:
``python -m tests.histories.planted_bugs [PART OF A NAME]``.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
MAX_SEEDS = 500
STORE = "retrieval/stores/sqlite_store.py"
ARRAY = "retrieval/stores/vector_array.py"
VOTES = "data/feedback/vote_table.py"


class PlantedBug(NamedTuple):
    """A fault: a text of a file, and what replaces it each time."""

    name: str
    file: str
    old: str
    new: str


BUGS = (
    PlantedBug(
        "vectors are not synced before the commit",
        ARRAY,
        "                disk.sync_file(file)\n",
        "                file.flush()\n",
    ),
    PlantedBug(
        "the name of a new file is not synced before the commit",
        ARRAY,
        "                disk.sync_path(self.path.parent)\n",
        "                pass\n",
    ),
    PlantedBug(
        "vectors are appended after the rest of a killed append",
        ARRAY,
        "file.seek(len(header) + num_rows * self.row_bytes)",
        "file.seek(len(header) if is_new else 0, 0 if is_new else 2)",
    ),
    PlantedBug(
        "a new file has the name of the former one", STORE, "part=old.part + 1", "part=old.part"
    ),
    PlantedBug(
        "a change has the version of the former one", STORE, "stored.version + 1", "stored.version"
    ),
    PlantedBug(
        "files of the former version are removed before the commit",
        STORE,
        "                    self.rewrite()\n                self._remove_other_files()\n",
        "                    self.rewrite()\n                    self._remove_other_files()\n",
    ),
    PlantedBug(
        "files of former versions are never removed",
        STORE,
        "if path.name not in kept and _OWN_FILES",
        "if False and _OWN_FILES",
    ),
    PlantedBug(
        "items are removed and added in two transactions",
        STORE,
        "            stored = self._remove([item.key for item in items])\n",
        "            stored = self._remove([item.key for item in items])\n"
        "            self._write(stored)\n"
        '            self.database.connection.execute("COMMIT")\n'
        '            self.database.connection.execute("BEGIN IMMEDIATE")\n'
        "            stored = self._current()\n",
    ),
    PlantedBug(
        "readers have no transaction",
        "retrieval/stores/index_database.py",
        '        with self._transaction("BEGIN"):\n            yield\n',
        "        yield\n",
    ),
    PlantedBug(
        "a search reads several versions",
        "retrieval/search.py",
        "    with collection.one_version():\n",
        "    if True:\n",
    ),
    PlantedBug(
        "an undo reads and writes in two transactions",
        VOTES,
        "        with self._change():\n            found = ",
        "        with nullcontext():\n            found = ",
    ),
    PlantedBug(
        "an undo removes the last vote of anybody",
        VOTES,
        '"UPDATE votes SET undone = ? WHERE vote = ?", (timestamp, vote)',
        '"UPDATE votes SET undone = ? WHERE number = (SELECT max(number) FROM votes WHERE undone IS NULL)", '
        "(timestamp,)",
    ),
    PlantedBug(
        "query model and scale are written in two transactions",
        "retrieval/build/index_queries.py",
        "    with closing(IndexDatabase(folder)) as database, database.change():\n",
        "    with closing(IndexDatabase(folder)) as database:\n",
    ),
    PlantedBug(
        "a server keeps the former query model",
        "retrieval/open_index.py",
        "if encoder is None or encoder.fingerprint != manifest.query_model.fingerprint:",
        "if encoder is None:",
    ),
    PlantedBug(
        "a folder is refused after a killed creation",
        "retrieval/index_folder.py",
        'file.name.endswith(".lock") or storage.name_of_part(file.name)',
        'file.name.endswith(".lock")',
    ),
    PlantedBug(
        "an index is opened with one try",
        "retrieval/open_index.py",
        "            if was_equal and newer == manifest:\n",
        "            if True:\n",
    ),
    PlantedBug(
        "updates do not exclude each other",
        "core/storage/folders.py",
        'return path.parent / f".{path.name}.lock"',
        'return path.parent / f".{path.name}.{os.urandom(4).hex()}.lock"',
    ),
)


def plant(bug: PlantedBug, folder: Path) -> None:
    """Copy the package into a folder, with a bug."""
    package = folder / "visavis"
    shutil.copytree(
        PROJECT / "src" / "visavis", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    file = package / bug.file
    code = file.read_text()
    if bug.old not in code:
        raise ValueError(f"{bug.name}: {bug.file} does not contain {bug.old!r}")
    file.write_text(code.replace(bug.old, bug.new))


def _find(bug: PlantedBug) -> str:
    """The first seed that finds a bug, in a process that has not imported the package."""
    with tempfile.TemporaryDirectory() as folder:
        plant(bug, Path(folder))
        sys.path.insert(0, folder)
        import visavis

        assert visavis.__file__.startswith(folder), visavis.__file__
        from tests.histories.history import run_history

        for seed in range(MAX_SEEDS):
            problems = run_history(seed).scheduler.problems
            if problems:
                lines = problems[0].strip().splitlines()
                return f"{seed}\t{bug.name}\t{lines[-1][:160]}"
    return f"{MAX_SEEDS}\t{bug.name}\tnot found"


def find_all(bugs: tuple[PlantedBug, ...] = BUGS, processes: int = 2) -> Iterator[str]:
    """Search for each bug in a process of its own."""
    # Imported once. The processes are forks, so that each only imports its own copy.
    for name in ("torch", "transformers", "numpy", "starlette.exceptions", "pydantic", "PIL.Image"):
        importlib.import_module(name)
    waiting = list(bugs)
    running = dict[int, int]()
    while waiting or running:
        while waiting and len(running) < processes:
            bug = waiting.pop(0)
            read, write = os.pipe()
            if (child := os.fork()) == 0:
                os.close(read)
                try:
                    line = _find(bug)
                except BaseException as error:  # noqa: BLE001 - reported by the parent
                    line = f"{MAX_SEEDS}\t{bug.name}\t{type(error).__name__}: {error}"
                os.write(write, line.encode())
                os._exit(0)
            os.close(write)
            running[child] = read
        child, _ = os.wait()
        with os.fdopen(running.pop(child)) as pipe:
            yield pipe.read()


if __name__ == "__main__":
    for found in find_all(
        tuple(bug for bug in BUGS if not sys.argv[1:] or sys.argv[1] in bug.name)
    ):
        print(found, flush=True)
