"""Systems on which a test cannot run."""

from __future__ import annotations

import sys

import pytest

IS_EMULATED = hasattr(sys, "is_emulated")
"""Whether tests/emulation hides Linux, as for ``make test-platforms``."""

posix = pytest.mark.skipif(
    sys.platform == "win32", reason="it needs signals, permissions or files of POSIX"
)
changes_open_files = pytest.mark.skipif(
    sys.platform == "win32" or IS_EMULATED, reason="Windows does not change files that are open"
)
linux_calls = pytest.mark.skipif(
    sys.platform != "linux" or IS_EMULATED, reason="it tests calls that only Linux has"
)

MILVUS = pytest.param("milvus", marks=pytest.mark.slow)
OBJECT_STORAGE = pytest.param("s3", marks=pytest.mark.slow)
"""Stores whose packages `make slow` installs."""
