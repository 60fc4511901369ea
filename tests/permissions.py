"""Permissions in tests that run as root, which ignores them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which bypass the permissions of files and folders.
_BYPASS = 1 << 1 | 1 << 2


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Respect the permissions of files and folders in this block, in this thread and in those that
    it starts.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, capabilities = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()

    def call(function: str) -> None:
        if getattr(libc, function)(header, capabilities) != 0:
            raise OSError(ctypes.get_errno(), function)

    call("capget")
    effective = capabilities[0]
    capabilities[0] = effective & ~_BYPASS
    call("capset")
    try:
        yield
    finally:
        capabilities[0] = effective
        call("capset")
