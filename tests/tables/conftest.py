"""Toys that stand for the data of every row."""

from __future__ import annotations

from pathlib import Path

import pytest

from .toy import write_toys


@pytest.fixture(scope="session")
def toys(tmp_path_factory) -> Path:
    return write_toys(tmp_path_factory.mktemp("toys"))
