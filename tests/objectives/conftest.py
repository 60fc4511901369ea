"""Fixtures of the objective tests."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that is created."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            self.numel = max(self.numel, each.numel() if isinstance(each, torch.Tensor) else 0)
        return made


@pytest.fixture
def largest() -> Largest:
    """A context in which ``largest.numel`` is the size of the largest tensor created so far."""
    return Largest()
