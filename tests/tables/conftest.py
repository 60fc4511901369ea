"""Small data and encoders for every table row."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .toy import write_toys


@pytest.fixture(scope="session")
def toys(tmp_path_factory, towers) -> Path:
    folder = write_toys(tmp_path_factory.mktemp("toys"))
    for name in ("bert", "swin"):
        shutil.copytree(towers / name, folder / name)
    return folder
