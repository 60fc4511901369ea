"""Selection of the device and of the precision of a computation."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from visavis.core.errors import RunError


def choose_device(
    name: str | torch.device | None = None, setting_name: str = "device"
) -> torch.device:
    """Resolve a device. None or "auto": CUDA, else the GPU of an Apple computer, else the CPU."""
    if name in (None, "auto"):
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    problem = ""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about names of former backends
            device = torch.device(name)
    except RuntimeError:
        problem = f"auto, cpu, cuda or mps, got {name!r}. Set one of these devices."
    else:
        try:
            # Some backends exist by name only. A computation shows whether they work.
            torch.zeros(1, device=device).add(1).item()
        except Exception:  # noqa: BLE001 - each backend of torch has its own kind of error, and some are assertions or missing modules
            reason = "on which torch cannot compute here"
            if device.type == "cuda" and not torch.cuda.is_available():
                reason = "and torch finds no CUDA device"
            elif device.type == "mps" and not torch.backends.mps.is_available():
                reason = "and torch finds no GPU of an Apple computer"
            problem = f"an available device, got {name}, {reason}. Set it to auto or cpu."
    if problem:
        raise RunError(f"{setting_name}: expected {problem}")
    return device


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the random numbers of a device. A training does it before each step."""
    if device.type == "cpu":
        # torch.manual_seed also notes a stack trace for each kind of device that is not in use.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def autocast_context(
    device: torch.device, setting: bool | Literal["auto", "float16"]
) -> torch.autocast:
    """Build the context in which a device multiplies matrices in half precision. "auto": bfloat16,
    if it is faster than float32.
    """
    if setting == "float16":
        return torch.autocast(device.type, torch.float16)
    return torch.autocast(
        device.type,
        torch.bfloat16,
        enabled=has_native_bfloat16(device) if setting == "auto" else setting,
    )


def has_native_bfloat16(device: torch.device) -> bool:
    """Report whether a processor has instructions for bfloat16 products (AMX, AVX-512 bf16, ARM's
    bf16, CUDA from Ampere).
    """
    # Without them torch emulates bfloat16, more slowly than float32.
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch does not report which Apple GPUs have the instructions.
    if device.type == "mps":
        return False
    # torch before 2.10 does not report the capabilities of a CPU. It counts as a CPU without
    # bfloat16.
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
