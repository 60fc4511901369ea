"""Where a model computes."""

from __future__ import annotations

from typing import Literal

import torch

from visavis.errors import RunError


def choose_device(name: str | torch.device | None = None, setting: str = "device") -> torch.device:
    """The device of a name; None and "auto" are CUDA where there is one, else the CPU.

    setting: what a sentence calls it. Raises RunError for what is no device, or for CUDA where there is none.
    """
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"{setting} is {name!r}, which is no device of torch: expected auto, cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"{setting} is {name}, but torch finds no CUDA device here: set it to auto or cpu.")
    return device


def autocast(device: torch.device, wanted: bool | Literal["auto"]) -> torch.autocast:
    """The context in which a device multiplies matrices in bfloat16: as wanted, or where it is faster than float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device) if wanted == "auto" else wanted)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the processor has instructions for products in bfloat16 (AMX, AVX-512 bf16, ARM's bf16, CUDA from Ampere on); else torch
    emulates them, more slowly than float32. A torch that cannot tell of CPUs (before 2.10) is taken to say no.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    tell = getattr(torch.cpu, "get_capabilities", dict[str, bool])
    return any(tell().get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
