"""The room tests run in: a cache of their own, no network, one thread, fixed seeds, and the real data where it is present."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

PROJECT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("visavis", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("visavis")


def pytest_configure(config: pytest.Config) -> None:
    beside = PROJECT.parent / "shared" / "data"
    if "VISAVIS_DATA" not in os.environ and beside.is_dir():
        os.environ["VISAVIS_DATA"] = str(beside)
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="visavis-cache-")
    os.environ["VISAVIS_CACHE"] = config.stash[_CACHE]
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


_CACHE = pytest.StashKey[str]()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("data") and not Path(os.environ.get("VISAVIS_DATA", "")).is_dir():
        pytest.skip("the real data sets are absent: set VISAVIS_DATA to their folder")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets; for tests marked ``data``."""
    return Path(os.environ["VISAVIS_DATA"])


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test begins with the same random state, in whatever order tests run."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - other packages draw from the global state
    random.seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
