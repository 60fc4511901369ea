"""Where a model computes."""

from __future__ import annotations

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
