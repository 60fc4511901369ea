"""Selection of the device and of the precision of a computation."""

from __future__ import annotations

from typing import Literal

import torch

from visavis.errors import RunError


def choose_device(name: str | torch.device | None = None, setting_name: str = "device") -> torch.device:
    """Resolve the name of a device.

    Args:
        name: Name of a device. None or "auto": CUDA if available, else the CPU.
        setting_name: Name of the setting in error messages.

    Returns:
        The device.

    Raises:
        RunError: If the name is not a device, or if CUDA is not available.
    """
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"{setting_name}: expected auto, cpu or cuda, got {name!r}. Set one of these devices.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"{setting_name}: expected an available device, got {name}, and torch finds no CUDA device. Set it to auto or cpu.")
    return device


def autocast_context(device: torch.device, setting: bool | Literal["auto", "float16"]) -> torch.autocast:
    """Build the context in which a device multiplies matrices in half precision.

    Args:
        device: The device.
        setting: Whether to use bfloat16. "auto": only if it is faster than float32. "float16": use float16.

    Returns:
        The autocast context.
    """
    if setting == "float16":
        return torch.autocast(device.type, torch.float16)
    return torch.autocast(device.type, torch.bfloat16, enabled=has_native_bfloat16(device) if setting == "auto" else setting)


def has_native_bfloat16(device: torch.device) -> bool:
    """Report whether a processor has instructions for bfloat16 products (AMX, AVX-512 bf16, ARM's bf16, CUDA from Ampere).

    Without them torch emulates bfloat16, more slowly than float32.

    Args:
        device: The device.

    Returns:
        Whether bfloat16 is native.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch before 2.10 does not report the capabilities of a CPU. It counts as a CPU without bfloat16.
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
