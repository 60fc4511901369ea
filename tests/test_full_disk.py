"""A disk that is full at a random byte of indexing, training and comparing: nothing that was saved
is lost, and a rerun completes.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.retrieval.open_index import open_index

pytestmark = pytest.mark.slow

DISK_BYTES = 2**25
READERS: dict[str, Callable[[Path], Any]] = {
    ".json": storage.read_json,
    ".jsonl": storage.read_json_lines,
    ".toml": storage.read_toml,
    ".safetensors": storage.read_tensors,
    ".npy": lambda path: storage.read_array(path, kinds="fiu"),
}


class Inputs(NamedTuple):
    """A data set, a recipe, a run and an index of the first images."""

    root: Path
    scenes: Path
    recipe: Path
    run: Path
    index: Path


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system, which also holds the cache. Skipped if it cannot be mounted."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder]
    if (
        sys.platform != "linux"
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("a small file system cannot be mounted on this machine")
    before, os.environ["VISAVIS_CACHE"] = os.environ["VISAVIS_CACHE"], str(folder / "cache")
    yield folder
    os.environ["VISAVIS_CACHE"] = before
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def inputs(few_scenes: Path, tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Inputs:
    root = tmp_path_factory.mktemp("inputs")
    write_recipe(root / "recipe.toml", training={"checkpoint_s": 0})
    run = visavis.train(root / "recipe.toml", data=few_scenes, out=root / "run").run
    (root / "photos").mkdir()
    images = sorted((few_scenes / "images").rglob("*.png"))
    for image in images[:8]:
        shutil.copy(image, root / "photos")
    visavis.index(run, root / "photos", out=root / "index")
    for image in images[8:]:
        shutil.copy(image, root / "photos")
    shutil.rmtree(disk / "cache")
    return Inputs(root, few_scenes, root / "recipe.toml", run, root / "index")


def index(inputs: Inputs, folder: Path) -> Any:
    visavis.index(inputs.run, inputs.root / "photos", out=folder)
    opened = open_index(folder)
    keys = sorted(opened.items)
    vectors = dict(zip(keys, opened.store.vectors(keys).tolist(), strict=True))
    opened.store.close()
    return vectors


def train(inputs: Inputs, folder: Path) -> Any:
    resume = (folder / "run.toml").exists()
    options = (
        {"resume": folder}
        if resume
        else {"recipe": inputs.recipe, "data": inputs.scenes, "out": folder}
    )
    result = visavis.train(**options)
    return result.test.metrics, storage.tensors_hash(
        storage.read_tensors(folder / "model" / "model.safetensors")
    )


def compare(inputs: Inputs, folder: Path) -> Any:
    objectives = ["VLC()", "NTXent()"]
    new = {
        "objective": objectives,
        "recipe": inputs.recipe,
        "data": inputs.scenes,
        "seeds": 1,
        "out": folder,
    }
    comparison = visavis.compare(
        **({"resume": folder} if (folder / "plan.json").exists() else new), workers=1
    )
    return {run.setting: run.metrics for run in comparison.outcomes}


COMMANDS = {"index": index, "update": index, "train": train, "compare": compare}


def occupied(disk: Path) -> int:
    status = os.statvfs(disk)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def check_saved(folder: Path, name: str, before: dict[str, Any]) -> dict[str, Any]:
    """Check that every file is readable and that nothing is lost. Return the content that must be
    kept.
    """
    for path in folder.rglob("*"):
        if (
            path.is_file()
            and not any(part.endswith(".part") for part in path.parts)
            and path.suffix in READERS
        ):
            READERS[path.suffix](path)
    if name == "update":
        opened = open_index(folder)
        items = set(opened.items)
        opened.store.close()
        assert items >= before.get("items", set())
        return {"items": items}
    if name == "compare":
        outcomes = {str(path): path.stat().st_mtime_ns for path in folder.glob("*/outcome.json")}
        assert all(
            outcomes[path] == changed for path, changed in before.get("outcomes", {}).items()
        )
        return {"outcomes": outcomes}
    return {}


def prepare(name: str, disk: Path, inputs: Inputs) -> Path:
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if name == "update":
        shutil.copytree(inputs.index, disk / name)
    return disk / name


def fill(disk: Path, free: int) -> Path:
    """Occupy the disk except for some bytes."""
    filler = disk / "filler"
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(DISK_BYTES - occupied(disk) - free, 1))
    return filler


def error_of(command: Callable[[Inputs, Path], Any], inputs: Inputs, folder: Path) -> str:
    """Message of the error with which a command ends, or no text."""
    try:
        command(inputs, folder)
    except VisavisError as error:
        return str(error)
    return ""


CASES = [
    *(
        pytest.param(name, 2, marks=pytest.mark.long if name == "compare" else ())
        for name in COMMANDS
    ),
    *(
        pytest.param(name, 50, marks=[pytest.mark.long, pytest.mark.timeout(3000)])
        for name in COMMANDS
    ),
]


@pytest.mark.parametrize(("name", "points"), CASES)
def test_command_on_full_disk_keeps_results_and_reruns(name, points, disk, inputs, monkeypatch):
    monkeypatch.chdir(inputs.root)
    command, rng, messages = COMMANDS[name], random.Random(name), list[str]()
    folder = prepare(name, disk, inputs)
    empty = occupied(disk)
    expected = command(inputs, folder)
    needed = occupied(disk) - empty
    for _ in range(points):
        folder = prepare(name, disk, inputs)
        saved = check_saved(folder, name, {})
        free = rng.randrange(needed)
        filler = fill(disk, free)
        messages.append(error_of(command, inputs, folder))
        filler.unlink()
        saved = check_saved(folder, name, saved)
        assert command(inputs, folder) == expected, free
        check_saved(folder, name, saved)
        assert not list(disk.rglob("*.part")), free
    assert any(messages)
    for message in filter(None, messages):
        assert "\n" not in message and len(message) < 400, message
        # A folder exists from the first checkpoint on. The command itself is refused then.
        again = [f"continue with --resume {folder}"] if name in ("train", "compare") else []
        advice = [
            f"No space left on device. Free space and {fix}."
            for fix in ("run the command again", *again)
        ]
        assert any(text in message for text in advice) and "delete it" not in message, message
