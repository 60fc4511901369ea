"""Test environment: temporary caches and settings, no network, one thread, and real data if present.
The fixtures are in tests/fixtures.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.platforms import IS_EMULATED

PROJECT = Path(__file__).resolve().parents[1]
TESTS = PROJECT / "tests"

FIXTURES = ("environment", "data", "models", "runs")
"""Modules of tests/fixtures."""


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most expected values are those of a CPU
    shared_data = PROJECT.parent / "shared" / "data"
    if "VISAVIS_DATA" not in os.environ and shared_data.is_dir():
        os.environ["VISAVIS_DATA"] = str(shared_data)
    if not IS_EMULATED:
        _write_temporary_files_to_memory()
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="visavis-cache-")
    os.environ["VISAVIS_CACHE"] = config.stash[_CACHE]
    os.environ["VISAVIS_CONFIG"] = os.path.join(config.stash[_CACHE], "config")
    os.environ["HF_HOME"] = os.path.join(config.stash[_CACHE], "hub")
    os.environ["VISAVIS_TEXT_TOWERS"] = "0"  # an export takes 0.4 s, and few tests need it
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only distributes the tests, and needs no torch
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for name in FIXTURES:
        config.pluginmanager.import_plugin(f"tests.fixtures.{name}")


DATA_SETS = (
    "backbone",
    "coco_5k_test_text",
    "flickr8k",
    "flickr30k_text",
    "glove",
    "msvd_mini",
    "stsb",
)
"""Folders that the tests marked ``data`` read."""


def missing_data() -> list[str]:
    """Names of the data sets that ``VISAVIS_DATA`` lacks."""
    folder = os.environ.get("VISAVIS_DATA")
    return [
        name for name in DATA_SETS if not folder or not os.path.isdir(os.path.join(folder, name))
    ]


_CACHE = pytest.StashKey[str]()


def _write_temporary_files_to_memory() -> None:
    """Use the file system in memory, where writing to disk takes a tenth of the suite's CPU time. A
    given TMPDIR is respected.
    """
    memory = Path("/dev/shm")
    if (
        "TMPDIR" not in os.environ
        and os.access(memory, os.W_OK)
        and shutil.disk_usage(memory).free >= 4 * 2**30
    ):
        os.environ["TMPDIR"] = tempfile.tempdir = str(memory)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: it took 7 of 19 CPU s to visit the imported modules
    again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(
            10_000, 20, 50
        )  # collections take 1.2 s instead of 3 of each worker in the tests of training
        gc.enable()


# A module that starts with such a mark is imported only if the mark expression selects its tests:
# the packages of such modules take 4 of 16 CPU s of collection in each process.
_MARK_OF_MODULE = re.compile(
    r"^pytestmark = (?:\[\s*)?pytest\.mark\.(slow|long|site)\b", re.MULTILINE
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a module whose tests are all deselected, unless it is named on the command line."""
    if collection_path.suffix != ".py" or TESTS not in collection_path.parents:
        return None
    named = {Path(argument.partition("::")[0]).absolute() for argument in config.args}
    if collection_path in named:
        return None
    mark = _MARK_OF_MODULE.search(collection_path.read_text(encoding="utf-8"))
    deselected = mark is not None and f"not {mark[1]}" in config.option.markexpr
    return True if deselected else None


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("data") and (missing := missing_data()):
        pytest.skip(
            f"real data sets are missing: {', '.join(missing)}. Set VISAVIS_DATA to their folder"
        )
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
