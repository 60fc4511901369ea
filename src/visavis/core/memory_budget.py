"""Memory budget: the memory setting of a user, the memory that is free on a device or within a
container, and chunks of a size.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from visavis.core.errors import SpecError, format_value

if TYPE_CHECKING:
    import torch

MemoryLimit = int | str | None
"""A memory setting: bytes, a text such as "2GiB" or "500MB", or None for a share of the free
memory.
"""

RESERVED_BYTES = 2**27
"""Bytes of a setting that are left to libraries and their buffers. At most a quarter of the bytes
above ``SMALL_LIMIT_BYTES``.
"""
SMALL_LIMIT_BYTES = 2**25
"""A setting up to this size reserves nothing."""
MMAP_THRESHOLD_BYTES = 2**20
"""Size of an allocation from which the C library gives it pages of its own, in bytes."""
M_MMAP_THRESHOLD = -3
"""Number of the option of ``mallopt``, from ``malloc.h``."""
DEFAULT_MEMORY_SHARE = 0.25
"""Share of the free memory that is used without a setting."""
UNKNOWN_MEMORY_BYTES = 2**31
"""Free memory in bytes that is assumed where the system reports none."""
BYTE_UNITS = {"": 1, "b": 1} | {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)}
BYTE_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}


def parse_memory(memory: MemoryLimit, name: str = "memory") -> int | None:
    """Convert a memory setting to bytes.

    Args:
        memory: Bytes, a text such as "2GiB", or None.
        name: Name of the setting, for the error.

    Returns:
        Bytes. None stays None.

    Raises:
        SpecError: If ``memory`` is not a positive size.

    Example:
        >>> parse_memory("2GiB"), parse_memory("500 MB"), parse_memory(4096)
        (2147483648, 500000000, 4096)
    """
    if memory is None:
        return None
    is_size = isinstance(memory, str) or (
        isinstance(memory, SupportsIndex) and not isinstance(memory, bool) and 0 < memory < 10**18
    )
    text = str(memory) if is_size else ""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    size = int(float(match[1]) * BYTE_UNITS[match[2]]) if match and match[2] in BYTE_UNITS else 0
    if size <= 0:
        raise SpecError(
            f"{name}: expected bytes such as 2000000000, a text such as '2GiB' or '500MB', or "
            f"None, got {format_value(memory)}. "
            "Set a positive size, or None for the default."
        )
    return size


def budget_bytes(memory: MemoryLimit, device: torch.device | str) -> int:
    """Return the bytes that tensors may take on a device: the setting minus a reserve for libraries,
    or a share of the free memory.
    """
    size = parse_memory(memory)
    if size is None:
        # A power of two, so that a small change in the load of the machine changes no block size.
        return 2 ** max(int(DEFAULT_MEMORY_SHARE * free_bytes(device)).bit_length() - 1, 20)
    if _device_type(device) == "cpu":
        return_freed_memory()
    return size - min(max(size - SMALL_LIMIT_BYTES, 0) // 4, RESERVED_BYTES)


@cache
def return_freed_memory() -> None:
    """Give large tensors on the CPU pages of their own, which return to the system when the tensor
    is freed.
    """
    # Memory that the GNU C library takes from its heap stays there between other allocations, on
    # top of the budget. A value of the user's environment has priority.
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        import ctypes

        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def _device_type(device: torch.device | str) -> str:
    """Kind of a device. Its name is enough, so that a search on the CPU needs no torch."""
    return str(device).partition(":")[0]


def free_bytes(device: torch.device | str) -> int:
    """Return the bytes that are free on a device. On a CPU the limit of the container counts, too."""
    device_type = _device_type(device)
    if device_type == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SpecError(
                f'device: expected a device of this machine, got {device}. Set a memory such as "40GiB" to plan for another one.'
            )
        # Freed tensors, whose memory torch keeps for later ones.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device_type == "mps":
        import torch

        if not torch.backends.mps.is_available():
            raise SpecError(
                f'device: expected a device of this machine, got {device}. Set a memory such as "8GiB" to plan for another one.'
            )
        used = torch.mps.current_allocated_memory()
        return max(torch.mps.recommended_max_memory() - used, 0)
    limits = [free for free in (available_memory(), _free_in_container()) if free is not None]
    if limits:
        return min(limits)
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return UNKNOWN_MEMORY_BYTES


def available_memory() -> int | None:
    """Read the bytes of memory that Linux or Windows reports as available. None on other systems."""
    if sys.platform == "win32":
        import ctypes

        # MEMORYSTATUSEX: two numbers of 32 bits, then seven of 64 bits. The second one of those is
        # the available physical memory.
        status = (ctypes.c_uint64 * 8)()
        ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(status)
        kernel: Any = getattr(ctypes, "windll").kernel32  # noqa: B009 - other systems lack the name
        return int(status[2]) if kernel.GlobalMemoryStatusEx(ctypes.byref(status)) else None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None
    )


def _free_in_container() -> int | None:
    """Return the limit of the control group minus the used memory. The page cache does not count as
    used.
    """
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        counts = dict(
            line.split()
            for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        )
    except (OSError, ValueError):
        return None
    return (
        None if limit == "max" else max(int(limit) - used + int(counts.get("inactive_file", 0)), 0)
    )


def chunk_slices(length: int, chunk_size: int) -> list[slice]:
    """Split a range into consecutive slices.

    Args:
        length: Length of the range.
        chunk_size: Maximum length of a slice.

    Returns:
        The slices.

    Example:
        >>> chunk_slices(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + chunk_size, length)) for start in range(0, length, chunk_size)]


def format_bytes(size: float) -> str:
    """Format a number of bytes with a binary unit.

    Args:
        size: Bytes.

    Returns:
        Text with one decimal, without decimals below 1 KiB.

    Example:
        >>> format_bytes(3 * 2**29), format_bytes(2000)
        ('1.5 GiB', '2.0 KiB')
    """
    names = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(4) if size < 1024 ** (power + 1)), 4)
    return f"{size / 1024**power:.{min(power, 1)}f} {names[power]}"
