"""What laws of objectives share."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            self.numel = max(self.numel, each.numel() if isinstance(each, torch.Tensor) else 0)
        return made


@pytest.fixture
def largest() -> Largest:
    """Within it, ``largest.numel`` is the size of the largest tensor made so far."""
    return Largest()
